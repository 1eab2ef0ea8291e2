"""Who is better where: a table of outcomes as difficulty of the prompt, level of the model, and what is left.

    quality = level of the model + difficulty of the prompt + interaction

Only the interaction changes who answers best; most of the variance is difficulty, which is the same for everybody. So
each is estimated by itself: what the large part needs of shrinkage says nothing about the small one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from atoll.routers.additive import two_way
from atoll.routers.ridge import fit_ridge

Floats = npt.NDArray[np.float64]

_DIFFICULTY_STRENGTH: Final = 5.0
_ROW_STRENGTH: Final = 2.0
"""Answers to one prompt by which its difficulty is half known: the ratio of what is left to what difficulty explains,
about, for right and wrong answers. Where few models answered a prompt, their success is not all taken for easiness."""
_HALF_WEIGHT: Final = 10.0
"""Prompts of a group from which its scatter counts half when the spread of a model over groups is estimated."""
_LEAST_SPREAD: Final = 1e-6
_FILLING_ROUNDS: Final = 10


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a table of shape (n, m) whose unknown cells are zero in `interaction`."""

    level: Floats
    """Shape (m,)."""
    difficulty: Floats
    """Shape (n,): how much better than usual everybody is there."""
    interaction: Floats
    known: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, quality: npt.NDArray[np.floating]) -> Self:
        """Every column has a known cell."""
        known = np.isfinite(quality)
        values = np.nan_to_num(quality).astype(np.float64)
        level, difficulty = two_way(values, known, row_strength=_ROW_STRENGTH)
        return cls(level, difficulty, np.where(known, values - level - difficulty[:, None], 0.0), known)


def group_effects(parts: Parts, memberships: Floats) -> Floats:
    """Each model's quality in each group, of shape (g, m), for memberships of shape (n, g) that sum to 1.

    Empirical Bayes: a model's deviations from its level are drawn to zero by the ratio of their noise to their spread
    over groups, which is estimated for each model by the method of moments. A model that is the same everywhere is
    told so; a specialist keeps what sets it apart (SaveRouter, arXiv 2609.37402, has one strength for all).
    """
    size = memberships.sum(axis=0)[:, None]
    count = memberships.T @ parts.known.astype(np.float64)
    difficulty = (memberships.T @ parts.difficulty[:, None]) / (size + _DIFFICULTY_STRENGTH)
    deviation = (memberships.T @ parts.interaction) / np.maximum(count, 1e-9)
    noise = (parts.interaction**2).sum(axis=0) / np.maximum(parts.known.sum(axis=0), 1)
    variance = noise / np.maximum(count, 1e-9)
    weight = count / (count + _HALF_WEIGHT)
    spread = (weight * (deviation**2 - variance)).sum(axis=0) / np.maximum(weight.sum(axis=0), 1e-9)
    spread = np.maximum(spread, _LEAST_SPREAD)
    return np.asarray(parts.level + difficulty + spread / (spread + variance) * deviation)


def fit_interactions(parts: Parts, features: Floats) -> tuple[Floats, Floats]:
    """A linear map from features to the quality of every model: weights (p, m) and intercepts (m,).

    Interactions are turned into principal components across models, and each component is a ridge regression with a
    penalty of its own (a Gaussian process with a separable kernel: what models have in common is learned together, and
    components of noise shrink to nothing). Difficulty is one regression for all. Cells that nobody looked at are filled
    with what was predicted without them, and again (expectation maximisation).
    """
    common = fit_ridge(features, parts.difficulty[:, None])
    filled = parts.interaction
    for _ in range(1 if parts.known.all() else _FILLING_ROUNDS):
        _, _, components = np.linalg.svd(filled, full_matrices=False)
        apart = fit_ridge(features, filled @ components.T)
        filled = np.where(parts.known, parts.interaction, apart.left_out @ components)
    weights = apart.weights @ components + common.weights
    return weights, apart.intercept @ components + common.intercept + parts.level
