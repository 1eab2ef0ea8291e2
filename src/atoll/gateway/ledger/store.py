"""What the writer does to the database, each in one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError, StatementError

from atoll.gateway.ledger.database import Database
from atoll.gateway.ledger.encode import ROW_FIELDS, Values
from atoll.gateway.ledger.reader import JOINED, record_of
from atoll.gateway.ledger.row import LedgerRecord
from atoll.gateway.ledger.tables import FEEDBACK, REQUESTS

_ROW_FAULTS: Final = (IntegrityError, DataError, TypeError)
"""What is wrong with a row, as against the database."""
_log = logging.getLogger(__name__)


class Inserted(NamedTuple):
    written: int
    refused: int = 0


class Store:
    """Writes rows and feedback. Every method may raise SQLAlchemyError, and then has changed nothing of that row."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Compiled once: binding each row anew costs more than the database takes to write it.
        compiled = insert(REQUESTS).compile(database.writer, column_keys=ROW_FIELDS)
        self._insert_sql = str(compiled)
        self._in_order = itemgetter(*compiled.positiontup) if compiled.positiontup else None

    def insert(self, rows: Sequence[Values]) -> Inserted:
        """Write rows. Those that are there already, or that the database refuses, do not hold up the others."""
        if not rows:
            return Inserted(written=0)
        try:
            with self._database.writer.begin() as connection:
                connection.exec_driver_sql(self._insert_sql, [self._parameters(row) for row in rows])
        except _ROW_FAULTS:
            return self._insert_one_by_one(rows)
        return Inserted(written=len(rows))

    def put_feedback(self, request_id: str, score: float, comment: str | None) -> LedgerRecord | None:
        """Join feedback to a request, in place of any earlier one; None when there is no such request."""
        given = {"score": score, "comment": comment, "given_at": time.time()}
        try:
            return self._put_feedback(request_id, given)
        except IntegrityError:
            # Another process was first: now there is a row to update.
            return self._put_feedback(request_id, given)

    def _parameters(self, row: Values) -> Any:
        """In the driver's way: by position or by name."""
        return self._in_order(row) if self._in_order is not None else row

    def _insert_one_by_one(self, rows: Sequence[Values]) -> Inserted:
        written = refused = 0
        for row in rows:
            try:
                with self._database.writer.begin() as connection:
                    if _exists(connection, row["request_id"]):
                        continue
                    connection.execute(insert(REQUESTS), row)
            except _ROW_FAULTS as error:
                refused += 1
                _log.error("the ledger refused the row of %r: %s", row["request_id"], first_line(error))
            else:
                written += 1
        return Inserted(written, refused)

    def _put_feedback(self, request_id: str, given: dict[str, Any]) -> LedgerRecord | None:
        with self._database.writer.begin() as connection:
            if not _exists(connection, request_id):
                return None
            changed = connection.execute(update(FEEDBACK).where(FEEDBACK.c.request_id == request_id).values(given))
            if changed.rowcount == 0:
                connection.execute(insert(FEEDBACK).values(request_id=request_id, **given))
            return record_of(connection.execute(JOINED.where(REQUESTS.c.request_id == request_id)).mappings().one())


def _exists(connection: Connection, request_id: str) -> bool:
    return connection.execute(select(REQUESTS.c.seq).where(REQUESTS.c.request_id == request_id)).first() is not None


def first_line(error: Exception) -> str:
    """Without the statement and its values, which SQLAlchemy adds and which may hold content."""
    cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    return str(cause).partition("\n")[0][:300]
