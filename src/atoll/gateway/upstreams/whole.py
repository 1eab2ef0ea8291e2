"""Answers that were not read from a socket: made here, or by a library, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import orjson

from atoll.gateway.upstreams.base import UpstreamResponse

DONE: Final = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class MadeResponse(UpstreamResponse):
    """A status, headers, and a body that is here (`body`) or comes in pieces (`stream`)."""

    def __init__(
        self,
        status: int,
        *,
        body: bytes = b"",
        stream: AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.status = status
        kind = "application/json" if stream is None else "text/event-stream"
        self.headers = {"content-type": kind, **(headers or {})}
        self._body = body
        self._stream = stream
        self._on_close = on_close

    async def read(self) -> bytes:
        if self._stream is None:
            return self._body
        return b"".join([piece async for piece in self._stream])

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._stream is None:
            yield self._body
            return
        async for piece in self._stream:
            yield piece

    async def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()


def refusal(
    status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
) -> MadeResponse:
    """An error answer in OpenAI's shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return MadeResponse(status, body=body, headers=headers)
