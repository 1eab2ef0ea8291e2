"""The database is locked, gone or full: requests go on, and rows are kept."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.config import LedgerSettings
from atoll.errors import Unavailable
from atoll.gateway.ledger import Ledger, LedgerRow
from atoll.gateway.ledger.database import DATABASE_NAME
from atoll.gateway.ledger.spill import SpillFile

RowMaker = Callable[..., LedgerRow]
LedgerOpener = Callable[..., Ledger]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Another program holds the write lock."""
    connection = sqlite3.connect(folder / DATABASE_NAME, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def spilled(folder: Path) -> list[str]:
    return [
        json.loads(line)["request_id"]
        for file in folder.glob("ledger.spill-*")
        for line in file.read_text().splitlines()
    ]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (it is the writer's thread that changes it)
            await asyncio.sleep(0.01)


async def test_rows_of_a_locked_database_wait_on_disk_and_follow(
    tmp_path: Path, ledger: Ledger, make_row: RowMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """GW-40: the database stops under load."""
    with locked(tmp_path):
        for _ in range(100):
            ledger.record(make_row(embedding=b"\x00\xff"))
        await until(lambda: len(spilled(tmp_path)) == 100)
        assert ledger.stats().is_down
        assert ledger.queue_depth == 0
        ledger.record(make_row("req_later"))
        await until(lambda: len(spilled(tmp_path)) == 101)
        await until(lambda: ledger.stats().failures > 4)
    await until(lambda: ledger.stats().written == 101)
    records = ledger.reader.tail(200)
    assert {record.request_id for record in records} == {f"req_{n:06d}" for n in range(100)} | {"req_later"}
    assert records[0].embedding == b"\x00\xff"
    assert ledger.stats().lost == 0
    assert not ledger.stats().is_down
    assert spilled(tmp_path) == []
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


async def test_feedback_for_a_locked_database_says_when_to_come_back(
    tmp_path: Path, ledger: Ledger, make_row: RowMaker
) -> None:
    ledger.record(make_row("req_1"))
    await ledger.flush()
    with locked(tmp_path), pytest.raises(Unavailable) as caught:
        await ledger.add_feedback("req_1", 1.0)
    assert caught.value.http_status == 503
    assert caught.value.retry_after_s
    assert await ledger.add_feedback("req_1", 1.0) is not None


async def test_feedback_waits_for_another_process_that_is_writing(
    tmp_path: Path, ledger: Ledger, make_row: RowMaker
) -> None:
    ledger.record(make_row("req_1"))
    await ledger.flush()
    with locked(tmp_path):
        asked = asyncio.create_task(ledger.add_feedback("req_1", 1.0))
        await until(lambda: ledger.stats().is_down)
    assert await asked is not None


async def test_feedback_during_an_outage_does_not_hold_up_the_rows(
    tmp_path: Path, ledger: Ledger, make_row: RowMaker
) -> None:
    with locked(tmp_path):
        ledger.record(make_row("req_1"))
        await ledger.flush()
        answers = await asyncio.gather(*(ledger.add_feedback("req_1", 1.0) for _ in range(50)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {Unavailable}
        ledger.record(make_row("req_2"))
        await ledger.flush()
        assert spilled(tmp_path) == ["req_1", "req_2"]
    await until(lambda: ledger.stats().written == 2)


def test_closing_while_locked_leaves_the_rows_for_the_next_start(
    tmp_path: Path, open_ledger: LedgerOpener, make_row: RowMaker
) -> None:
    ledger = open_ledger()
    with locked(tmp_path):
        ledger.record(make_row("req_1"))
        ledger.shut()
        assert spilled(tmp_path) == ["req_1"]
    after = open_ledger()
    deadline = time.monotonic() + 30
    while not after.reader.tail(1) and time.monotonic() < deadline:
        time.sleep(0.01)
    after.shut()
    assert [record.request_id for record in after.reader.tail(10)] == ["req_1"]
    assert list(tmp_path.glob("ledger.spill-*")) == []


def test_rows_of_a_killed_process_are_taken_over_once(
    tmp_path: Path, open_ledger: LedgerOpener, make_row: RowMaker
) -> None:
    """Some were written before it died, one more was torn in the middle."""
    first = open_ledger()
    first.record(make_row("req_0"))
    first.shut()
    first = open_ledger()
    with locked(tmp_path):
        first.record(make_row("req_1"))
        first.shut()
    (spill,) = tmp_path.glob("ledger.spill-*")
    line = spill.read_bytes()
    spill.write_bytes(
        line.replace(b"req_1", b"req_0") + line + line.replace(b"req_1", b"req_2") + line[: len(line) // 2]
    )
    ledgers = [open_ledger() for _ in range(2)]
    for ledger in ledgers:
        ledger.shut()
    last = open_ledger()
    assert sorted(record.request_id for record in last.reader.iterate()) == ["req_0", "req_1", "req_2"]
    assert list(tmp_path.glob("ledger.spill-*")) == []
    assert sum(ledger.stats().lost for ledger in ledgers) <= 1


def test_the_spill_file_of_a_living_process_is_left_alone(tmp_path: Path, open_ledger: LedgerOpener) -> None:
    ledger = open_ledger()
    spill = SpillFile.create(tmp_path)
    open_ledger().shut()
    assert spill.path.exists()
    spill.close()
    assert not spill.path.exists()
    ledger.shut()


def test_a_full_disk(tmp_path: Path) -> None:
    """Nothing can be written any more: rows wait in memory up to a limit, and requests go on."""
    program = """
        import logging, resource, sys, time
        from pathlib import Path
        from atoll.config import LedgerSettings
        from atoll.gateway.ledger import Ledger, LedgerRow
        logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
        folder = Path(sys.argv[1])
        ledger = Ledger(LedgerSettings(), folder, max_queued_bytes=1_000_000)
        ledger.open()
        def row(n):
            return LedgerRow(f"req_{n}", time.time(), "/v1/completions", reason="r" * 500, decision_json="x" * 5000)
        ledger.record(row("before"))
        time.sleep(0.3)
        # No file of this process may grow any more: what a full disk does to each write.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        for n in range(3000):
            ledger.record(row(n))
            if n % 100 == 0:
                time.sleep(0.02)
        time.sleep(0.5)
        full = ledger.stats()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        deadline = time.monotonic() + 30
        while ledger.queue_depth and time.monotonic() < deadline:
            time.sleep(0.1)
        ledger.shut()
        end = ledger.stats()
        print("RESULT", full.is_down, full.queued, full.lost, full.spilled, end.written, end.lost, end.queued)
        print("STORED", sum(1 for _ in Ledger(LedgerSettings(), folder).reader.iterate()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = done.stdout.splitlines()
    _, is_down, queued, lost, spilled_rows, written, end_lost, end_queued = next(
        line for line in lines if line.startswith("RESULT")
    ).split()
    assert is_down == "True"
    assert 0 < int(queued) <= 1000
    assert int(queued) + int(lost) + int(spilled_rows) == 3000
    assert int(end_queued) == 0
    assert int(end_lost) == int(lost)
    assert lines[-1] == f"STORED {written}"
    assert int(written) + int(end_lost) == 3001
    assert len([line for line in lines if "cannot be written" in line]) == 1
    assert len(lines) < 8


def test_content_is_left_out_before_rows_are_lost(
    tmp_path: Path, open_ledger: LedgerOpener, make_row: RowMaker
) -> None:
    ledger = open_ledger(LedgerSettings(store_content=True, flush_interval_s=1.0), max_queued_bytes=100_000)
    for n in range(50):
        ledger.record(make_row(f"req_{n}", prompt_json="word " * 5000))
    ledger.shut()
    records = list(ledger.reader.iterate())
    assert len(records) == 50
    assert sum(record.prompt_json is None for record in records) == 47
    assert (ledger.stats().without_content, ledger.stats().lost) == (47, 0)
