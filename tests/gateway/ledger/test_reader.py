from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.config import LedgerSettings
from atoll.gateway.ledger import Filters, Ledger, LedgerRow, Reader

RowMaker = Callable[..., LedgerRow]

ROWS = {
    "req_a": {"started_at": 100.0, "served_model": "small", "requested_model": "auto", "key_id": "k1", "status": 200},
    "req_b": {"started_at": 300.0, "served_model": "large", "requested_model": "auto", "key_id": "k2", "status": 200},
    "req_c": {"started_at": 200.0, "served_model": "large", "requested_model": "large", "key_id": "k1", "status": 502},
    "req_d": {"started_at": 400.0, "served_model": None, "requested_model": "auto", "session": "s", "status": 400},
}
"""In the order in which they are written, which is that of their ends."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    import asyncio

    ledger = Ledger(LedgerSettings(), tmp_path_factory.mktemp("ledger"))
    ledger.open()
    amounts = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5, "cost_usd": 0.5, "latency_s": 2.0}
    for request_id, fields in ROWS.items():
        used = amounts if fields["status"] == 200 else {}
        ledger.record(LedgerRow(request_id, endpoint="/v1/chat/completions", **fields, **used))  # type: ignore[arg-type]

    async def give_feedback() -> None:
        await ledger.add_feedback("req_a", 0.25)
        await ledger.add_feedback("req_b", 1.0)

    asyncio.run(give_feedback())
    yield ledger.reader
    ledger.shut()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), "abcd"),
        (Filters(since=200.0), "bcd"),
        (Filters(until=300.0), "ac"),
        (Filters(since=200.0, until=201.0), "c"),
        (Filters(model="large"), "bc"),
        (Filters(model="auto"), "abd"),
        (Filters(key_id="k1"), "ac"),
        (Filters(session="s"), "d"),
        (Filters(is_error=True), "cd"),
        (Filters(is_error=False), "ab"),
        (Filters(has_feedback=True), "ab"),
        (Filters(has_feedback=False), "cd"),
        (Filters(model="large", key_id="k1", is_error=True), "c"),
        (Filters(model="'; DROP TABLE requests; --"), ""),
    ],
)
def test_filters(reader: Reader, filters: Filters, expected: str) -> None:
    ids = [f"req_{letter}" for letter in expected]
    assert [record.request_id for record in reader.iterate(filters)] == ids
    assert [record.request_id for record in reader.tail(10, filters)] == ids
    assert [record.request_id for record in reader.tail(1, filters)] == ids[-1:]


def test_tail_after_a_row(reader: Reader) -> None:
    first = reader.tail(10)[0]
    assert [record.request_id for record in reader.tail(10, after_seq=first.seq)] == ["req_b", "req_c", "req_d"]
    assert [record.request_id for record in reader.iterate(after_seq=first.seq)] == ["req_b", "req_c", "req_d"]


def test_totals_by_model(reader: Reader) -> None:
    large, small, nothing = reader.totals("model")
    assert (large.name, large.requests, large.errors, large.cost_usd, large.mean_score) == ("large", 2, 1, 0.5, 1.0)
    assert (small.name, small.prompt_tokens, small.cached_tokens, small.completion_tokens) == ("small", 10, 4, 5)
    assert (small.mean_latency_s, small.feedback, small.mean_score) == (2.0, 1, 0.25)
    assert (nothing.name, nothing.errors, nothing.cost_usd, nothing.mean_latency_s) == (None, 1, 0.0, None)


def test_totals_by_key_and_filter(reader: Reader) -> None:
    assert [(total.name, total.requests) for total in reader.totals("key", Filters(is_error=False))] == [
        ("k1", 1),
        ("k2", 1),
    ]


async def test_iterating_over_many_rows_while_more_are_written(ledger: Ledger, make_row: RowMaker) -> None:
    for _ in range(1200):
        ledger.record(make_row())
    await ledger.flush()
    seen = []
    for number, record in enumerate(ledger.reader.iterate()):
        seen.append(record.request_id)
        if number == 100:
            ledger.record(make_row("req_late"))
            await ledger.flush()
    assert len(seen) == len(set(seen)) == 1201
    assert seen[-1] == "req_late"


def test_readers_and_writers_do_not_wait_for_each_other(tmp_path: Path, make_row: RowMaker) -> None:
    ledger = Ledger(LedgerSettings(), tmp_path)
    ledger.open()
    ledger.record(make_row("req_1"))
    ledger.shut()
    ledger = Ledger(LedgerSettings(), tmp_path)
    ledger.open()
    rows = ledger.reader.iterate()
    assert next(rows).request_id == "req_1"
    ledger.record(make_row("req_2"))
    ledger.shut()
    assert ledger.stats().failures == 0
