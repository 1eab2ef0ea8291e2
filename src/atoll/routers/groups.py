"""Kinds of prompts, found by k-means: the groups within which outcomes are pooled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from atoll.routers.clusters import find_clusters
from atoll.routers.table import Matrix

Floats = npt.NDArray[np.float64]

TEMPERATURE: Final = 0.05
"""Of the softmax over similarities of centres: a prompt belongs to two groups where they are about equally near."""
PROMPTS_PER_GROUP: Final = 15
_FAR_WIDTH: Final = 0.1
_NEAR_QUANTILE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Groups:
    """Centres of shape (k, d), unit length."""

    centres: Matrix
    near_similarity: float
    """What the nearest centre of an ordinary prompt is like at least."""

    @classmethod
    def fit(cls, embeddings: Matrix, n_groups: int, seed: int) -> Self:
        """At most `n_groups`, each of 15 prompts or more on average."""
        n_groups = max(1, min(n_groups, len(embeddings) // PROMPTS_PER_GROUP))
        cluster = find_clusters(embeddings, n_groups, seed)
        sums = np.zeros((n_groups, embeddings.shape[1]))
        np.add.at(sums, cluster, embeddings)
        sums = sums[np.bincount(cluster, minlength=n_groups) > 0]
        centres = (sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)).astype(np.float32)
        nearest = (embeddings @ centres.T).max(axis=1)
        return cls(centres, float(np.quantile(nearest, _NEAR_QUANTILE)))

    def __len__(self) -> int:
        return len(self.centres)

    def memberships(self, embeddings: Matrix) -> Floats:
        """Of shape (n, k). Rows sum to 1 for ordinary prompts, to less the farther a prompt is from all that was seen.

        What is missing from 1 is the share for which only the models' own means speak.
        """
        similarity = embeddings @ self.centres.T
        if len(similarity) == 1:
            return self._membership_of_one(similarity)
        best = similarity.max(axis=1, keepdims=True)
        weights: Floats = np.exp((similarity - best) * np.float32(1.0 / TEMPERATURE)).astype(np.float64)
        seen = np.exp(np.minimum(best - self.near_similarity, 0.0) * (1.0 / _FAR_WIDTH))
        # A product with ones takes half as long as a sum.
        weights *= seen / (weights @ np.ones((len(self.centres), 1)))
        return weights

    def _membership_of_one(self, similarity: Matrix) -> Floats:
        """The same for one prompt, in half the time."""
        best = float(similarity.max())
        weights: Floats = np.exp((similarity - np.float32(best)) * np.float32(1.0 / TEMPERATURE)).astype(np.float64)
        seen = math.exp(min(best - self.near_similarity, 0.0) / _FAR_WIDTH)
        weights *= seen / float(np.add.reduce(weights[0]))
        return weights
