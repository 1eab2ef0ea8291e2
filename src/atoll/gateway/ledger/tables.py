"""The ledger's tables, the same on SQLite and PostgreSQL. Migrations follow them; a test holds the two together."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

METADATA: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)

SEQUENCE: Final = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only where the type is INTEGER."""

REQUESTS: Final = Table(
    "requests",
    METADATA,
    Column("seq", SEQUENCE, primary_key=True, autoincrement=True, comment="the order in which rows were written"),
    Column("request_id", Text, nullable=False, unique=True),
    Column("started_at", Double, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("key_id", Text),
    Column("session", Text),
    Column("requested_model", Text),
    Column("served_model", Text),
    Column("upstream", Text),
    Column("upstream_id", Text),
    Column("router", Text),
    Column("router_version", Text),
    Column("propensity", Double),
    Column("reason", Text),
    Column("preference", Double),
    Column("is_streaming", Boolean, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("prompt_tokens", BigInteger),
    Column("cached_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    Column("is_usage_estimated", Boolean, nullable=False),
    Column("cost_usd", Double),
    Column("ttft_s", Double),
    Column("latency_s", Double),
    Column("status", Integer, nullable=False),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("embedding_space", Text),
    # The long ones come last: sums over the others then never read their pages.
    Column("decision_json", Text),
    Column("embedding", LargeBinary),
    Column("prompt_json", Text),
    Column("answer_text", Text),
    Index("ix_requests_started_at", "started_at"),
)

FEEDBACK: Final = Table(
    "feedback",
    METADATA,
    Column("request_id", Text, ForeignKey(REQUESTS.c.request_id), primary_key=True),
    Column("score", Double, nullable=False),
    Column("comment", Text),
    Column("given_at", Double, nullable=False),
)
"""One a request: the last one counts."""
