"""uvicorn's HTTP protocol with what it lacks: a bound on a request's head, in bytes and in time, and our error bodies.

httptools sets no bound, so that anybody who can connect could fill memory with headers, or hold connections for ever by
sending them a byte at a time, before any key is looked at.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll.errors import InvalidRequest

MAX_HEAD_BYTES: Final = 65_536
HEAD_TIMEOUT_S: Final = 20.0
_ANSWER: Final = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
_TOO_LARGE: Final = InvalidRequest(f"The headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
_NOT_HTTP: Final = InvalidRequest("This is not an HTTP request that can be read", code="invalid_http")


class BoundedProtocol(HttpToolsProtocol):
    """Costs nothing for a head that arrives whole: the timer is set only when one is left open."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_is_open = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._head_is_open:
            self._stop_timer()
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", _TOO_LARGE)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def on_message_begin(self) -> None:
        self._head_is_open = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP."""
        self._refuse(b"400 Bad Request", _NOT_HTTP)

    def _refuse(self, status: bytes, error: InvalidRequest) -> None:
        body = error.body_bytes()
        self.transport.write(_ANSWER % (status, len(body), body))
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
