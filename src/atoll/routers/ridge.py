"""Ridge regression of many targets, each with the penalty that predicts best when a prompt is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PENALTIES: Final = np.geomspace(1e-2, 1e4, 13)
"""For features of about unit length: from hardly any shrinkage to nearly none of the signal."""


@dataclass(frozen=True, slots=True)
class Ridge:
    """`features @ weights + intercept`, with weights of shape (p, k)."""

    weights: Floats
    intercept: Floats
    left_out: Floats
    """What each training row was predicted from all others, of shape (n, k)."""

    def predict(self, features: Floats) -> Floats:
        return np.asarray(features @ self.weights + self.intercept)


def fit_ridge(features: Floats, targets: Floats, penalties: Floats = PENALTIES) -> Ridge:
    """Features of shape (n, p), targets of shape (n, k); both may be off centre.

    Leave-one-out predictions are exact and cost one eigendecomposition of shape (p, p): with U the left singular
    vectors, row i's leverage at penalty λ is Σ_j U_ij² s_j² / (s_j² + λ).
    """
    mean, target_mean = features.mean(axis=0), targets.mean(axis=0)
    centred, wanted = features - mean, targets - target_mean
    squares, directions = np.linalg.eigh(centred.T @ centred)
    kept = squares > max(squares[-1], 1e-12) * 1e-10
    squares, directions = squares[kept], directions[:, kept]
    scores = centred @ (directions / np.sqrt(squares))
    projected, leverages = scores.T @ wanted, scores**2
    best = np.full(targets.shape[1], np.inf)
    gains = np.zeros((len(squares), targets.shape[1]))
    left_out = np.zeros_like(wanted)
    for penalty in penalties:
        gain = squares / (squares + penalty)
        left = 1.0 - np.minimum(leverages @ gain + 1.0 / len(features), 1.0 - 1e-6)
        guesses = wanted - (wanted - scores @ (gain[:, None] * projected)) / left[:, None]
        error = ((wanted - guesses) ** 2).mean(axis=0)
        better = error < best
        best[better], gains[:, better], left_out[:, better] = error[better], gain[:, None], guesses[:, better]
    weights = directions @ (gains / np.sqrt(squares)[:, None] * projected)
    return Ridge(weights, target_mean - mean @ weights, left_out + target_mean)
