"""The nouns that every part of Atoll talks about.

Money is in US dollars, prices in US dollars per million tokens, time in seconds. Everything here is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

CAPABILITIES: Final = frozenset({"tools", "vision", "json_schema", "logprobs", "embeddings"})
"""What a candidate can be required to do."""

TOKENS_PER_PRICE_UNIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call, normalised at the edge whatever the provider's convention.

    `prompt_tokens` includes `cached_tokens`; `completion_tokens` includes `reasoning_tokens`. `is_estimated` is true
    when no upstream told us (a cancelled stream, say).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    is_estimated: bool = False

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A thing that can be routed to: a model at an upstream, at one effort.

    The same model at two efforts is two candidates. `name` is what clients ask for and what the ledger shows; `model`
    is what the upstream calls it.
    """

    name: str
    model: str
    upstream: str
    effort: str | None = None
    """Reasoning effort sent to the upstream as `reasoning_effort`, or None to send nothing."""
    input_usd_per_mtok: float = 0.0
    cached_input_usd_per_mtok: float | None = None
    """None means that cached input is billed like any other input."""
    output_usd_per_mtok: float = 0.0
    context_tokens: int | None = None
    """Prompt and answer together; None where unknown (then nothing is ruled out by length)."""
    max_output_tokens: int | None = None
    capabilities: frozenset[str] = field(default_factory=frozenset)
    sees_private_data: bool = False
    """Whether private data may be sent there (a candidate's trust domain)."""
    quality_prior: float | None = None
    """Expected quality in [0, 1] before anything was observed; None lets the router's prior decide."""
    aliases: tuple[str, ...] = ()
    """Other names under which a prior or an outcome table may know this model."""
    parameters_billion: float | None = None
    """Size, where known; helps to guess the quality of a model without a price."""

    def cost_usd(self, usage: Usage) -> float:
        """What `usage` costs here. Never negative: (prompt - cached)*in + cached*cached_in + completion*out."""
        cached_tokens = min(max(usage.cached_tokens, 0), max(usage.prompt_tokens, 0))
        cached_price = (
            self.input_usd_per_mtok if self.cached_input_usd_per_mtok is None else self.cached_input_usd_per_mtok
        )
        total = (
            (max(usage.prompt_tokens, 0) - cached_tokens) * self.input_usd_per_mtok
            + cached_tokens * cached_price
            + max(usage.completion_tokens, 0) * self.output_usd_per_mtok
        )
        return total / TOKENS_PER_PRICE_UNIT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened for one (prompt, candidate). None is unknown, never zero."""

    prompt: str
    candidate: str
    quality: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    latency_s: float | None = None
    propensity: float | None = None
    """The probability with which this candidate had been chosen; None for full-information tables."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A router's prediction for one (prompt, candidate)."""

    candidate: str
    quality: float
    quality_std: float
    """One standard deviation of `quality`: how unsure the router is."""
    output_tokens: float
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Preference:
    """What the caller wants to pay for: 0 = cheapest acceptable, 1 = best quality whatever it costs."""

    quality_weight: float = 0.5
    max_cost_usd: float | None = None
    """A hard cap on the estimated cost of this one call."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate answers, and why."""

    candidate: str
    alternatives: tuple[str, ...]
    """The other eligible candidates, best first: the order in which attempts fall back."""
    router: str
    router_version: str
    reason: str
    """One sentence for a person."""
    estimates: Sequence[Estimate] = ()
    scores: Sequence[float] = ()
    """One per estimate: what the decision ranked by."""
    propensity: float = 1.0
    """The probability with which `candidate` was chosen; 1.0 where nothing was explored."""
    preference: Preference = Preference()
    is_fallback: bool = False
    """True when routing failed and the default candidate was taken."""
