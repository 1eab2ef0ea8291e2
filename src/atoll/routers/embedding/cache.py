"""Vectors by text, least recently used first out, bounded in entries and in bytes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
_ENTRY_OVERHEAD_BYTES = 300
"""Of the two objects and the dictionary's slot, roughly."""


class VectorCache:
    """A mapping from whole texts to read-only vectors. For one thread (the event loop's)."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._vectors: OrderedDict[str, Vector] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._vectors)

    def get(self, text: str) -> Vector | None:
        vector = self._vectors.get(text)
        if vector is not None:
            self._vectors.move_to_end(text)
        return vector

    def put(self, text: str, vector: Vector) -> None:
        """Keep `vector` (which is made read-only) unless it alone is over the bounds; the oldest entries make room."""
        size = _entry_bytes(text, vector)
        if self._max_entries == 0 or size > self._max_bytes:
            return
        vector.flags.writeable = False
        replaced = self._vectors.pop(text, None)
        if replaced is not None:
            self.size_bytes -= _entry_bytes(text, replaced)
        self._vectors[text] = vector
        self.size_bytes += size
        while len(self._vectors) > self._max_entries or self.size_bytes > self._max_bytes:
            oldest_text, oldest = self._vectors.popitem(last=False)
            self.size_bytes -= _entry_bytes(oldest_text, oldest)


def _entry_bytes(text: str, vector: Vector) -> int:
    # Four bytes a character is the most that a str takes.
    return (len(text) if text.isascii() else 4 * len(text)) + vector.nbytes + _ENTRY_OVERHEAD_BYTES
