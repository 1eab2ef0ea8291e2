from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

from atoll.config import LedgerSettings
from atoll.gateway.ledger import Ledger, LedgerRow

RowMaker = Callable[..., LedgerRow]


def statuses(folder: Path) -> list[os.stat_result]:
    return [file.stat() for file in folder.iterdir()]


async def test_a_row_comes_back_as_it_went_in(ledger: Ledger) -> None:
    row = LedgerRow(
        request_id="req_1",
        started_at=1764600000.25,
        endpoint="/v1/chat/completions",
        key_id="ab12",
        session="s",
        requested_model="auto",
        served_model="small",
        upstream="local",
        upstream_id="chatcmpl-9",
        router="prior",
        router_version="1",
        decision_json='{"candidate": "small"}',
        propensity=0.95,
        reason="Cheap and good enough",
        preference=0.5,
        is_streaming=True,
        attempts=2,
        prompt_tokens=2006,
        cached_tokens=1920,
        completion_tokens=300,
        reasoning_tokens=0,
        is_usage_estimated=True,
        cost_usd=1.25e-6,
        ttft_s=0.01,
        latency_s=1.5,
        status=499,
        error_code="client_closed_request",
        error_message="The client left",
        embedding=bytes(range(256)) * 4,
        embedding_space="static-256-v1",
    )
    ledger.record(row)
    record = await ledger.get("req_1")
    assert record is not None
    assert {name: getattr(record, name) for name in LedgerRow.__slots__} == {
        name: getattr(row, name) for name in LedgerRow.__slots__
    }
    assert record.feedback_score is None


async def test_an_unknown_request(ledger: Ledger) -> None:
    assert await ledger.get("req_none") is None
    assert await ledger.add_feedback("req_none", 1.0) is None


async def test_upstream_ids_may_be_empty_and_repeated(ledger: Ledger, make_row: RowMaker) -> None:
    """GW-50: spend rows used the upstream's id as their key and were lost."""
    for upstream_id in ("", "", "same", "same", None):
        ledger.record(make_row(upstream_id=upstream_id))
    await ledger.flush()
    assert len(ledger.reader.tail(10)) == 5


async def test_the_same_request_twice_is_one_row_and_holds_up_nothing(ledger: Ledger, make_row: RowMaker) -> None:
    ledger.record(make_row("req_twice", status=200))
    ledger.record(make_row("req_twice", status=500))
    ledger.record(make_row("req_other"))
    await ledger.flush()
    assert [record.request_id for record in ledger.reader.tail(10)] == ["req_twice", "req_other"]
    assert ledger.stats().written == 2


async def test_cancelled_streams_are_booked(ledger: Ledger, make_row: RowMaker) -> None:
    """GW-49: a stream the client cancelled was booked at nothing."""
    ledger.record(
        make_row("req_1", status=499, prompt_tokens=12, completion_tokens=50, is_usage_estimated=True, cost_usd=0.01)
    )
    total = (await ledger.get("req_1"), ledger.reader.totals("model")[0])[1]
    assert (total.completion_tokens, total.cost_usd, total.errors) == (50, 0.01, 1)


async def test_an_error_that_echoes_a_request_of_megabytes_is_bounded(tmp_path: Path, make_row: RowMaker) -> None:
    """GW-70."""
    echo = 'bad request: {"url":"data:image/png;base64,' + base64.b64encode(os.urandom(5_000_000)).decode() + '"}'
    ledger = Ledger(LedgerSettings(store_content=True), tmp_path)
    await ledger.start()
    ledger.record(make_row("req_1", status=400, error_message=echo, prompt_json=echo, answer_text=echo))
    record = await ledger.get("req_1")
    await ledger.close()
    assert record is not None
    assert record.error_message is not None
    assert "[image/png, 5000000 bytes, sha256:" in record.error_message
    assert record.prompt_json == record.answer_text == record.error_message
    assert sum(status.st_size for status in statuses(tmp_path)) < 500_000


