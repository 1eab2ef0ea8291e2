"""How much each of several estimates counts in their average, from predictions of prompts left out.

What matters is who is better than whom among the models that could be chosen: so weights are fitted to differences
between contenders, not to quality as such (stacking, Wolpert 1992; on what decides, as EquiRouter, arXiv 2602.03478,
argues). They are drawn to equality, which a few hundred prompts rarely beat by much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STRENGTH: Final = 0.03
"""Of equality, in units of the estimates' mean squared error."""
_STDS: Final = 3.0
_LEAST_MARGIN: Final = 0.03
_ROUNDS: Final = 300


def contenders(quality: npt.NDArray[np.floating], price: Floats) -> npt.NDArray[np.int64]:
    """Models that no cheaper one clearly beats on average, of a table (n, m) with NaN and typical prices (m,)."""
    known = np.isfinite(quality)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, np.nan_to_num(quality), 0.0).sum(axis=0) / count
    error = np.sqrt(np.maximum(mean * (1.0 - mean), 0.0) / count)
    margin = np.maximum(_STDS * error, _LEAST_MARGIN)
    best_cheaper = np.array([mean[price <= own * 1.0001].max() for own in price])
    return np.flatnonzero(mean + margin >= best_cheaper)


def stack(predictions: Sequence[Floats], quality: npt.NDArray[np.floating], strength: float = STRENGTH) -> Floats:
    """Weights that are positive and sum to 1, for predictions of shape (n, m) each and a table with NaN."""
    n = len(predictions)
    known = np.isfinite(quality)
    truth = _apart(np.nan_to_num(quality).astype(np.float64), known)
    errors = np.stack([(_apart(each, known) - truth)[known] for each in predictions])
    products = errors @ errors.T / max(errors.shape[1], 1)
    products /= max(np.trace(products) / n, 1e-12)
    weights = np.full(n, 1.0 / n)
    step = 1.0 / (np.linalg.eigvalsh(products)[-1] + strength)
    for _ in range(_ROUNDS):
        weights = _on_simplex(weights - step * (products @ weights + strength * (weights - 1.0 / n)))
    return weights


def _apart(values: Floats, known: npt.NDArray[np.bool_]) -> Floats:
    """Differences from the mean over the known cells of each prompt."""
    count = np.maximum(known.sum(axis=1, keepdims=True), 1)
    return np.asarray(values - np.where(known, values, 0.0).sum(axis=1, keepdims=True) / count)


def _on_simplex(values: Floats) -> Floats:
    """The nearest point with positive entries that sum to 1 (Duchi et al., 2008)."""
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1.0) / np.arange(1, len(values) + 1)
    return np.asarray(np.maximum(values - excess[np.flatnonzero(ordered > excess)[-1]], 0.0))
