"""The seam for embedders: text in, unit vectors out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class Embedder(ABC):
    """Embeds texts. Thread-safe, deterministic, never fails on odd text (an empty text has a fixed unit vector).

    `space` names the vector space and its version, such as `static-256-v1` or `minilm-384-v1`: vectors of different
    spaces must never meet, so routers store the space they were fitted in and refuse another.
    """

    space: str
    dimension: int

    @abstractmethod
    def embed(self, texts: Sequence[str]) -> Vectors:
        """Unit-length float32 array of shape (len(texts), dimension)."""
