"""Which kind of prompt a prompt is: soft membership in clusters, whose centres are known in one or more spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from atoll.routers.table import Matrix

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NEAREST: Final = 3
"""Clusters that a prompt belongs to."""
TEMPERATURE: Final = 0.1
"""Of the softmax over their similarities."""
_FAR_WIDTH: Final = 0.1
"""How far below `near_similarity` a prompt is 1/e of an ordinary one."""
_NEAR_QUANTILE: Final = 0.05
_ROUNDS: Final = 30


@dataclass(frozen=True, slots=True)
class Clusters:
    """Centres of one space, of shape (k, d), unit length. The same clusters have other centres in another space."""

    centres: Matrix
    near_similarity: float
    """What the nearest centre of an ordinary prompt is like at least."""

    def memberships(self, embeddings: Matrix) -> Floats:
        """Of shape (n, k + 1), rows sum to 1. The last column is "no kind that was seen": it grows with the distance
        of the
        nearest centre beyond the ordinary."""
        similarity = embeddings @ self.centres.T
        n, k = similarity.shape
        nearest = min(NEAREST, k)
        top = np.argpartition(similarity, k - nearest, axis=1)[:, k - nearest :]
        values = np.take_along_axis(similarity, top, axis=1).astype(np.float64)
        best = values.max(axis=1, keepdims=True)
        weights = np.exp((values - best) / TEMPERATURE)
        weights /= weights.sum(axis=1, keepdims=True)
        seen = np.exp(np.minimum(best - self.near_similarity, 0.0) / _FAR_WIDTH)
        memberships = np.zeros((n, k + 1))
        np.put_along_axis(memberships, top, weights * seen, axis=1)
        memberships[:, k] = 1.0 - seen[:, 0]
        return memberships

    @classmethod
    def of_members(cls, embeddings: Matrix, cluster: Ints, n_clusters: int) -> Self:
        """Centres of clusters that are given, in the space of `embeddings`."""
        sums = np.zeros((n_clusters, embeddings.shape[1]))
        np.add.at(sums, cluster, embeddings)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        # Stored as float16: rounded here so that a loaded router answers exactly as the fitted one.
        centres = (sums / np.maximum(lengths, 1e-9)).astype(np.float16).astype(np.float32)
        nearest = (embeddings @ centres.T).max(axis=1)
        return cls(centres, float(np.quantile(nearest, _NEAR_QUANTILE)))


def find_clusters(embeddings: Matrix, n_clusters: int, seed: int) -> Ints:
    """Spherical k-means: a cluster for each of n unit vectors. Deterministic for a seed."""
    import faiss

    kmeans = faiss.Kmeans(
        embeddings.shape[1],
        n_clusters,
        niter=_ROUNDS,
        spherical=True,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=10_000_000,
    )
    kmeans.train(np.ascontiguousarray(embeddings, dtype=np.float32))
    return np.asarray(kmeans.index.search(embeddings, 1)[1][:, 0], dtype=np.int64)
