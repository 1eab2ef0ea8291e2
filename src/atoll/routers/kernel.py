"""How much each neighbour counts in a kNN estimate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Chosen by cross-validation (`kernel_cv.py`)."""

    k: int
    bandwidth: float
    """Cosine distance beyond the nearest neighbour at which a neighbour counts 1/e."""
    prior_strength: float
    """How many neighbours the candidate's own mean counts for."""
    near_similarity: float
    """What the nearest neighbour of an ordinary prompt is like at least; below, neighbours count less and less."""

    def weights(self, similarity: npt.NDArray[np.float32]) -> Floats:
        """Of neighbours, nearest first in the last axis; the nearest has weight 1 unless it is far away.

        Far away from everything that was seen (under `near_similarity`) all weights shrink by the same exponential, so
        that estimates go to the candidates' means.
        """
        similarity = similarity.astype(np.float64)
        nearest = similarity[..., :1]
        far = np.minimum(nearest - self.near_similarity, 0.0)
        return np.asarray(np.exp((similarity - nearest + far) / self.bandwidth))
