"""Where keys and values live: slabs of rows, one row for each sequence.

All memory is one arena, cut into slabs of equal size. The rows of a slab all hold the same number of tokens (256, 512,
1024, …), and its first rows are the taken ones. Slabs with equal rows are put side by side where there is room, so that
attention for all sequences of neighbouring slabs is one call on a view, without gathering anything. A sequence that
outgrows its row moves to a slab with longer rows: one copy for each doubling. A slab that has become empty serves any
row length again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

MIN_ROW_TOKENS: Final = 256
_SLAB_TOKENS: Final = 4096
"""Tokens in a slab: 16 rows of 256 … one of 4096. A longer row takes several slabs."""


@dataclass(eq=False, slots=True)
class Row:
    """One sequence's place. `slab` and `index` change when rows move; hold on to the Row, not to them."""

    slab: Slab
    index: int
    used_tokens: int = 0
    """How many positions, from 0 on, hold keys and values."""

    @property
    def capacity_tokens(self) -> int:
        return self.slab.row_tokens


@dataclass(frozen=True, slots=True)
class Views:
    """Keys and values of neighbouring slabs, one tensor for each layer, of shape (rows, kv heads, row tokens, size).

    Keys are rotated to their positions.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(eq=False, slots=True)
class Slab:
    """Rows of equal length."""

    pool: KVSlabs
    place: int
    """Where in the arena it begins, counted in slabs."""
    width: int
    """How many slabs' room it takes: one, but for a row that is longer than a slab."""
    row_tokens: int
    max_rows: int
    rows: list[Row] = field(default_factory=list)
    """The taken rows, by index."""

    @property
    def is_full(self) -> bool:
        return len(self.rows) == self.max_rows

    @property
    def views(self) -> Views:
        return self.pool.views(self, self)

    def continues(self, other: Slab) -> bool:
        """Whether this slab stands right behind `other` and has rows of the same length."""
        return self.row_tokens == other.row_tokens and self.place == other.place + other.width


