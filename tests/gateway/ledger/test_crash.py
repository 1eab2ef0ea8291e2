"""A process is killed: what was recorded more than a tenth of a second before is there, and the database is whole."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from atoll.gateway.ledger import Reader
from atoll.gateway.ledger.database import DATABASE_NAME, Database

LOST_S = 0.1
WRITER = textwrap.dedent(
    """
    import sys, threading, time
    from pathlib import Path
    from atoll.config import LedgerSettings
    from atoll.gateway.ledger import Ledger, LedgerRow

    folder, prefix = sys.argv[1:]
    ledger = Ledger(LedgerSettings(), Path(folder))
    ledger.open()
    latest = [0.0]

    def watch():
        while True:
            began = time.monotonic()
            time.sleep(0.01)
            latest.append(time.monotonic() - began - 0.01)

    threading.Thread(target=watch, daemon=True).start()
    n = 0
    while True:
        for _ in range(10):
            ledger.record(LedgerRow(f"{prefix}_{n}", time.time(), "/v1/chat/completions", reason="r" * 200))
            n += 1
        print(n, time.monotonic(), max(latest[-100:]), flush=True)
        time.sleep(0.005)
    """
)
"""Records without end. Tells after each few how many there are, when, and how late this machine wakes a thread."""


def stored(folder: Path) -> set[str]:
    database = Database(folder)
    ids = {record.request_id for record in Reader(database).iterate()}
    database.close()
    return ids


def kill_while_writing(folder: Path, prefixes: list[str], after_s: float) -> dict[str, int]:
    """How many rows of each writer were recorded at least `LOST_S` before it was killed."""
    writers = {
        prefix: subprocess.Popen([sys.executable, "-c", WRITER, str(folder), prefix], stdout=subprocess.PIPE, text=True)
        for prefix in prefixes
    }
    for writer in writers.values():
        assert writer.stdout is not None
        writer.stdout.readline()
    time.sleep(after_s)
    killed_at = time.monotonic()
    for writer in writers.values():
        writer.send_signal(signal.SIGKILL)
    safe = {}
    for prefix, writer in writers.items():
        lines = [line.split() for line in writer.communicate(timeout=60)[0].splitlines() if line.count(" ") == 2]
        # A busy machine wakes the writer's threads late, which is none of the ledger's doing.
        safe_until = killed_at - LOST_S - 3 * max(float(late) for _, _, late in lines)
        safe[prefix] = max((int(n) for n, at, _ in lines if float(at) < safe_until), default=0)
    return safe


@pytest.mark.slow
def test_killed_at_random_points(tmp_path: Path) -> None:
    chance = random.Random(7)
    total = 0
    for number in range(8):
        prefix = f"req_{number}"
        safe = kill_while_writing(tmp_path, [prefix], chance.uniform(0.15, 0.6))[prefix]
        connection = sqlite3.connect(tmp_path / DATABASE_NAME)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        missing = {f"{prefix}_{n}" for n in range(safe)} - stored(tmp_path)
        assert not missing, f"{len(missing)} of {safe} rows are lost"
        total += safe
    assert total > 0


@pytest.mark.slow
def test_several_workers_killed_at_once(tmp_path: Path) -> None:
    """Their rows are in the database or in their spill files, which the next start takes over."""
    safe = kill_while_writing(tmp_path, [f"req_{n}" for n in range(4)], 1.0)
    from atoll.config import LedgerSettings
    from atoll.gateway.ledger import Ledger

    ledger = Ledger(LedgerSettings(), tmp_path)
    ledger.open()
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("ledger.spill-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    ledger.shut()
    there = stored(tmp_path)
    assert sum(safe.values()) > 0
    for prefix, count in safe.items():
        missing = {f"{prefix}_{n}" for n in range(count)} - there
        assert not missing, f"{len(missing)} of {count} rows are lost"


def test_workers_on_one_file_lose_nothing(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from atoll.config import LedgerSettings
        from atoll.gateway.ledger import Ledger, LedgerRow
        ledger = Ledger(LedgerSettings(flush_interval_s=0.01), Path(sys.argv[1]))
        ledger.open()
        for n in range(1500):
            ledger.record(LedgerRow(f"req_{sys.argv[2]}_{n}", time.time(), "/v1/completions"))
            if n % 10 == 0:
                time.sleep(0.002)
        ledger.shut()
        """
    )
    workers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(n)]) for n in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    there = stored(tmp_path)
    assert not list(tmp_path.glob("ledger.spill-*"))
    assert there == {f"req_{worker}_{n}" for worker in range(4) for n in range(1500)}
