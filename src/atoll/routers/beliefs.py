"""What a prior router believes of each candidate in each cluster, and how feedback changes it.

Every candidate begins with an expected quality in every cluster. Feedback is compared with what was expected, and the
difference is explained on three levels, each drawn to zero by pseudo-counts (a normal random-effects model, solved
level by level):

    quality = prior + shift of everybody + shift of the candidate + shift of the candidate in the cluster

The shift of everybody is there because people's thumbs and benchmarks' scores are different scales: if the first
candidate that gets feedback is liked, that is half a reason to expect the others to be liked as well. It never changes
a ranking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHARED_STRENGTH: Final = 1.0
"""Candidates with much feedback that the shift of everybody is drawn to zero by."""
CELL_STRENGTH: Final = 10.0
"""Outcomes that "no different from other clusters" counts for."""
TOKEN_STRENGTH: Final = 5.0
"""Answers that the predicted length counts for."""
CELL_STD: Final = 0.1
"""Of a candidate's quality in a cluster around what its prior says, before feedback from there."""
_LEAST_STD: Final = 0.005


@dataclass(frozen=True, slots=True)
class Prior:
    """Of one candidate, before any feedback."""

    quality: Floats
    """In [0, 1], of shape (k + 1,): by cluster, and last for prompts of no known kind."""
    std: float
    """Of its level."""
    strength: float
    """Outcomes that the level counts for."""
    output_tokens: Floats
    """Of shape (k + 1,)."""


class Beliefs:
    """Of all candidates ever seen, one slot each. Memory does not grow with feedback."""

    def __init__(self, n_columns: int) -> None:
        self.names: list[str] = []
        self.n_columns = n_columns
        self.quality = np.zeros((0, n_columns))
        self.output_tokens = np.zeros((0, n_columns))
        self.std = np.zeros(0)
        self.strength = np.zeros(0)
        self.count = np.zeros((0, n_columns))
        """Feedback, by the memberships of its prompts."""
        self.surprise = np.zeros((0, n_columns))
        """Sum of (quality - expected), likewise."""
        self.token_count = np.zeros(0)
        self.token_ratio = np.zeros(0)
        """Sum of (output tokens / expected)."""

    def add(self, name: str) -> int:
        """A new slot, without prior and feedback."""
        self.names.append(name)
        for field in ("quality", "output_tokens", "count", "surprise"):
            setattr(self, field, np.pad(getattr(self, field), ((0, 1), (0, 0))))
        for field in ("std", "strength", "token_count", "token_ratio"):
            setattr(self, field, np.append(getattr(self, field), 0.0))
        return len(self.names) - 1

    def copy_feedback(self, source: int, target: int) -> None:
        for array in (self.count, self.surprise, self.token_count, self.token_ratio):
            array[target] = array[source]

    def set_prior(self, slot: int, prior: Prior) -> None:
        self.quality[slot], self.output_tokens[slot] = prior.quality, prior.output_tokens
        self.std[slot], self.strength[slot] = prior.std, prior.strength

    def learn(self, slot: int, membership: Floats, quality: float | None, output_tokens: float | None) -> None:
        """One outcome of a prompt with `membership` of shape (k + 1,)."""
        if quality is not None:
            self.count[slot] += membership
            self.surprise[slot] += membership * (quality - float(membership @ self.quality[slot]))
        if output_tokens is not None:
            self.token_count[slot] += 1.0
            self.token_ratio[slot] += output_tokens / float(membership @ self.output_tokens[slot])

    def posterior(self, slots: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        """Quality, its standard deviation and output tokens of some slots, each of shape (len(slots), k + 1)."""
        rows = np.asarray(slots, dtype=np.int64)
        n, surprise = self.count.sum(axis=1), self.surprise.sum(axis=1)
        shared = self._shared_shift(n, surprise)
        level = ((surprise - n * shared) / (n + np.maximum(self.strength, 1e-9)))[rows]
        cell_n = self.count[rows]
        cell = (self.surprise[rows] - cell_n * (shared + level)[:, None]) / (cell_n + CELL_STRENGTH)
        quality = np.clip(self.quality[rows] + (shared + level)[:, None] + cell, 0.0, 1.0)
        level_variance = self.std[rows] ** 2 * self.strength[rows] / (self.strength[rows] + n[rows])
        cell_variance = CELL_STD**2 * CELL_STRENGTH / (CELL_STRENGTH + cell_n)
        std = np.maximum(np.sqrt(level_variance[:, None] + cell_variance), _LEAST_STD)
        return quality, std, self.output_tokens[rows] * self._token_ratios()[rows, None]

    def _shared_shift(self, n: Floats, surprise: Floats) -> float:
        """Every candidate counts for at most one, however much feedback it has."""
        told = n > 0
        if not told.any():
            return 0.0
        weight = n[told] / (n[told] + self.strength[told])
        return float((weight * surprise[told] / n[told]).sum() / (weight.sum() + SHARED_STRENGTH))

    def _token_ratios(self) -> Floats:
        """A candidate whose lengths nobody knows writes as much more or less than expected as the others do."""
        everybody = (TOKEN_STRENGTH + self.token_ratio.sum()) / (TOKEN_STRENGTH + self.token_count.sum())
        return np.asarray((TOKEN_STRENGTH * everybody + self.token_ratio) / (TOKEN_STRENGTH + self.token_count))
