"""Mean quality and answer length of each model in each group of prompts, drawn to what is known elsewhere.

The plainest contextual estimate there is, which other routers lean on: for answer lengths, for how unsure they are,
for prompts far from everything, and for what they do not estimate themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from atoll.routers.additive import adjusted_means
from atoll.routers.table import OutcomeTable

Floats = npt.NDArray[np.float64]

DEFAULT_OUTPUT_TOKENS: Final = 300.0
"""Of an answer, where no outcome ever told."""
MEAN_STRENGTH: Final = 5.0
"""Outcomes that the pool's mean counts for in a model's mean."""
GROUP_STRENGTH: Final = 10.0
"""Outcomes that a model's mean counts for in a group."""
_FIRST_VARIANCE: Final = 0.2
"""Of the quality of one answer before any outcome: a little under a fair coin's."""
_VARIANCE_STRENGTH: Final = 5.0


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Of m models and g groups; every number is finite."""

    mean: Floats
    """Quality of each model, shape (m,)."""
    deviation: Floats
    """How much better or worse than its mean it is in a group, shape (m, g)."""
    std: Floats
    """How unsure `mean + deviation` is, shape (m, g)."""
    mean_std: Floats
    """How unsure `mean` is where no group speaks, shape (m,)."""
    tokens: Floats
    """Output tokens, shape (m,)."""
    token_factor: Floats
    """By which they are multiplied in a group, shape (m, g)."""
    _std_apart: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_std_apart", (self.std - self.mean_std[:, None]).T.copy())

    @classmethod
    def fit(cls, table: OutcomeTable, memberships: Floats) -> Self:
        quality = table.quality.astype(np.float64)
        known = np.isfinite(quality)
        count = known.sum(axis=0).astype(np.float64)
        told = count > 0
        raw = adjusted_means(np.nan_to_num(quality), known)
        pool = float(np.average(raw[told], weights=count[told])) if told.any() else 0.5
        mean = (np.where(told, raw, pool) * count + pool * MEAN_STRENGTH) / (count + MEAN_STRENGTH)
        residual = np.where(known, quality - mean, 0.0)
        group_count = known.T.astype(np.float64) @ memberships
        deviation = (residual.T @ memberships) / (group_count + GROUP_STRENGTH)
        square = ((residual - np.where(known, memberships @ deviation.T, 0.0)) ** 2).sum(axis=0)
        variance = (square + _FIRST_VARIANCE * _VARIANCE_STRENGTH) / (count + _VARIANCE_STRENGTH)
        tokens, factor = _token_table(table, memberships)
        std = np.sqrt(variance[:, None] / (group_count + GROUP_STRENGTH))
        return cls(
            mean=np.clip(mean, 0.0, 1.0),
            deviation=deviation,
            std=std,
            mean_std=np.sqrt((std**2).mean(axis=1) + deviation.var(axis=1)),
            tokens=tokens,
            token_factor=factor,
        )

    def quality(self, memberships: Floats) -> Floats:
        """Of shape (n, m), for memberships of shape (n, g)."""
        return np.asarray(np.clip(self.mean + memberships @ self.deviation.T, 0.0, 1.0))

    def quality_std(self, memberships: Floats) -> Floats:
        """Where memberships sum to less than 1, `mean_std` has the rest."""
        std: Floats = memberships @ self._std_apart + self.mean_std
        return std

    def output_tokens(self, memberships: Floats) -> Floats:
        far = 1.0 - memberships.sum(axis=1, keepdims=True)
        return np.asarray(self.tokens * (memberships @ self.token_factor.T + far))

    def arrays(self) -> dict[str, Floats]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}


def _token_table(table: OutcomeTable, memberships: Floats) -> tuple[Floats, Floats]:
    tokens = table.output_tokens.astype(np.float64)
    known = np.isfinite(tokens)
    count = known.sum(axis=0).astype(np.float64)
    told = count > 0
    raw = np.nan_to_num(adjusted_means(np.nan_to_num(tokens), known))
    typical = float(raw[told].mean()) if told.any() else DEFAULT_OUTPUT_TOKENS
    mean = np.maximum((raw * count + typical * MEAN_STRENGTH) / (count + MEAN_STRENGTH), 1.0)
    relative = np.where(known, tokens / mean, 0.0)
    group_count = known.T.astype(np.float64) @ memberships
    factor = (relative.T @ memberships + GROUP_STRENGTH) / (group_count + GROUP_STRENGTH)
    return mean, np.maximum(factor, 0.01)