class TestFeedback:
    async def test_for_a_request_that_has_only_just_ended(self, ledger: Ledger, make_row: RowMaker) -> None:
        ledger.record(make_row("req_1", served_model="small", embedding=b"1234"))
        record = await ledger.add_feedback("req_1", 0.75, "fine\x00\ud800")
        assert record is not None
        assert (record.served_model, record.embedding) == ("small", b"1234")
        assert (record.feedback_score, record.feedback_comment) == (0.75, "fine\ufffd\ufffd")

    async def test_the_last_one_counts(self, ledger: Ledger, make_row: RowMaker) -> None:
        ledger.record(make_row("req_1"))
        await ledger.add_feedback("req_1", 0.0, "bad")
        await ledger.add_feedback("req_1", 1.0)
        record = await ledger.get("req_1")
        assert record is not None
        assert (record.feedback_score, record.feedback_comment) == (1.0, None)

    async def test_many_at_once(self, ledger: Ledger, make_row: RowMaker) -> None:
        ledger.record(make_row("req_1"))
        records = await asyncio.gather(*(ledger.add_feedback("req_1", n / 20) for n in range(20)))
        assert {record.feedback_score for record in records if record} == {n / 20 for n in range(20)}

    async def test_for_a_request_that_another_worker_is_about_to_write(
        self, tmp_path: Path, make_row: RowMaker
    ) -> None:
        here, there = (Ledger(LedgerSettings(flush_interval_s=0.1), tmp_path) for _ in range(2))
        await asyncio.gather(here.start(), there.start())
        there.record(make_row("req_1"))
        assert await here.add_feedback("req_1", 1.0) is not None
        await asyncio.gather(here.close(), there.close())


async def test_a_ledger_that_is_off_takes_and_gives_nothing(tmp_path: Path, make_row: RowMaker) -> None:
    ledger = Ledger(LedgerSettings(enabled=False), tmp_path / "none")
    await ledger.start()
    ledger.record(make_row())
    assert await ledger.add_feedback("req_000000", 1.0) is None
    await ledger.close()
    assert not (tmp_path / "none").exists()


async def test_close_writes_what_is_queued_and_may_be_called_twice(tmp_path: Path, make_row: RowMaker) -> None:
    ledger = Ledger(LedgerSettings(flush_interval_s=1.0), tmp_path)
    await ledger.start()
    for _ in range(1000):
        ledger.record(make_row())
    await ledger.close()
    await ledger.close()
    ledger.record(make_row())
    again = Ledger(LedgerSettings(), tmp_path)
    await again.start()
    assert sum(1 for _ in again.reader.iterate()) == 1000
    await again.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-ledger"]


def test_a_program_that_ends_without_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    program = """
        import sys, time
        from pathlib import Path
        from atoll.config import LedgerSettings
        from atoll.gateway.ledger import Ledger, LedgerRow
        ledger = Ledger(LedgerSettings(flush_interval_s=1.0), Path(sys.argv[1]))
        ledger.open()
        for n in range(100):
            ledger.record(LedgerRow(f"req_{n}", time.time(), "/v1/completions"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, timeout=60)
    ledger = Ledger(LedgerSettings(), tmp_path)
    ledger.open()
    assert sum(1 for _ in ledger.reader.iterate()) == 100
    ledger.shut()


async def test_recording_from_many_threads(ledger: Ledger, make_row: RowMaker) -> None:
    def record_some(number: int) -> None:
        for n in range(500):
            ledger.record(make_row(f"req_{number}_{n}"))

    threads = [threading.Thread(target=record_some, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await ledger.flush()
    assert sum(1 for _ in ledger.reader.iterate()) == 2000


async def test_rows_are_for_their_owner_only(ledger: Ledger, tmp_path: Path, make_row: RowMaker) -> None:
    ledger.record(make_row())
    await ledger.flush()
    assert len(statuses(tmp_path)) >= 2
    assert all(status.st_mode & 0o077 == 0 for status in statuses(tmp_path))
