from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from atoll.config import LedgerSettings
from atoll.errors import DataError
from atoll.gateway.ledger import Ledger, LedgerRow, Reader
from atoll.gateway.ledger.database import DATABASE_NAME, Database
from atoll.gateway.ledger.tables import METADATA

RowMaker = Callable[..., LedgerRow]
LedgerOpener = Callable[..., Ledger]


def test_migrations_from_empty_lead_to_the_tables_of_the_code(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.prepare()
    with database.writer.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []
        names = set(connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'index'")).scalars())
    assert "ix_requests_started_at" in names
    database.close()


def test_preparing_again_changes_nothing(tmp_path: Path, open_ledger: LedgerOpener, make_row: RowMaker) -> None:
    ledger = open_ledger()
    ledger.record(make_row())
    ledger.shut()
    assert len(open_ledger().reader.tail(10)) == 1


def test_several_processes_may_start_at_once(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from atoll.config import LedgerSettings
        from atoll.gateway.ledger import Ledger, LedgerRow
        ledger = Ledger(LedgerSettings(), Path(sys.argv[1]))
        ledger.open()
        ledger.record(LedgerRow(f"req_{sys.argv[2]}", 1.0, "/v1/completions"))
        ledger.shut()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "new" / "folder")]
    started = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(4)]
    assert [process.communicate(timeout=60)[1] for process in started] == [""] * 4
    database = Database(tmp_path / "new" / "folder")
    assert {record.request_id for record in Reader(database).iterate()} == {f"req_{n}" for n in range(4)}
    database.close()


class TestRefusals:
    """What cannot be used is refused before the first request, with what to do; nothing is changed or deleted."""

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"cannot be written: Not a directory.*data_dir") as caught:
            Ledger(LedgerSettings(), tmp_path / "file" / "atoll").open()
        assert str(tmp_path / "file" / "atoll") in str(caught.value)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(DataError, match=r"cannot be written: Permission denied.*data_dir"):
            Ledger(LedgerSettings(), tmp_path).open()

    def test_a_folder_in_place_of_the_file(self, tmp_path: Path) -> None:
        (tmp_path / DATABASE_NAME).mkdir()
        with pytest.raises(DataError, match="cannot be written: Is a directory"):
            Ledger(LedgerSettings(), tmp_path).open()

    def test_a_file_that_is_no_database(self, tmp_path: Path) -> None:
        path = tmp_path / DATABASE_NAME
        path.write_bytes(b"These are no rows. " * 1000)
        with pytest.raises(DataError) as caught:
            Ledger(LedgerSettings(), tmp_path).open()
        assert f"{path} is damaged (file is not a database)" in str(caught.value)
        assert path.read_bytes() == b"These are no rows. " * 1000

    def test_a_damaged_database_is_kept_and_the_advice_works(
        self, tmp_path: Path, open_ledger: LedgerOpener, make_row: RowMaker
    ) -> None:
        ledger = open_ledger()
        for _ in range(500):
            ledger.record(make_row(reason="r" * 500))
        ledger.shut()
        path = tmp_path / DATABASE_NAME
        damaged = bytearray(path.read_bytes())
        damaged[40_000:80_000] = os.urandom(40_000)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged") as caught:
            open_ledger()
        assert path.read_bytes() == damaged
        command = str(caught.value).partition("empty one: ")[2].partition(" (")[0]
        subprocess.run(["sh", "-c", command], check=True)
        assert (tmp_path / "damaged" / DATABASE_NAME).read_bytes() == damaged
        assert open_ledger().reader.tail(10) == []

    def test_a_database_of_a_newer_atoll(self, tmp_path: Path, open_ledger: LedgerOpener) -> None:
        open_ledger().shut()
        with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.close()
        with pytest.raises(DataError, match=r"newer Atoll: its revision is '9999'.*Install the newer Atoll"):
            open_ledger()

    def test_reading_where_there_is_no_ledger_makes_none(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no ledger at .* yet"):
            Database(tmp_path / "none").open_existing()
        assert not (tmp_path / "none").exists()


async def test_a_ledger_that_is_moved_away_while_running_is_made_anew(
    tmp_path: Path, ledger: Ledger, make_row: RowMaker
) -> None:
    """SQLite goes on writing into a file that nobody can see any more."""
    ledger.record(make_row("req_before"))
    await ledger.flush()
    shutil.move(tmp_path / DATABASE_NAME, tmp_path / "old.sqlite3")
    for suffix in ("-wal", "-shm"):
        shutil.move(tmp_path / (DATABASE_NAME + suffix), tmp_path / f"old.sqlite3{suffix}")
    ledger.record(make_row("req_after"))
    await ledger.flush()
    assert [record.request_id for record in ledger.reader.tail(10)] == ["req_after"]
    assert ledger.stats().lost == 0
