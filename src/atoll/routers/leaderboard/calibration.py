"""How far predictions can be trusted: calibration of quality, fit of output lengths.

Predictions and outcomes are arrays of one shape, (n,) or (n, m). Cells that are NaN in either are left out; what has
no cell left is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions in bins of equal width over [0, 1], the filled ones only: arrays of shape (n_filled,)."""

    predicted: Floats
    """Mean prediction of each bin."""
    actual: Floats
    """Mean outcome of each bin."""
    count: npt.NDArray[np.int64]

    @property
    def ece(self) -> float:
        if self.count.sum() == 0:
            return float("nan")
        return float((self.count * np.abs(self.predicted - self.actual)).sum() / self.count.sum())


def reliability(predicted: Floats, actual: Floats, n_bins: int = 15) -> Reliability:
    """Bins of a reliability diagram; a prediction on an edge is in the upper bin, 1.0 in the last.

    Raises DataError for a prediction outside [0, 1].
    """
    predicted, actual = _known(predicted, actual)
    if n_bins < 1:
        raise DataError(f"{n_bins!r} bins are too few; give 1 or more")
    if predicted.size and not (predicted.min() >= 0.0 and predicted.max() <= 1.0):
        raise DataError(
            f"predicted qualities must lie in [0, 1], found {float(predicted.min())!r} to {float(predicted.max())!r}"
        )
    bins = np.minimum((predicted * n_bins).astype(np.int64), n_bins - 1)
    count = np.bincount(bins, minlength=n_bins)
    filled = count > 0
    mean_predicted = np.bincount(bins, predicted, n_bins)[filled] / count[filled]
    mean_actual = np.bincount(bins, actual, n_bins)[filled] / count[filled]
    return Reliability(mean_predicted, mean_actual, count[filled])


def ece(predicted: Floats, actual: Floats, n_bins: int = 15) -> float:
    """Expected calibration error (Guo et al., arXiv 1706.04599, eq. 3) over all cells together; down is better."""
    return reliability(predicted, actual, n_bins).ece


def brier(predicted: Floats, actual: Floats) -> float:
    """Mean squared difference between predicted quality and outcome; down is better."""
    predicted, actual = _known(predicted, actual)
    return float(np.mean((predicted - actual) ** 2)) if predicted.size else float("nan")


def ece_per_model(predicted: Floats, actual: Floats, n_bins: int = 15) -> Floats:
    """`ece` of each column of tables of shape (n, m): errors of opposite sign in two models do not cancel out."""
    return np.array([ece(predicted[:, column], actual[:, column], n_bins) for column in range(predicted.shape[1])])


def token_r2(predicted: Floats, actual: Floats) -> float:
    """Mean over models of R² of output tokens, tables of shape (n, m); 1 at best, below 0 is worse than the mean.

    A model needs two prompts of different length to count; NaN where none has.
    """
    if predicted.shape != actual.shape or predicted.ndim != 2:
        raise DataError(f"expected two tables of one shape (n, m), found {predicted.shape} and {actual.shape}")
    known = np.isfinite(predicted) & np.isfinite(actual)
    scores = []
    for column in range(predicted.shape[1]):
        rows = known[:, column]
        truth = actual[rows, column].astype(np.float64)
        spread = float(((truth - truth.mean()) ** 2).sum()) if truth.size else 0.0
        if spread > 0.0:
            scores.append(1.0 - float(((truth - predicted[rows, column]) ** 2).sum()) / spread)
    return float(np.mean(scores)) if scores else float("nan")


def _known(predicted: Floats, actual: Floats) -> tuple[Floats, Floats]:
    predicted, actual = np.asarray(predicted, dtype=np.float64), np.asarray(actual, dtype=np.float64)
    if predicted.shape != actual.shape:
        raise DataError(f"predictions of shape {predicted.shape} and outcomes of shape {actual.shape} do not match")
    known = np.isfinite(predicted) & np.isfinite(actual)
    return predicted[known], actual[known]
