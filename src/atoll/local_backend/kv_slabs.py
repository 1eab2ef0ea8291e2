"""Where keys and values live: slabs of rows, one row for each sequence.

A slab is one tensor whose rows all hold the same number of tokens (its `row_tokens`: 256, 512, 1024, …), and its first
rows are the taken ones. Attention for all sequences of a slab is then one call on a view, without gathering anything:
`slab.keys(layer)[:rows_used, :, :longest]`. A sequence that outgrows its row moves to a slab with longer rows; one copy
for each doubling. All slabs are of one size in bytes, so a slab that has become empty serves any row length again, and
memory is bounded by a budget in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

MIN_ROW_TOKENS: Final = 256
_SLAB_TOKENS: Final = 4096
"""Tokens in a slab, unless one row is longer: 16 rows of 256 … one of 4096."""


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


@dataclass(eq=False, slots=True)
class Slab:
    """Rows of equal length. `store` has shape (layers, 2, rows, kv heads, row tokens, head size); 0 is K, 1 is V."""

    store: torch.Tensor
    rows: list[Row] = field(default_factory=list)
    """The taken rows, by index."""

    @property
    def row_tokens(self) -> int:
        return self.store.shape[4]

    @property
    def is_full(self) -> bool:
        return len(self.rows) == self.store.shape[2]

    @property
    def total_tokens(self) -> int:
        return self.store.shape[2] * self.store.shape[4]

    def keys(self, layer: int) -> torch.Tensor:
        """Rotated keys of shape (rows, kv heads, row tokens, head size); a view."""
        return self.store[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        return self.store[layer, 1]


class KVSlabs:
    """All slabs of an engine. Not thread-safe: it belongs to the thread that runs the model.

    `budget_tokens` bounds what is allocated; it is raised to hold at least one sequence of `context_tokens`.
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
        self._dtype, self._device = dtype, device
        self._context_tokens = context_tokens
        self._slabs: list[Slab] = []
        self._spare: list[torch.Tensor] = []
        """Flat stores of empty slabs of the common size."""
        self.budget_tokens = max(budget_tokens, self._slab_tokens(self._row_tokens(context_tokens)))

    @property
    def reserved_tokens(self) -> int:
        """Room in taken rows."""
        return sum(slab.row_tokens * len(slab.rows) for slab in self._slabs)

    @property
    def used_tokens(self) -> int:
        return sum(row.used_tokens for slab in self._slabs for row in slab.rows)

    @property
    def allocated_tokens(self) -> int:
        """Room in memory that is held, taken or not."""
        return sum(slab.total_tokens for slab in self._slabs) + _SLAB_TOKENS * len(self._spare)

    def allocate(self, tokens: int) -> Row | None:
        """A row for at least `tokens`, or None when the budget is spent."""
        row_tokens = self._row_tokens(tokens)
        slab = next((slab for slab in self._slabs if slab.row_tokens == row_tokens and not slab.is_full), None)
        if slab is None:
            slab = self._new_slab(row_tokens)
        if slab is None:
            return None
        row = Row(slab, len(slab.rows))
        slab.rows.append(row)
        return row

    def grow(self, row: Row, tokens: int) -> bool:
        """Make room for `tokens` in `row`, moving it if need be. False, and nothing changed, if the budget is spent."""
        if tokens <= row.capacity_tokens:
            return True
        larger = self.allocate(tokens)
        if larger is None:
            return False
        used = row.used_tokens
        larger.slab.store[:, :, larger.index, :, :used] = row.slab.store[:, :, row.index, :, :used]
        # The caller's Row takes the new place, and the new Row object the old one, which is freed.
        row.slab, larger.slab = larger.slab, row.slab
        row.index, larger.index = larger.index, row.index
        row.slab.rows[row.index] = row
        larger.slab.rows[larger.index] = larger
        larger.used_tokens = 0
        self.free(larger)
        return True

    def free(self, row: Row) -> None:
        """Give a row back. The slab's last row moves into its place, so that the taken rows stay the first ones."""
        slab = row.slab
        last = slab.rows.pop()
        if last is not row:
            used = last.used_tokens
            slab.store[:, :, row.index, :, :used] = slab.store[:, :, last.index, :, :used]
            last.index = row.index
            slab.rows[last.index] = last
        if not slab.rows:
            self._slabs.remove(slab)
            if slab.total_tokens == _SLAB_TOKENS:
                self._spare.append(slab.store.view(-1))

    def trim(self) -> None:
        """Give the memory of empty slabs back to the system."""
        self._spare.clear()

    def row_lengths(self) -> Iterator[int]:
        """The possible row lengths, shortest first."""
        tokens = min(MIN_ROW_TOKENS, self._context_tokens)
        while tokens < self._context_tokens:
            yield tokens
            tokens *= 2
        yield self._context_tokens

    def _row_tokens(self, tokens: int) -> int:
        fitting = next((length for length in self.row_lengths() if length >= tokens), None)
        assert fitting is not None, f"{tokens} tokens are over the context of {self._context_tokens}"
        return fitting

    def _slab_tokens(self, row_tokens: int) -> int:
        return row_tokens * max(1, _SLAB_TOKENS // row_tokens)

    def _new_slab(self, row_tokens: int) -> Slab | None:
        rows = max(1, _SLAB_TOKENS // row_tokens)
        shape = (self._layers, 2, rows, self._kv_heads, row_tokens, self._head_size)
        if rows * row_tokens == _SLAB_TOKENS and self._spare:
            store = self._spare.pop().view(shape)
        elif self.allocated_tokens + rows * row_tokens <= self.budget_tokens or self._reclaim(rows * row_tokens):
            # Zeros, because attention reads places that were never written: masked, but 0 * NaN is NaN.
            store = torch.zeros(shape, dtype=self._dtype, device=self._device)
        else:
            return None
        slab = Slab(store)
        self._slabs.append(slab)
        return slab

    def _reclaim(self, tokens: int) -> bool:
        """Free spare slabs until `tokens` fit into the budget; whether they do."""
        while self._spare and self.allocated_tokens + tokens > self.budget_tokens:
            self._spare.pop()
        return self.allocated_tokens + tokens <= self.budget_tokens
