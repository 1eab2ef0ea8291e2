"""Opens the ledger's database: the folder, the file, its tables; and says what to do when that fails."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from atoll.errors import DataError

DATABASE_NAME: Final = "ledger.sqlite3"
_LOCK_NAME: Final = "ledger.lock"
_START_WAIT_S: Final = 30.0
"""For another process that is setting the tables up."""
_WRITE_WAIT_S: Final = 0.04
"""For another process that is writing. After that rows go to the spill file, where being killed cannot take them."""
_READ_WAIT_S: Final = 5.0
_QUICK_CHECK_BYTES: Final = 64_000_000
"""Files up to this size are checked whole at start; that takes well under a second."""
_CONNECT_WAIT_S: Final = 3


class Database:
    """Where the rows are: `ledger.sqlite3` in a folder, or whatever SQLAlchemy `url` names."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder
        self.path = None if url is not None else folder / DATABASE_NAME
        self._url = make_url(url) if url is not None else URL.create("sqlite", database=str(self.path))
        self._inode: int | None = None
        self.writer = self._engine(_WRITE_WAIT_S, is_writer=True)
        self.reader = self._engine(_READ_WAIT_S, is_writer=False)

    @property
    def where(self) -> str:
        """The database's name for people; without a password."""
        return str(self.path) if self.path is not None else self._url.render_as_string(hide_password=True)

    def prepare(self) -> None:
        """Create what is missing and bring the tables up to date. Several processes may do so at once.

        Raises DataError for a folder that cannot be written, a database that is broken, and one of a newer Atoll.
        """
        self._set_up(is_checked=True)

    def _set_up(self, *, is_checked: bool) -> None:
        self._make_folder()
        with self._locked():
            if self.path is not None:
                self._make_file(self.path)
            engine = self._engine(_START_WAIT_S, is_writer=True)
            try:
                self._migrate(engine, is_checked=is_checked)
            except SQLAlchemyError as error:
                raise self._explained(error) from error
            finally:
                engine.dispose()
            self._inode = self._current_inode()

    def open_existing(self) -> None:
        """As `prepare`, for a program that only reads. Raises DataError when there is nothing yet."""
        if self.path is not None and not self.path.exists():
            raise DataError(
                f"There is no ledger at {self.path} yet. It is made by the first `atoll serve`; if it is elsewhere, "
                "name its configuration with --config"
            )
        self._set_up(is_checked=False)

    def reopen_if_replaced(self) -> None:
        """Make the file anew when somebody has moved or deleted it: SQLite would write on into the lost one."""
        if self.path is not None and self._current_inode() != self._inode:
            self.close()
            self.prepare()

    def close(self) -> None:
        self.writer.dispose()
        self.reader.dispose()

    def _engine(self, wait_s: float, *, is_writer: bool) -> Engine:
        if self.path is None:
            is_postgres = self._url.get_backend_name() == "postgresql"
            limits = {"connect_timeout": _CONNECT_WAIT_S} if is_postgres else {}
            return create_engine(self._url, pool_pre_ping=True, connect_args=limits)
        arguments = {"timeout": wait_s, "check_same_thread": False, "isolation_level": None}
        engine = create_engine(self._url, connect_args=arguments, poolclass=QueuePool, pool_size=2, max_overflow=8)
        _set_up_sqlite(engine, is_writer=is_writer)
        return engine

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time sets a folder's database up."""
        try:
            handle = os.open(self.folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        deadline = time.monotonic() + _START_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"Another process has held {self.folder / _LOCK_NAME} for {_START_WAIT_S:.0f} s, setting the "
                        "ledger up. Look for an `atoll` that hangs, stop it and try again"
                    ) from None
                time.sleep(0.02)
            else:
                return

    def _make_file(self, path: Path) -> None:
        """Empty and for its owner only, which SQLite keeps for the files it puts beside it."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise self._unwritable(error) from error

    def _migrate(self, engine: Engine, *, is_checked: bool) -> None:
        # Alembic takes long to import, and only a start needs it; it would log each of its plugins then.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from atoll.gateway.ledger.migrate import upgrade

        if self.path is not None and is_checked and self.path.stat().st_size <= _QUICK_CHECK_BYTES:
            self._check(engine)
        with engine.begin() as connection:
            upgrade(connection, self.where)

    def _check(self, engine: Engine) -> None:
        with engine.connect() as connection:
            verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if verdict != "ok":
            raise self._broken(str(verdict))

    def _current_inode(self) -> int | None:
        if self.path is None:
            return None
        try:
            return self.path.stat().st_ino
        except OSError:
            return None

    def _explained(self, error: SQLAlchemyError) -> DataError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        # sqlite3 says `DatabaseError` itself of a file that is none or is damaged, and a subclass of everything else.
        if type(cause) is sqlite3.DatabaseError:
            return self._broken(str(cause))
        if isinstance(cause, sqlite3.OperationalError):
            return DataError(
                f"The ledger {self.where} cannot be opened: {cause}. Check that the folder {self.folder} can be "
                "written and has room, or set data_dir to another one"
            )
        return DataError(f"The ledger {self.where} cannot be used: {cause}")

    def _broken(self, detail: str) -> DataError:
        aside = self.folder / "damaged"
        return DataError(
            f"The ledger {self.where} is damaged ({detail}). Nothing was changed. Move it away and start again with an "
            f"empty one: mkdir {aside} && mv {self.where}* {aside}/ (SQLite's own `.recover` gets most rows out of it)"
        )

    def _unwritable(self, error: OSError) -> DataError:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        return DataError(
            f"The data folder {self.folder} cannot be written: {why}. Make it writable for this "
            "user, or set data_dir in the configuration to a folder that is"
        )


def _set_up_sqlite(engine: Engine, *, is_writer: bool) -> None:
    """All that is SQLite's own: pragmas of a connection, and transactions that take the write lock when they begin.

    A transaction that reads first and writes later would fail at once, without waiting, where another wrote between.
    """

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        if is_writer:
            # Readers and the writer do not wait for each other. The file remembers it, so this is work only once.
            cursor.execute("PRAGMA journal_mode=WAL")
        # A crash of the machine may now lose the last commits, never the file; a crash of the process loses none.
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA journal_size_limit=67108864")
        if not is_writer:
            cursor.execute("PRAGMA query_only=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")
