from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atoll.local_backend.kv_slabs import KVSlabs, Row


def make_slabs(context_tokens: int = 1000, budget_tokens: int = 12_000) -> KVSlabs:
    return KVSlabs(
        layers=2,
        kv_heads=1,
        head_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        context_tokens=context_tokens,
        budget_tokens=budget_tokens,
    )


def content(row: Row) -> torch.Tensor:
    return row.slab.store[:, :, row.index, :, : row.used_tokens]


class Rows(RuleBasedStateMachine):
    """Rows come, grow and go; each keeps what was written into it, and memory stays within the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs = make_slabs()
        self.rows: list[tuple[Row, float]] = []
        self.mark = 0.0

    @rule(tokens=st.integers(1, 1000))
    def allocate(self, tokens: int) -> None:
        row = self.slabs.allocate(tokens)
        if row is not None:
            assert row.capacity_tokens >= tokens
            self.mark += 1
            row.used_tokens = tokens
            content(row)[:] = self.mark
            self.rows.append((row, self.mark))

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 100), tokens=st.integers(1, 1000))
    def grow(self, place: int, tokens: int) -> None:
        row, mark = self.rows[place % len(self.rows)]
        wanted = max(tokens, row.used_tokens)
        if self.slabs.grow(row, wanted):
            assert row.capacity_tokens >= wanted
            row.used_tokens = wanted
            content(row)[:] = mark

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 100))
    def free(self, place: int) -> None:
        row, _ = self.rows.pop(place % len(self.rows))
        self.slabs.free(row)

    @rule()
    def trim(self) -> None:
        self.slabs.trim()

    @invariant()
    def every_row_keeps_its_content(self) -> None:
        for row, mark in self.rows:
            assert bool((content(row) == mark).all())
            assert row.slab.rows[row.index] is row

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.slabs.allocated_tokens <= self.slabs.budget_tokens
        assert self.slabs.used_tokens == sum(row.used_tokens for row, _ in self.rows)
        assert self.slabs.reserved_tokens == sum(row.capacity_tokens for row, _ in self.rows)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_everything_freed_is_available_again() -> None:
    slabs = make_slabs(budget_tokens=4096)
    rows = []
    while (row := slabs.allocate(256)) is not None:
        rows.append(row)
    assert len(rows) == 16
    for row in rows:
        slabs.free(row)
    assert slabs.allocate(1000) is not None  # the same memory in another shape


def test_the_budget_holds_one_full_context_at_least() -> None:
    slabs = make_slabs(context_tokens=5000, budget_tokens=1)
    assert slabs.allocate(5000) is not None
    assert slabs.allocate(1) is None


def test_trim_gives_memory_back() -> None:
    slabs = make_slabs()
    row = slabs.allocate(10)
    assert row is not None
    slabs.free(row)
    assert slabs.allocated_tokens == 4096
    slabs.trim()
    assert slabs.allocated_tokens == 0