class KVSlabs:
    """All slabs of an engine. Not thread-safe: it belongs to the thread that runs the model.

    `budget_tokens` bounds the memory; it is raised to hold at least one sequence of `context_tokens`. On a CPU memory
    is only taken when it is first written to, and `trim` gives it back.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        context_tokens: int,
        budget_tokens: int,
    ) -> None:
        self._layers, self._kv_heads, self._head_size = layers, kv_heads, head_size
        self._context_tokens = context_tokens
        self._slab_tokens = min(_SLAB_TOKENS, _whole_rows(context_tokens))
        places = max(budget_tokens // self._slab_tokens, self._width(context_tokens))
        self._arena, self._memory = _zeros((layers, 2, places, kv_heads * self._slab_tokens * head_size), dtype, device)
        self._slabs: list[Slab | None] = [None] * places
        """The slab that has each place."""
        self._views: dict[tuple[int, int, int], Views] = {}

    @property
    def budget_tokens(self) -> int:
        return len(self._slabs) * self._slab_tokens

    @property
    def reserved_tokens(self) -> int:
        """Room in taken rows."""
        return sum(slab.row_tokens * len(slab.rows) for slab in self._all_slabs())

    @property
    def used_tokens(self) -> int:
        return sum(row.used_tokens for slab in self._all_slabs() for row in slab.rows)

    def views(self, first: Slab, last: Slab) -> Views:
        """Keys and values from slab `first` to slab `last`, all of which continue each other."""
        key = (first.place, last.place + last.width, first.row_tokens)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._make_views(*key)
        return found

    def allocate(self, tokens: int) -> Row | None:
        """A row for at least `tokens`, or None when there is no room."""
        row_tokens = self._row_tokens(tokens)
        slab = next((slab for slab in self._all_slabs() if slab.row_tokens == row_tokens and not slab.is_full), None)
        if slab is None:
            slab = self._new_slab(row_tokens)
        if slab is None:
            return None
        row = Row(slab, len(slab.rows))
        slab.rows.append(row)
        return row

    def grow(self, row: Row, tokens: int) -> bool:
        """Make room for `tokens` in `row`, moving it if need be. False, and nothing changed, if there is no room."""
        if tokens <= row.capacity_tokens:
            return True
        larger = self.allocate(tokens)
        if larger is None:
            return False
        self._copy(row, larger)
        # The caller's Row takes the new place, and the new Row object the old one, which is freed.
        row.slab, larger.slab = larger.slab, row.slab
        row.index, larger.index = larger.index, row.index
        row.slab.rows[row.index] = row
        larger.slab.rows[larger.index] = larger
        self.free(larger)
        return True

    def free(self, row: Row) -> None:
        """Give a row back. The slab's last row moves into its place, so that the taken rows stay the first ones."""
        slab = row.slab
        last = slab.rows.pop()
        if last is not row:
            self._copy(last, row)
            last.index = row.index
            slab.rows[last.index] = last
        if not slab.rows:
            self._slabs[slab.place : slab.place + slab.width] = [None] * slab.width

    def trim(self) -> None:
        """Give the memory back to the system, if no row is taken."""
        if self._memory is not None and not any(self._slabs):
            self._memory.madvise(mmap.MADV_DONTNEED)

    def row_lengths(self) -> Iterator[int]:
        """The possible row lengths, shortest first."""
        tokens = min(MIN_ROW_TOKENS, self._context_tokens)
        while tokens < self._context_tokens:
            yield tokens
            tokens *= 2
        yield _whole_rows(self._context_tokens)

    def _all_slabs(self) -> Iterator[Slab]:
        return (slab for place, slab in enumerate(self._slabs) if slab is not None and slab.place == place)

    def _row_tokens(self, tokens: int) -> int:
        fitting = next((length for length in self.row_lengths() if length >= tokens), None)
        assert fitting is not None, f"{tokens} tokens are over the context of {self._context_tokens}"
        return fitting

    def _width(self, row_tokens: int) -> int:
        return -(-row_tokens // self._slab_tokens)

    def _new_slab(self, row_tokens: int) -> Slab | None:
        width = self._width(row_tokens)
        place = self._choose_place(row_tokens, width)
        if place is None:
            return None
        max_rows = width * self._slab_tokens // row_tokens
        slab = Slab(self, place, width, row_tokens, max_rows)
        self._slabs[place : place + width] = [slab] * width
        return slab

    def _choose_place(self, row_tokens: int, width: int) -> int | None:
        """Behind a slab with equal rows if possible, else in the middle of the largest gap, so that both can go on."""
        gaps = list(self._gaps())
        for start, length in gaps:
            before = self._slabs[start - 1] if start else None
            if before is not None and before.row_tokens == row_tokens and length >= width:
                return start
        start, length = max(gaps, key=lambda gap: gap[1], default=(0, 0))
        if length < width:
            return None
        return start if start == 0 else start + (length - width) // 2

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """(first place, length) of every run of free places."""
        start: int | None = None
        for place, slab in enumerate([*self._slabs, Slab(self, -1, 1, 0, 0)]):
            if slab is None:
                start = place if start is None else start
            elif start is not None:
                yield start, place - start
                start = None

    def _make_views(self, start: int, end: int, row_tokens: int) -> Views:
        part = self._arena[:, :, start:end].flatten(2)
        rows = part.shape[2] // (self._kv_heads * row_tokens * self._head_size)
        used = part[:, :, : rows * self._kv_heads * row_tokens * self._head_size]
        shaped = used.view(self._layers, 2, rows, self._kv_heads, row_tokens, self._head_size)
        return Views(tuple(shaped[:, 0].unbind()), tuple(shaped[:, 1].unbind()))

    def _copy(self, source: Row, target: Row) -> None:
        used = source.used_tokens
        for ours, theirs in zip(_both(source.slab.views), _both(target.slab.views), strict=True):
            theirs[target.index, :, :used] = ours[source.index, :, :used]


def _both(views: Views) -> tuple[torch.Tensor, ...]:
    return views.keys + views.values


def _whole_rows(tokens: int) -> int:
    """`tokens`, raised so that rows fill slabs without a rest: to a multiple of a slab, or to a power of two below."""
    if tokens >= _SLAB_TOKENS:
        return -(-tokens // _SLAB_TOKENS) * _SLAB_TOKENS
    return 1 << (tokens - 1).bit_length()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Zeros, because attention reads places that were never written: masked, but 0 * NaN is NaN.

    On a CPU from the system's zero pages: nothing is taken until it is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device), None
    count = 1
    for size in shape:
        count *= size
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape), memory
