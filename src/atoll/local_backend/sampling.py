"""Drawing the next token of many sequences at once.

Every choice has a random generator of its own and uses one number of it for each token: the place in the cumulated
distribution, in vocabulary order, where the token lies. So what a choice draws does not depend on who else is in the
batch, and small numeric differences move a border by as little.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from atoll.local_backend.engine import Sampling

_MIN_TEMPERATURE: Final = 1e-4
"""Below this the most likely token is taken: the division would gain nothing but overflow."""
_NUCLEUS_TRY: Final = 256
"""How many of the most likely tokens are sorted first; the whole vocabulary where they do not reach top_p."""


@dataclass(slots=True)
class Draw:
    """What is needed to draw for one choice, and what it has drawn."""

    sampling: Sampling
    generator: random.Random
    top_logprobs: int | None = None
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token was drawn; kept only where a penalty asks for it."""

    @classmethod
    def for_choice(cls, sampling: Sampling, choice: int, top_logprobs: int | None) -> Draw:
        generator = random.Random() if sampling.seed is None else random.Random(f"{sampling.seed}:{choice}")  # noqa: S311
        return cls(sampling, generator, top_logprobs)

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < _MIN_TEMPERATURE

    @property
    def is_plain_greedy(self) -> bool:
        return self.is_greedy and self.sampling.is_plain and self.top_logprobs is None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token; log-probabilities are natural, and None where they were not asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One token for each row of `logits`, which has shape (len(draws), vocabulary)."""
    if all(draw.is_plain_greedy for draw in draws):
        return [Drawn(token_id) for token_id in _most_likely(logits)]
    scores = logits.float()
    adjusted = _adjusted(scores, draws)
    token_ids = _most_likely(adjusted)
    random_rows = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    if random_rows:
        picked = _draw_randomly(adjusted[random_rows], [draws[row] for row in random_rows])
        for row, token_id in zip(random_rows, picked, strict=True):
            token_ids[row] = token_id
    for draw, token_id in zip(draws, token_ids, strict=True):
        if draw.sampling.presence_penalty or draw.sampling.frequency_penalty:
            draw.counts[token_id] += 1
    return _with_logprobs(scores, token_ids, [draw.top_logprobs for draw in draws])


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], top_logprobs: int) -> list[Drawn]:
    """Log-probability of given tokens, one for each row of `logits`."""
    return _with_logprobs(logits.float(), token_ids, [top_logprobs] * len(token_ids))


def _most_likely(scores: torch.Tensor) -> list[int]:
    """`argmax` for each row, by way of `max`: on a CPU in bfloat16 that takes a fifth of the time."""
    token_ids: list[int] = scores.max(dim=-1).indices.tolist()
    return token_ids


def _adjusted(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """OpenAI's logit bias and penalties: bias + score - count * frequency - (count > 0) * presence."""
    if all(draw.sampling.is_plain for draw in draws):
        return scores
    scores = scores.clone()
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        changes = Counter(dict(sampling.logit_bias))
        for token_id, count in draw.counts.items():
            changes[token_id] -= count * sampling.frequency_penalty + sampling.presence_penalty  # type: ignore[assignment]
        if changes:
            places = torch.tensor(list(changes), device=scores.device)
            scores[row, places] += torch.tensor(list(changes.values()), dtype=scores.dtype, device=scores.device)
    return scores


def _draw_randomly(scores: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], device=scores.device)
    probabilities = torch.softmax(scores / temperatures[:, None], dim=-1)
    nucleus = [row for row, draw in enumerate(draws) if draw.sampling.top_p < 1]
    if nucleus:
        top_p = torch.tensor([draws[row].sampling.top_p for row in nucleus], device=scores.device)
        kept = probabilities[nucleus]
        probabilities[nucleus] = kept.masked_fill(kept < _nucleus_border(kept, top_p)[:, None], 0)
    cumulated = probabilities.cumsum(dim=-1)
    totals = cumulated[:, -1]
    numbers = torch.tensor([draw.generator.random() for draw in draws], dtype=totals.dtype, device=scores.device)
    # `right=True` never picks a token of probability 0; rounding may still lead beyond the end.
    picked = torch.searchsorted(cumulated, (numbers * totals)[:, None], right=True)[:, 0]
    beyond = picked >= scores.shape[1]
    picked = torch.where(beyond, probabilities.argmax(dim=-1), picked)
    return [int(token_id) for token_id in picked.tolist()]


def _nucleus_border(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """For each row, the probability of the least likely token among the fewest that sum up to `top_p`."""
    count = min(_NUCLEUS_TRY, probabilities.shape[1])
    best = probabilities.topk(count, dim=-1).values
    if bool((best.sum(dim=-1) < top_p).any()):
        best = probabilities.sort(dim=-1, descending=True).values
    reached = best.cumsum(dim=-1) >= top_p[:, None]
    # Where rounding keeps the sum below top_p all are kept.
    first = torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), best.shape[1] - 1)
    return best.gather(1, first[:, None])[:, 0]


def _with_logprobs(scores: torch.Tensor, token_ids: Sequence[int], top_logprobs: Sequence[int | None]) -> list[Drawn]:
    drawn = [Drawn(token_id) for token_id in token_ids]
    rows = [row for row, count in enumerate(top_logprobs) if count is not None]
    if not rows:
        return drawn
    logprobs = torch.log_softmax(scores[rows], dim=-1)
    chosen = logprobs.gather(1, torch.tensor([[token_ids[row]] for row in rows], device=scores.device))[:, 0].tolist()
    most = max(top_logprobs[row] or 0 for row in rows)
    best = logprobs.topk(most, dim=-1) if most else None
    for place, row in enumerate(rows):
        top: tuple[tuple[int, float], ...] = ()
        count = top_logprobs[row]
        if best is not None and count:
            ids, values = best.indices[place, :count].tolist(), best.values[place, :count].tolist()
            top = tuple(zip(ids, values, strict=True))
        drawn[row] = Drawn(token_ids[row], chosen[place], top)
    return drawn
