"""The thread that writes the ledger, so that no request ever waits for a disk.

Rows gather for a moment and go to the database in one transaction. While it cannot take them they go to a spill file
beside it and follow later. Only when that fails too do they stay in memory, and beyond a limit are counted as lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from atoll.errors import DataError
from atoll.gateway.ledger.database import Database
from atoll.gateway.ledger.encode import RowEncoder, Values
from atoll.gateway.ledger.row import LedgerRow
from atoll.gateway.ledger.spill import SpillFile
from atoll.gateway.ledger.store import Store, first_line

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_ROWS_PER_TRANSACTION: Final = 500
"""So that writers in other processes get their turn."""
_TOLD_FAILURES: Final = 3
"""Fewer in a row are other processes that write at the same time, and no news."""
_MIN_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 5.0
_ROW_WEIGHT_BYTES: Final = 1000
"""Of a row without its long texts."""
_LIGHT_ERROR_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class WriterStats:
    """Rows since the start."""

    queued: int = 0
    """In memory now."""
    written: int = 0
    spilled: int = 0
    """Went to the spill file first."""
    lost: int = 0
    """Neither the database nor the spill file could take them, or the database refused them."""
    without_content: int = 0
    """Their prompt and answer were left out, because too much was queued."""
    failures: int = 0
    """Writes that failed."""
    is_down: bool = False
    """Whether the last write failed."""


class Writer:
    """Takes rows from any thread; writes them from its own."""

    def __init__(self, database: Database, encoder: RowEncoder, *, interval_s: float, max_queued_bytes: int) -> None:
        self._database = database
        self._store = Store(database)
        self._encoder = encoder
        self._interval_s = interval_s
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._rows: list[LedgerRow] = []
        self._queued_bytes = 0
        self._tasks: list[tuple[Callable[[Store], Any] | None, Future[Any]]] = []
        self._encoded: list[Values] = []
        """Rows that neither the database nor the spill file would take."""
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._is_closing = False
        self._spill: SpillFile | None = None
        self._orphans: list[SpillFile] = []
        self._failures_in_a_row = 0
        self._retry_at = 0.0
        self._retry_s = _MIN_RETRY_S
        self._spill_retry_at = 0.0
        self._stats_lock = threading.Lock()
        self._stats = WriterStats()
        self._thread = threading.Thread(target=self._run, name="atoll-ledger", daemon=True)

    @property
    def stats(self) -> WriterStats:
        return replace(self._stats, queued=len(self._rows) + len(self._encoded))

    def start(self) -> None:
        self._orphans = list(SpillFile.orphans(self._database.folder))
        self._thread.start()
        if self._orphans:
            self._wake.set()

    def add(self, row: LedgerRow) -> None:
        """Queue a row; takes microseconds whatever the database does."""
        weight = _weight_bytes(row)
        with self._lock:
            if self._is_closing:
                self._count(lost=1)
                return
            if self._queued_bytes + weight > self._max_queued_bytes:
                weight = _ROW_WEIGHT_BYTES
                if self._queued_bytes + weight > 2 * self._max_queued_bytes:
                    self._count(lost=1)
                    return
                _lighten(row)
                self._count(without_content=1)
            self._rows.append(row)
            self._queued_bytes += weight
        if not self._wake.is_set():
            self._wake.set()

    def submit(self, task: Callable[[Store], _T]) -> Future[_T]:
        """Run `task` in the writer's thread, after the rows that were added before it.

        Fails with DataError, at once, while the database is known not to answer.
        """
        return self._queue(task)

    def drained(self) -> Future[None]:
        """Done when the rows that were added before are in the database or on disk beside it."""
        return self._queue(None)

    def _queue(self, task: Callable[[Store], Any] | None) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closing:
                future.set_exception(DataError("The ledger is closed"))
                return future
            self._tasks.append((task, future))
        self._hurry.set()
        self._wake.set()
        return future

    def close(self, timeout_s: float) -> bool:
        """Write what is queued and end the thread; whether that was done in time."""
        with self._lock:
            self._is_closing = True
        self._hurry.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._patience_s())
            if not self._hurry.is_set():
                # The first row of a batch has come: others may join it.
                self._hurry.wait(self._interval_s)
            self._hurry.clear()
            self._wake.clear()
            is_last = self._is_closing
            if is_last:
                self._retry_at = self._spill_retry_at = 0.0
            self._turn()
            if is_last:
                self._end()
                return

    def _patience_s(self) -> float | None:
        """How long to wait for rows: for ever, unless some wait on disk or in memory."""
        if not self._encoded and not self._orphans and (self._spill is None or self._spill.is_empty):
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def _turn(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
            tasks, self._tasks = self._tasks, []
            self._queued_bytes = 0
        encoded, self._encoded = self._encoded + [self._encoder.encode(row) for row in rows], []
        del rows
        try:
            for start in range(0, len(encoded), _ROWS_PER_TRANSACTION):
                self._write_guarded(encoded[start : start + _ROWS_PER_TRANSACTION])
            self._recover_some()
        finally:
            for task, future in tasks:
                self._do(task, future)

    def _do(self, task: Callable[[Store], Any] | None, future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if task is None:
            future.set_result(None)
        elif time.monotonic() < self._retry_at:
            # Each attempt may take seconds, in which no row would be put aside.
            future.set_exception(DataError("The ledger's database does not answer"))
        else:
            try:
                future.set_result(task(self._store))
            except Exception as error:
                if isinstance(error, SQLAlchemyError):
                    self._failed(error)
                future.set_exception(error)

    def _write_guarded(self, rows: list[Values]) -> None:
        try:
            self._write(rows)
        except Exception:
            # A thread that dies would lose every later row without a word.
            _log.exception("the ledger's writer made a mistake, lost %d rows and goes on", len(rows))
            self._count(lost=len(rows))

    def _write(self, rows: list[Values]) -> None:
        """To the database, else to the spill file, else back into memory."""
        if not self._insert(rows) and not self._put_aside(rows):
            self._keep(rows)

    def _put_aside(self, rows: list[Values]) -> bool:
        """Whether the spill file took the rows."""
        if time.monotonic() < self._spill_retry_at:
            return False
        try:
            if self._spill is None:
                self._spill = SpillFile.create(self._database.folder)
            self._spill.append(rows)
        except OSError as error:
            if not self._encoded:
                _log.error("nor can %s (%s); rows wait in memory", self._database.folder, error)
            self._spill_retry_at = time.monotonic() + _MAX_RETRY_S
            return False
        self._count(spilled=len(rows))
        return True

    def _insert(self, rows: Sequence[Values]) -> bool:
        """Whether the database took the rows. A database that failed is left alone for a while."""
        if time.monotonic() < self._retry_at:
            return False
        try:
            self._database.reopen_if_replaced()
            inserted = self._store.insert(rows)
        except (SQLAlchemyError, DataError, OSError) as error:
            self._failed(error)
            return False
        if self._failures_in_a_row >= _TOLD_FAILURES:
            _log.warning("the ledger can be written again")
        self._failures_in_a_row = 0
        self._retry_s = _MIN_RETRY_S
        self._count(written=inserted.written, lost=inserted.refused, is_down=False)
        return True

    def _failed(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row == _TOLD_FAILURES:
            _log.error(
                "the ledger %s cannot be written (%s); requests go on, and their rows wait in %s",
                self._database.where,
                first_line(error),
                self._database.folder,
            )
        self._count(failures=1, is_down=True)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)

    def _keep(self, rows: list[Values]) -> None:
        """The disk takes nothing: hold as many rows as memory may hold, the oldest first."""
        self._encoded.extend(rows)
        max_rows = self._max_queued_bytes // _ROW_WEIGHT_BYTES
        for row in rows:
            row["prompt_json"] = row["answer_text"] = row["decision_json"] = None
        excess = len(self._encoded) - max_rows
        if excess > 0:
            del self._encoded[max_rows:]
            self._count(lost=excess)

    def _recover_some(self) -> None:
        """Bring a part of what waits on disk into the database: ours first, then that of processes that are gone."""
        if self._spill is not None and not self._spill.is_empty:
            self._recover(self._spill)
        elif self._orphans:
            orphan = self._orphans[0]
            if (orphan.is_empty or self._recover(orphan)) and orphan.is_empty:
                self._orphans.pop(0).close()
                _log.info("the ledger has taken over what waited in %s", orphan.path)

    def _recover(self, spill: SpillFile) -> bool:
        try:
            peek = spill.peek()
            if peek.rows and not self._insert(peek.rows):
                return False
            spill.taken(peek.read_to)
        except OSError as error:
            self._failed(error)
            return False
        self._count(lost=peek.torn)
        return True

    def _end(self) -> None:
        if self._encoded:
            _log.error(
                "the ledger lost %d rows: neither its database nor its folder could be written", len(self._encoded)
            )
            self._count(lost=len(self._encoded))
            self._encoded = []
        for spill in [*self._orphans, *([self._spill] if self._spill is not None else [])]:
            spill.close()

    def _count(self, *, is_down: bool | None = None, **more: int) -> None:
        with self._stats_lock:
            stats = self._stats
            sums = {name: getattr(stats, name) + count for name, count in more.items()}
            self._stats = replace(stats, is_down=stats.is_down if is_down is None else is_down, **sums)


def _weight_bytes(row: LedgerRow) -> int:
    """About what a row holds in memory."""
    texts = (row.prompt_json, row.answer_text, row.error_message, row.decision_json)
    return _ROW_WEIGHT_BYTES + sum(len(text) for text in texts if text)


def _lighten(row: LedgerRow) -> None:
    """Leave out what is long and not needed for the books."""
    row.prompt_json = row.answer_text = row.decision_json = None
    row.error_message = row.error_message[:_LIGHT_ERROR_CHARS] if row.error_message else None
