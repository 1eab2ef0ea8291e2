"""A row as the database and the spill file take it: every value of its column's kind, every text bounded."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

import orjson
from sqlalchemy import Boolean, Column, Double, LargeBinary, Text

from atoll.config import LedgerSettings
from atoll.gateway.ledger.clean import clean_content, clean_text
from atoll.gateway.ledger.row import LedgerRow
from atoll.gateway.ledger.tables import REQUESTS

Values = dict[str, Any]
"""One row by column name."""

ROW_FIELDS: Final = tuple(field.name for field in fields(LedgerRow))
_MAX_INTEGER: Final = 2**31 - 1
"""Of an INTEGER column; the counters are far below it and BIGINT takes it too."""
_MAX_EMBEDDING_BYTES: Final = 65_536


def _empty(column: Column[Any]) -> Any:
    """What stands where nothing is known."""
    return None if column.nullable else column.type.python_type()


_EMPTY: Final = {name: _empty(REQUESTS.c[name]) for name in ROW_FIELDS}


class RowEncoder:
    """Encodes rows under the limits of the settings. Never raises: what does not fit its column becomes None or 0."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._encoders = [(name, self._encoder(name)) for name in ROW_FIELDS]

    def encode(self, row: LedgerRow) -> Values:
        return {name: encode(getattr(row, name)) for name, encode in self._encoders}

    def _encoder(self, name: str) -> Callable[[Any], Any]:
        by_name: dict[str, Callable[[Any], Any]] = {
            "decision_json": self._decision,
            "error_message": self._error,
            "prompt_json": self._content,
            "answer_text": self._content,
        }
        if name in by_name:
            return by_name[name]
        column = REQUESTS.c[name]
        if isinstance(column.type, Text):
            return self._text if column.nullable else lambda value: self._text(value) or ""
        if isinstance(column.type, Boolean):
            return bool
        if isinstance(column.type, Double):
            return _double if column.nullable else lambda value: _double(value) or 0.0
        if isinstance(column.type, LargeBinary):
            return _bytes
        return _integer if column.nullable else lambda value: _integer(value) or 0

    def _text(self, value: Any) -> str | None:
        return None if value is None else clean_text(str(value), self._settings.max_text_chars)

    def _error(self, value: Any) -> str | None:
        """An error may quote the whole request."""
        return None if value is None else clean_content(str(value), self._settings.max_text_chars)

    def _content(self, value: Any) -> str | None:
        if value is None or not self._settings.store_content:
            return None
        return clean_content(str(value), self._settings.max_content_chars)

    def _decision(self, value: Any) -> str | None:
        """JSON stays JSON: a decision over the limit loses its estimates, not its last half."""
        if value is None:
            return None
        text = str(value)
        if len(text) <= self._settings.max_content_chars:
            return clean_text(text, self._settings.max_content_chars)
        try:
            decision = orjson.loads(text)
        except orjson.JSONDecodeError:
            decision = None
        name = decision.get("candidate") if isinstance(decision, dict) else None
        return orjson.dumps({"candidate": self._text(name), "is_cut": True}).decode()


def to_json_line(values: Values) -> bytes:
    embedding = values["embedding"]
    packed = values | {"embedding": b64encode(embedding).decode()} if embedding is not None else values
    return orjson.dumps(packed, option=orjson.OPT_APPEND_NEWLINE)


def from_json_line(line: bytes) -> Values | None:
    """What `to_json_line` wrote; None for a torn line. Columns of another version are left out or empty."""
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("request_id"), str):
        return None
    packed = values.get("embedding")
    values["embedding"] = b64decode(packed) if isinstance(packed, str) else None
    return {name: empty if (value := values.get(name)) is None else value for name, empty in _EMPTY.items()}


def _double(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _integer(value: Any) -> int | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return max(-_MAX_INTEGER, min(int(value), _MAX_INTEGER))


def _bytes(value: Any) -> bytes | None:
    if not isinstance(value, bytes | bytearray | memoryview) or len(value) > _MAX_EMBEDDING_BYTES:
        return None
    return bytes(value)
