"""Which headers travel, and what Atoll's own say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from atoll.errors import RequestError

JSON: Final = b"application/json"
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"

REQUEST_ID: Final = b"x-atoll-request-id"
MODEL: Final = b"x-atoll-model"
ROUTER: Final = b"x-atoll-router"
REASON: Final = b"x-atoll-reason"
COST: Final = b"x-atoll-cost-usd"
ATTEMPTS: Final = b"x-atoll-attempts"

_MAX_REASON_CHARS: Final = 300
_MAX_FORWARDED_CHARS: Final = 1000

# Allow-lists both ways: what is not named here stays behind, so that credentials, cookies and hop-by-hop headers never
# travel.
_TO_UPSTREAM: Final = (
    b"openai-beta",
    b"anthropic-beta",
    b"anthropic-version",
    b"traceparent",
    b"tracestate",
    b"x-request-id",
)
_TO_CLIENT: Final = ("openai-processing-ms", "openai-version", "x-request-id")
_TO_CLIENT_PREFIX: Final = "x-ratelimit-"

Headers = list[tuple[bytes, bytes]]


def by_name(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """ASGI's list as a mapping, names in lower case as servers give them; the last of equal names counts."""
    return dict(headers)


def to_upstream(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The client's headers that an upstream may see."""
    return {
        name.decode(): headers[name].decode("latin-1")[:_MAX_FORWARDED_CHARS]
        for name in _TO_UPSTREAM
        if name in headers
    }


def to_client(headers: Mapping[str, str]) -> Headers:
    """The upstream's headers that a client may see."""
    return [
        (name.encode("latin-1", "replace"), _clean(value, _MAX_FORWARDED_CHARS))
        for name, value in headers.items()
        if name in _TO_CLIENT or name.startswith(_TO_CLIENT_PREFIX)
    ]


def of_decision(model: str, router: str | None, reason: str | None, attempts: int) -> Headers:
    """Which candidate answers, and why."""
    headers = [(MODEL, _clean(model)), (ATTEMPTS, b"%d" % attempts)]
    if router is not None:
        headers.append((ROUTER, _clean(router)))
    if reason is not None:
        headers.append((REASON, _clean(reason)))
    return headers


def cost(cost_usd: float) -> tuple[bytes, bytes]:
    return COST, (b"%.8f" % cost_usd).rstrip(b"0").rstrip(b".") or b"0"


def of_error(error: RequestError) -> Headers:
    """What an error says in headers: when to come back (whole seconds, never too early), and how to authenticate."""
    told = [(b"content-type", JSON)]
    if error.retry_after_s is not None:
        told.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.http_status == 401:
        told.append((b"www-authenticate", b"Bearer"))
    return told


def _clean(text: str, max_chars: int = _MAX_REASON_CHARS) -> bytes:
    """Printable ASCII, bounded: whatever a model or a router is called, it cannot break or forge a header."""
    shown = text[:max_chars]
    if shown.isascii() and shown.isprintable():
        return shown.encode()
    return bytes(byte if 0x20 <= byte < 0x7F else 0x3F for byte in shown.encode("ascii", "replace"))
