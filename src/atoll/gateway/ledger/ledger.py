"""One row per request, kept off the request's path."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from pathlib import Path
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from atoll.config import LedgerSettings
from atoll.errors import DataError, Unavailable
from atoll.gateway.ledger.clean import clean_text
from atoll.gateway.ledger.database import Database
from atoll.gateway.ledger.encode import RowEncoder
from atoll.gateway.ledger.reader import Reader
from atoll.gateway.ledger.row import LedgerRecord, LedgerRow
from atoll.gateway.ledger.writer import Writer, WriterStats

_log = logging.getLogger(__name__)

MAX_QUEUED_BYTES: Final = 64 * 1024 * 1024
_CLOSE_TIMEOUT_S: Final = 10.0
_FEEDBACK_TIMEOUT_S: Final = 10.0
_PATIENCE_S: Final = 0.25
"""How long feedback waits, beyond the flush interval, for the row of a request that another worker has just served, and
for other processes that are writing."""
_RETRY_AFTER_S: Final = 5.0


class Ledger:
    """One for a process; several processes may share a folder.

    A row is in the database `flush_interval_s` after `record`, plus the time of one write: what a killed process loses.
    While the database cannot be written, rows go to a file beside it as quickly, and follow later.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        data_path: Path,
        *,
        url: str | None = None,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        """`url` names another database than `data_path/ledger.sqlite3`, in SQLAlchemy's way."""
        self._settings = settings
        self._database = Database(data_path, url)
        self._encoder = RowEncoder(settings)
        self._max_queued_bytes = max_queued_bytes
        self._writer: Writer | None = None
        self._last_stats = WriterStats()
        self._reader = Reader(self._database)

    @property
    def reader(self) -> Reader:
        """What is written; blocking, for threads that may wait."""
        return self._reader

    @property
    def queue_depth(self) -> int:
        return self.stats().queued

    def stats(self) -> WriterStats:
        """Since the start; still told after the end."""
        return self._writer.stats if self._writer is not None else self._last_stats

    async def start(self) -> None:
        """Raises DataError when the folder or the database cannot be used; the message says what to do."""
        if self._settings.enabled:
            await asyncio.to_thread(self.open)

    def open(self) -> None:
        """`start` for code without an event loop."""
        assert self._writer is None, "a ledger is opened once"
        self._database.prepare()
        self._writer = Writer(
            self._database,
            self._encoder,
            interval_s=self._settings.flush_interval_s,
            max_queued_bytes=self._max_queued_bytes,
        )
        self._writer.start()
        # A program that ends without closing still leaves nothing behind.
        atexit.register(self.shut)

    def record(self, row: LedgerRow) -> None:
        """Take a finished row, which is the ledger's from now on. Microseconds; never raises; nothing while closed."""
        if self._writer is not None:
            self._writer.add(row)

    async def flush(self) -> None:
        """Return when the rows recorded until now are in the database, or wait on disk beside it."""
        if self._writer is not None:
            await asyncio.wrap_future(self._writer.drained())

    async def get(self, request_id: str) -> LedgerRecord | None:
        """A request with its feedback, even when it has only just been recorded.

        Raises Unavailable while the database cannot be read.
        """
        await self.flush()
        try:
            return await asyncio.to_thread(self._reader.get, request_id)
        except SQLAlchemyError as error:
            raise self._unavailable() from error

    async def add_feedback(self, request_id: str, score: float, comment: str | None = None) -> LedgerRecord | None:
        """Join a score in [0, 1] to a request, in place of an earlier one; the request with it, None if there is none.

        The request may have ended a moment ago, in this process or another. Raises Unavailable while the database
        cannot be written.
        """
        assert 0 <= score <= 1, score
        if self._writer is None:
            return None
        text = clean_text(comment, self._settings.max_text_chars) if comment is not None else None
        deadline = time.monotonic() + self._settings.flush_interval_s + _PATIENCE_S
        while True:
            is_last = time.monotonic() >= deadline
            try:
                record = await self._put_feedback(self._writer, request_id, score, text)
            except (SQLAlchemyError, DataError, TimeoutError) as error:
                if is_last:
                    raise self._unavailable() from error
            else:
                if record is not None or is_last:
                    return record
            await asyncio.sleep(self._settings.flush_interval_s)

    async def close(self) -> None:
        """Write what is queued. Idempotent."""
        await asyncio.to_thread(self.shut)

    def shut(self) -> None:
        """`close` for code without an event loop."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        atexit.unregister(self.shut)
        if not writer.close(_CLOSE_TIMEOUT_S):
            _log.error(
                "the ledger could not be closed in %.0f s: %d rows are lost", _CLOSE_TIMEOUT_S, writer.stats.queued
            )
        self._last_stats = writer.stats
        self._database.close()

    async def _put_feedback(
        self, writer: Writer, request_id: str, score: float, comment: str | None
    ) -> LedgerRecord | None:
        async with asyncio.timeout(_FEEDBACK_TIMEOUT_S):
            return await asyncio.wrap_future(
                writer.submit(lambda store: store.put_feedback(request_id, score, comment))
            )

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            "The ledger cannot be reached at the moment. Try again later",
            code="ledger_unavailable",
            retry_after_s=_RETRY_AFTER_S,
        )
