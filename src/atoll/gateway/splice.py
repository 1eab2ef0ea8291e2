"""Edit the top-level keys of a JSON object in its bytes, and leave every other byte as it was sent.

Providers' prompt caches and fields that we do not know live on bytes that nobody re-serialised, so the gateway never
does. A key counts however it is spelt (`"mod\\u0065l"`) and however often it stands there: all of its occurrences are
edited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import orjson

# Possessive quantifiers: a long string is matched in one run and never backtracked into.
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN: Final = re.compile(_STRING + rb"|[{}\[\],]", re.DOTALL)
_SPACE: Final = rb"[ \t\n\r]*+"
_ESCAPED_ASCII: Final = rb"\u00"


class _Member(NamedTuple):
    """One `"key": value` of the top level: bytes from one comma to the next, offsets, ends exclusive."""

    key: str
    start: int
    value_start: int
    value_end: int
    end: int


def splice(
    body: bytes, parsed: Mapping[str, Any], values: Mapping[str, Any], remove: frozenset[str] = frozenset()
) -> bytes:
    """`body` with each key of `values` set to its value and each key of `remove` gone.

    `parsed` is what `body` parses to, a JSON object. A key that is there keeps its place, in each of its occurrences; a
    new key goes to the front. Without anything to do this is `body` itself.
    """
    present = [key for key in values if key in parsed]
    if remove.isdisjoint(parsed):
        if not present:
            return _prepend(body, values, is_empty=not parsed) if values else body
        if len(present) == 1:
            span = _span_of_string(body, parsed, present[0])
            if span is not None:
                changed = b"".join((body[: span[0]], orjson.dumps(values[present[0]]), body[span[1] :]))
                new = {key: value for key, value in values.items() if key != present[0]}
                return _prepend(changed, new, is_empty=False) if new else changed
    members = [
        body[member.start : member.end]
        if member.key not in values
        else b"".join(
            (
                body[member.start : member.value_start],
                orjson.dumps(values[member.key]),
                body[member.value_end : member.end],
            )
        )
        for member in _members(body)
        if member.key not in remove
    ]
    new_members = [_member(key, value) for key, value in values.items() if key not in parsed]
    opening, closing = body.index(b"{") + 1, body.rindex(b"}")
    return b"".join((body[:opening], b",".join(new_members + members), body[closing:]))


def append(body: bytes, key: str, value: Any) -> bytes:
    """`body`, a JSON object, with a new last member. The key must not be there yet."""
    closing = body.rindex(b"}")
    is_empty = body[:closing].rstrip().endswith(b"{")
    return b"".join((body[:closing], b"" if is_empty else b",", _member(key, value), body[closing:]))


def _member(key: str, value: Any) -> bytes:
    return b"".join((orjson.dumps(key), b":", orjson.dumps(value)))


def _prepend(body: bytes, values: Mapping[str, Any], *, is_empty: bool) -> bytes:
    opening = body.index(b"{") + 1
    new = b",".join(_member(key, value) for key, value in values.items())
    return b"".join((body[:opening], new, b"" if is_empty else b",", body[opening:]))


def _span_of_string(body: bytes, parsed: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Where the string value of a top-level key stands, found without a scan; None where only a scan can tell.

    The key is there (`parsed` has it). Without escaped ASCII in the body it must be spelt literally, so when its
    literal spelling occurs once, quotes included, that occurrence is the key and nothing else.
    """
    literal, pattern = _literal(key)
    if not isinstance(parsed[key], str) or body.count(literal) != 1 or _ESCAPED_ASCII in body:
        return None
    found = pattern.search(body)
    return found.span(1) if found else None


@cache
def _literal(key: str) -> tuple[bytes, re.Pattern[bytes]]:
    """The plain spelling of `key`, and what finds it with a string value. Keys come from our own code: a handful."""
    literal = orjson.dumps(key)
    return literal, re.compile(re.escape(literal) + _SPACE + b":" + _SPACE + b"(" + _STRING + b")", re.DOTALL)


def _members(body: bytes) -> Iterator[_Member]:
    """The members of the top-level object, in order. `body` must be a valid JSON object."""
    depth = 0
    start = 0
    key: bytes | None = None
    key_end = 0
    for token in _TOKEN.finditer(body):
        first = body[token.start()]
        if first == 0x22:
            if depth == 1 and key is None:
                key, key_end = token.group(), token.end()
        elif first in b"{[":
            depth += 1
            if depth == 1:
                start = token.end()
        elif first == 0x2C:
            if depth == 1:
                assert key is not None
                yield _member_at(body, key, key_end, start, token.start())
                start, key = token.end(), None
        else:
            depth -= 1
            if depth == 0 and key is not None:
                yield _member_at(body, key, key_end, start, token.start())


def _member_at(body: bytes, key: bytes, key_end: int, start: int, end: int) -> _Member:
    value = body[body.index(b":", key_end) + 1 : end]
    value_start = end - len(value.lstrip())
    value_end = value_start + len(value.strip())
    name = orjson.loads(key) if b"\\" in key else key[1:-1].decode()
    return _Member(name, start, value_start, value_end, end)
