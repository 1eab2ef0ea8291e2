"""The contract of everything that runs a model for us: `Engine`, what it is asked and what it answers.

An engine takes token ids and gives text: prompts are rendered and tokenised by its caller (`codec.py`), answers are
detokenised inside, because stop strings are found in text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. The defaults are OpenAI's."""

    temperature: float = 1.0
    """In [0, 2]; 0 takes the most likely token."""
    top_p: float = 1.0
    """In [0, 1]; only the smallest set of tokens with at least this much probability is drawn from."""
    seed: int | None = None
    """The same seed and request give the same answer, as far as a batch's company leaves the numbers alone."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to what is added to its logit."""

    @property
    def is_plain(self) -> bool:
        """Whether the logits are taken as they are."""
        return not (self.presence_penalty or self.frequency_penalty or self.logit_bias)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and what is wanted for it."""

    prompt_ids: Sequence[int]
    max_tokens: int | None = None
    """None is `Engine.default_max_tokens`, or what fits if that is less."""
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these; none is ever given out, not even its beginning."""
    choices: int = 1
    """How many answers (OpenAI's `n`). Choice i draws from a generator of its own, whatever `choices` is."""
    top_logprobs: int | None = None
    """None gives no log-probabilities, k those of the chosen token and of the k most likely ones."""
    ignore_end: bool = False
    """Go on after the model's end token, up to `max_tokens` (for benchmarks)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the model itself (before temperature, penalties and top_p)."""

    token_id: int
    text: str
    raw: bytes
    """The token's bytes; they need not be whole characters."""
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place, best first."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step added to one choice. The last event of a choice has a `finish_reason`."""

    choice: int
    text: str
    """May be empty: text waits for whole characters and while it could still become a stop string."""
    tokens: tuple[TokenLogprob, ...] = ()
    """The tokens of `text`, when log-probabilities were asked for."""
    finish_reason: FinishReason | None = None
    completion_tokens: int = 0
    """All that were drawn for this choice so far, with the end token and those of a stop string."""
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and how things stand now."""

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    """Tokens whose keys and values are held now."""
    kv_tokens_reserved: int = 0
    """Room for tokens that sequences hold, used or not."""
    kv_tokens_budget: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preempted: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Engine(ABC):
    """A running model. All methods belong to one event loop; none blocks it.

    Many requests run at once. An engine that is closed, or that fails, ends every iterator with an EngineError.
    """

    model_name: str
    context_tokens: int
    """Prompt and answer together."""
    default_max_tokens: int
    """For requests that name none."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Answer a prompt; choices come interleaved, each one's events in order.

        Closing the iterator (or cancelling the task that awaits it) frees the sequences before the next step. Raises
        ContextOverflow, RateLimited (too many wait already) and InvalidRequest before the first event, EngineError at
        any time.
        """

    @abstractmethod
    async def embed(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Mean of the last hidden states of each prompt, unit length, float32 of shape (n, hidden size).

        Raises like `generate`.
        """

    @abstractmethod
    async def score(self, prompt_ids: Sequence[int], top_logprobs: int = 0) -> list[TokenLogprob]:
        """Log-probability of every token of a text but the first, which has no left context. Raises like `generate`."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """How the engine stands, at once."""

    @abstractmethod
    async def close(self) -> None:
        """End everything that runs and free the model. Idempotent."""
