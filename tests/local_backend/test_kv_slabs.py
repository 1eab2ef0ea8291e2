from __future__ import annotations

import psutil
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


def fill(row: Row, mark: float) -> None:
    for tensor in (*row.slab.views.keys, *row.slab.views.values):
        tensor[row.index, :, : row.used_tokens] = mark


def holds(row: Row, mark: float) -> bool:
    tensors = (*row.slab.views.keys, *row.slab.views.values)
    return all(bool((tensor[row.index, :, : row.used_tokens] == mark).all()) for tensor in tensors)


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
            fill(row, self.mark)
            self.rows.append((row, self.mark))

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 100), tokens=st.integers(1, 1000))
    def grow(self, place: int, tokens: int) -> None:
        row, mark = self.rows[place % len(self.rows)]
        wanted = max(tokens, row.used_tokens)
        if self.slabs.grow(row, wanted):
            assert row.capacity_tokens >= wanted
            row.used_tokens = wanted
            fill(row, mark)

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
            assert holds(row, mark)
            assert row.slab.rows[row.index] is row

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.slabs.reserved_tokens <= self.slabs.budget_tokens
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
    row = slabs.allocate(5000)
    assert row is not None
    row.used_tokens = 5000
    fill(row, 1.0)
    assert slabs.allocate(1) is None


def test_neighbouring_slabs_are_seen_as_one() -> None:
    slabs = make_slabs(context_tokens=4096, budget_tokens=16_384)
    rows = [row for _ in range(40) if (row := slabs.allocate(256)) is not None]
    for mark, row in enumerate(rows):
        row.used_tokens = 256
        fill(row, float(mark))
    assert rows[16].slab.continues(rows[0].slab)
    together = slabs.views(rows[0].slab, rows[-1].slab)
    assert together.keys[1].shape == (48, 1, 256, 2)
    assert [int(value) for value in together.values[1][:40, 0, 255, 1]] == list(range(40))


def test_other_row_lengths_leave_room_to_go_on() -> None:
    slabs = make_slabs(budget_tokens=65_536)
    short, long = slabs.allocate(200), slabs.allocate(900)
    more_short = [slabs.allocate(200) for _ in range(40)]
    more_long = [slabs.allocate(900) for _ in range(8)]
    for first, more in ((short, more_short), (long, more_long)):
        places = sorted({row.slab.place for row in (first, *more) if row is not None})
        assert places == list(range(places[0], places[0] + len(places)))


def test_memory_is_taken_when_it_is_written_and_given_back_by_trim() -> None:
    def resident_bytes() -> int:
        return psutil.Process().memory_info().rss

    before = resident_bytes()
    slabs = KVSlabs(
        layers=8,
        kv_heads=4,
        head_size=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        context_tokens=4096,
        budget_tokens=65_536,
    )  # a gigabyte, if it were all taken
    assert resident_bytes() - before < 100e6
    row = slabs.allocate(4000)
    assert row is not None
    row.used_tokens = 4000
    fill(row, 1.0)
    assert resident_bytes() - before > 50e6
    slabs.trim()
    assert holds(row, 1.0)  # not while a row is taken
    slabs.free(row)
    slabs.trim()
    assert resident_bytes() - before < 40e6
