"""Means of candidates that answered different prompts, made comparable.

The mean of a model that was asked hard questions only is not comparable with one that was asked easy ones. Both are
explained by `quality = difficulty of the prompt + skill of the candidate`, solved by alternating ridge means (two-way
analysis of variance with random effects). Where all answered everything, skills are the plain means.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS: Final = 50
_SETTLED: Final = 1e-6


def adjusted_means(
    values: npt.NDArray[np.floating], cell_weights: npt.NDArray[np.floating], *, row_strength: float = 0.1
) -> Floats:
    """Per column, the mean it would have on all rows; NaN for a column without any cell. Arguments as for `two_way`."""
    return two_way(values, cell_weights, row_strength=row_strength)[0]


def two_way(
    values: npt.NDArray[np.floating], cell_weights: npt.NDArray[np.floating], *, row_strength: float = 0.1
) -> tuple[Floats, Floats]:
    """Column means of shape (n_columns,), NaN without any cell, and row effects of shape (n_rows,), zero without any.

    `values` and `cell_weights` have shape (n_rows, n_columns); a cell of weight zero is missing (its value must be
    finite). `row_strength` is the weight with which a row's effect is drawn to zero: more where rows are known by few
    cells.
    """
    weights = np.asarray(cell_weights, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    column_weight, row_weight = weights.sum(axis=0), weights.sum(axis=1)
    known = column_weight > 0
    row_effect = np.zeros(len(row_weight))
    if not known.any():
        return np.full(len(column_weight), np.nan), row_effect
    safe_weight = np.where(known, column_weight, 1.0)
    means = (weights * values).sum(axis=0) / safe_weight
    for _ in range(_ROUNDS):
        previous = means
        row_effect = (weights * (values - means)).sum(axis=1) / (row_weight + row_strength)
        row_effect -= np.average(row_effect, weights=row_weight)
        means = (weights * (values - row_effect[:, None])).sum(axis=0) / safe_weight
        if np.abs(means - previous)[known].max() < _SETTLED:
            break
    return np.where(known, means, np.nan), np.where(row_weight > 0, row_effect, 0.0)
