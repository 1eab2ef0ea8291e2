"""What a prompt looks like to a linear model: how near it is to landmarks among known prompts, and how long it is.

Nyström features: with landmarks Z and the kernel k(x, z) = exp(width · (x·z − 1)), the map k(x, Z) K(Z, Z)^(−1/2)
makes a linear model of it the kernel machine restricted to the landmarks: a smooth average over neighbours whose cost
does not grow with the number of known prompts (Williams & Seeger, 2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from atoll.routers.clusters import find_clusters
from atoll.routers.table import Matrix

Floats = npt.NDArray[np.float64]

_PROMPTS_PER_LANDMARK: Final = 4
_SMALLEST: Final = 1e-4
"""Share of the largest eigenvalue under which a direction of the landmarks is left out: float32 must serve it."""
_KNOTS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
_LENGTH_SCALE: Final = 0.15
"""What one standard deviation of log length weighs against the landmarks' features, which have about unit length."""


@dataclass(frozen=True, slots=True)
class Landmarks:
    """Unit vectors of shape (l, d)."""

    vectors: Matrix
    width: float
    whitening: Floats
    """K(Z, Z)^(−1/2) in its leading directions, of shape (l, p)."""

    @classmethod
    def fit(cls, embeddings: Matrix, n_landmarks: int, width: float, seed: int) -> Self:
        """Centres of k-means: at most one to every four prompts."""
        n = max(1, min(n_landmarks, len(embeddings) // _PROMPTS_PER_LANDMARK))
        cluster = find_clusters(embeddings, n, seed)
        sums = np.zeros((n, embeddings.shape[1]))
        np.add.at(sums, cluster, embeddings)
        sums = sums[np.bincount(cluster, minlength=n) > 0]
        vectors = (sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)).astype(np.float32)
        values, directions = np.linalg.eigh(np.exp(width * (vectors.astype(np.float64) @ vectors.T - 1.0)))
        kept = values > _SMALLEST * values[-1]
        return cls(vectors, width, directions[:, kept] / np.sqrt(values[kept]))

    def similarities(self, embeddings: Matrix) -> Matrix:
        """k(x, Z), of shape (n, l)."""
        return np.asarray(np.exp(self.width * (embeddings @ self.vectors.T - 1.0)), dtype=np.float32)

    def features(self, embeddings: Matrix) -> Floats:
        """Of shape (n, p)."""
        return np.asarray(self.similarities(embeddings).astype(np.float64) @ self.whitening)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log prompt length as a piecewise linear curve: standardised, and what is beyond each of a few quantiles."""

    mean: float
    std: float
    low: float
    high: float
    """Beyond the lengths that were seen the ends count."""
    knots: Floats

    N_FEATURES = 1 + len(_KNOTS)

    @classmethod
    def fit(cls, prompt_tokens: npt.NDArray[Any] | None) -> Self:
        logs = np.zeros(0) if prompt_tokens is None else np.log1p(prompt_tokens[np.isfinite(prompt_tokens)])
        if not len(logs):
            return cls(0.0, 1.0, 0.0, 0.0, np.zeros(len(_KNOTS)))
        logs = logs.astype(np.float64)
        std = max(float(logs.std()), 1e-3)
        low, high = float(logs.min()), float(logs.max())
        return cls(float(logs.mean()), std, low, high, np.quantile(logs, _KNOTS))

    def features(self, prompt_tokens: npt.NDArray[Any]) -> Floats:
        """Of shape (n, 6); a length that is not known counts as the mean."""
        if len(prompt_tokens) == 1:
            return self._features_of_one(float(prompt_tokens[0]))
        logs = np.log1p(np.asarray(prompt_tokens, dtype=np.float64))
        logs = np.where(np.isfinite(logs), np.clip(logs, self.low, self.high), self.mean)
        beyond = np.maximum(logs[:, None] - self.knots, 0.0)
        return np.asarray(_LENGTH_SCALE / self.std * np.concatenate([(logs - self.mean)[:, None], beyond], axis=1))

    def _features_of_one(self, prompt_tokens: float) -> Floats:
        """The same for one prompt, in a tenth of the time."""
        log = math.log1p(prompt_tokens)
        log = min(max(log, self.low), self.high) if math.isfinite(log) else self.mean
        scale = _LENGTH_SCALE / self.std
        beyond = [scale * (log - knot) if log > knot else 0.0 for knot in self.knots.tolist()]
        return np.array([[scale * (log - self.mean), *beyond]])
