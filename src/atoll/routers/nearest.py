"""The prompts nearest to a prompt: a fixed set from fitting, and a ring of recent ones. Both are FAISS indices.

Similarity is cosine: the inner product of unit vectors. Small sets are searched exactly, large ones through inverted
lists (IVF), of which a sixteenth is looked at. Rows are numbered through: first the fixed prompts, then the ring's
slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

EXACT_UP_TO: Final = 8192
"""Prompts. Beyond, an exact search of one prompt takes longer than a millisecond."""
_PROMPTS_PER_LIST: Final = 64
_SHARE_SEARCHED: Final = 1 / 16
_MIN_LISTS_SEARCHED: Final = 8
_THREADS_FROM: Final = 64
"""Queries in one search that are worth waking other threads for."""


class NearestPrompts:
    """Not safe against `add` during `search`: the router holds a lock."""

    def __init__(
        self, vectors: Matrix, recent_capacity: int, *, centroids: Matrix | None = None, recent: Matrix | None = None
    ) -> None:
        """`centroids` and `recent` restore an index that was saved."""
        import faiss

        self.dimension = vectors.shape[1]
        self.n_fixed = len(vectors)
        self.centroids = centroids
        self._fixed = self._lists(vectors) if len(vectors) > EXACT_UP_TO else _exact(vectors)
        self._capacity = recent_capacity
        self._ring: Any = faiss.IndexFlatIP(self.dimension)
        self._next_slot = 0
        if recent is not None and len(recent):
            self._ring.add(recent)

    @property
    def n_rows(self) -> int:
        """One more than the highest row in use."""
        return self.n_fixed + int(self._ring.ntotal)

    @property
    def next_slot(self) -> int:
        """The slot of the ring that is written next."""
        return self._next_slot

    @next_slot.setter
    def next_slot(self, slot: int) -> None:
        self._next_slot = slot

    def fixed(self) -> Matrix:
        """The fixed prompts' vectors, by row."""
        return np.asarray(self._fixed.reconstruct_n(0, self.n_fixed), dtype=np.float32)

    def recent(self) -> Matrix:
        """The ring's vectors, by slot."""
        return np.asarray(self._ring.reconstruct_n(0, self._ring.ntotal), dtype=np.float32)

    def add(self, vectors: Matrix) -> Rows:
        """Write unit vectors into the ring, over the oldest when it is full; their rows."""
        slots = np.empty(len(vectors), dtype=np.int64)
        for position, vector in enumerate(vectors):
            slot = self._next_slot
            if slot < self._ring.ntotal:
                self._overwrite(slot, vector)
            else:
                self._ring.add(vector[None])
            self._next_slot = (slot + 1) % self._capacity
            slots[position] = slot
        return slots + self.n_fixed

    def search(self, queries: Matrix, k: int) -> tuple[Matrix, Rows]:
        """Similarities and rows of the nearest prompts, nearest first, each of shape (n_queries, at most k).

        Where an inverted list has fewer, the similarity is -inf and the row -1.
        """
        with _few_threads(len(queries)):
            similarity, rows = self._fixed.search(queries, min(k, self.n_fixed))
            if self._ring.ntotal == 0:
                return _cleaned(similarity, rows)
            recent_similarity, slots = self._ring.search(queries, min(k, self._ring.ntotal))
        similarity = np.concatenate([similarity, recent_similarity], axis=1)
        rows = np.concatenate([rows, np.where(slots < 0, -1, slots + self.n_fixed)], axis=1)
        order = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
        return _cleaned(np.take_along_axis(similarity, order, axis=1), np.take_along_axis(rows, order, axis=1))

    def _lists(self, vectors: Matrix) -> Any:
        import faiss

        n_lists = len(vectors) // _PROMPTS_PER_LIST
        quantizer = faiss.IndexFlatIP(self.dimension)
        index = faiss.IndexIVFFlat(quantizer, self.dimension, n_lists, faiss.METRIC_INNER_PRODUCT)
        if self.centroids is None:
            index.train(vectors)
            self.centroids = np.asarray(quantizer.reconstruct_n(0, n_lists), dtype=np.float32)
        else:
            quantizer.add(self.centroids)
            index.is_trained = True
        index.add(vectors)
        index.make_direct_map()
        index.nprobe = max(_MIN_LISTS_SEARCHED, int(n_lists * _SHARE_SEARCHED))
        return index

    def _overwrite(self, slot: int, vector: Matrix) -> None:
        import faiss

        stored = faiss.rev_swig_ptr(self._ring.get_xb(), self._ring.ntotal * self.dimension)
        stored[slot * self.dimension : (slot + 1) * self.dimension] = vector


def _exact(vectors: Matrix) -> Any:
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


def _cleaned(similarity: Matrix, rows: Rows) -> tuple[Matrix, Rows]:
    """FAISS marks what it did not find with a very small number."""
    return np.where(rows < 0, -np.inf, similarity).astype(np.float32, copy=False), rows


@contextmanager
def _few_threads(n_queries: int) -> Iterator[None]:
    """FAISS's number of threads belongs to the calling thread; it is put back afterwards."""
    import faiss

    if n_queries >= _THREADS_FROM:
        yield
        return
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
