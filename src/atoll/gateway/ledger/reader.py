"""Questions to the ledger: one row, the last ones, all of them, and sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Column, ColumnElement, Select, Text, case, func, literal, select

from atoll.gateway.ledger.database import Database
from atoll.gateway.ledger.encode import ROW_FIELDS
from atoll.gateway.ledger.row import LedgerRecord
from atoll.gateway.ledger.tables import FEEDBACK, REQUESTS

JOINED: Final = select(
    REQUESTS.c.seq,
    *(REQUESTS.c[name] for name in ROW_FIELDS),
    FEEDBACK.c.score.label("feedback_score"),
    FEEDBACK.c.comment.label("feedback_comment"),
    FEEDBACK.c.given_at.label("feedback_at"),
).select_from(REQUESTS.outerjoin(FEEDBACK, FEEDBACK.c.request_id == REQUESTS.c.request_id))
"""Every row with its feedback, in `LedgerRecord`'s names."""

_ROWS_PER_READ: Final = 500

Dimension = Literal["model", "key"]


@dataclass(frozen=True, slots=True)
class Filters:
    """Which rows: all that is given must hold."""

    since: float | None = None
    """Started at or after, in seconds since the epoch."""
    until: float | None = None
    """Started before."""
    model: str | None = None
    """Requested or served."""
    key_id: str | None = None
    session: str | None = None
    is_error: bool | None = None
    """Whether the status is 400 or above."""
    has_feedback: bool | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        rows = REQUESTS.c
        if self.since is not None:
            yield rows.started_at >= self.since
        if self.until is not None:
            yield rows.started_at < self.until
        if self.model is not None:
            yield (rows.served_model == self.model) | (rows.requested_model == self.model)
        if self.key_id is not None:
            yield rows.key_id == self.key_id
        if self.session is not None:
            yield rows.session == self.session
        if self.is_error is not None:
            yield rows.status >= 400 if self.is_error else rows.status < 400
        if self.has_feedback is not None:
            yield FEEDBACK.c.score.is_not(None) if self.has_feedback else FEEDBACK.c.score.is_(None)


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over the requests of one model or key."""

    name: str | None
    """None sums the requests that had none."""
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd: float
    mean_latency_s: float | None
    feedback: int
    """How many requests have feedback."""
    mean_score: float | None


class Reader:
    """Reads while others write. Any method may raise SQLAlchemyError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, request_id: str) -> LedgerRecord | None:
        found = self._read(JOINED.where(REQUESTS.c.request_id == request_id))
        return found[0] if found else None

    def tail(self, count: int, filters: Filters = Filters(), *, after_seq: int | None = None) -> list[LedgerRecord]:
        """The last `count` rows, oldest first; with `after_seq`, of those written after that row."""
        query = JOINED.where(*filters.conditions()).order_by(REQUESTS.c.seq.desc()).limit(count)
        if after_seq is not None:
            query = query.where(REQUESTS.c.seq > after_seq)
        return self._read(query)[::-1]

    def iterate(self, filters: Filters = Filters(), *, after_seq: int = 0) -> Iterator[LedgerRecord]:
        """All rows in the order in which they were written, a few hundred in memory at a time.

        Each read is a transaction of its own: a slow consumer never keeps the database from tidying up.
        """
        query = JOINED.where(*filters.conditions()).order_by(REQUESTS.c.seq).limit(_ROWS_PER_READ)
        while records := self._read(query.where(REQUESTS.c.seq > after_seq)):
            yield from records
            after_seq = records[-1].seq

    def totals(self, by: Dimension, filters: Filters = Filters()) -> list[Total]:
        """Sums by served model or by key, the dearest first."""
        rows = REQUESTS.c
        name: Column[Any] = rows.served_model if by == "model" else rows.key_id
        cost = func.coalesce(func.sum(rows.cost_usd), 0.0)
        requests = func.count()
        query = (
            select(
                name.label("name"),
                requests.label("requests"),
                func.sum(case((rows.status >= 400, 1), else_=0)).label("errors"),
                func.coalesce(func.sum(rows.prompt_tokens), 0).label("prompt_tokens"),
                func.coalesce(func.sum(rows.cached_tokens), 0).label("cached_tokens"),
                func.coalesce(func.sum(rows.completion_tokens), 0).label("completion_tokens"),
                cost.label("cost_usd"),
                func.avg(rows.latency_s).label("mean_latency_s"),
                func.count(FEEDBACK.c.score).label("feedback"),
                func.avg(FEEDBACK.c.score).label("mean_score"),
            )
            .select_from(JOINED.get_final_froms()[0])
            .where(*filters.conditions())
            .group_by(name)
            .order_by(cost.desc(), requests.desc(), func.coalesce(name, literal("", Text)))
        )
        with self._database.reader.connect() as connection:
            return [_total(row) for row in connection.execute(query).mappings()]

    def _read(self, query: Select[Any]) -> list[LedgerRecord]:
        with self._database.reader.connect() as connection:
            return [record_of(row) for row in connection.execute(query).mappings()]


def record_of(row: Mapping[Any, Any]) -> LedgerRecord:
    """The record behind one row of `JOINED`."""
    return LedgerRecord(**row)


def _total(row: Mapping[Any, Any]) -> Total:
    sums = {name: int(row[name]) for name in ("errors", "prompt_tokens", "cached_tokens", "completion_tokens")}
    return Total(**{**row, **sums})
