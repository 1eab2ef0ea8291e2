"""HTTP to an upstream: one small interface, aiohttp behind it.

Four limits, each with an error of its own: to connect, to the first byte, between two reads, in all. Nothing is retried
here but one thing: a request on a kept-alive connection that the upstream had closed meanwhile, when no byte of an
answer has come. Closing an answer that is not whole drops its connection, so that the upstream stops working.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from yarl import URL

from atoll.config import Timeouts
from atoll.errors import RequestError, UpstreamMalformed, UpstreamTimeout, UpstreamUnreachable
from atoll.gateway.upstreams.base import UpstreamResponse

_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
_OWN_HEADERS: Final = frozenset({"accept", "accept-encoding", "content-type", "user-agent"})
_MAX_HEADER_BYTES: Final = 64 * 1024
_DNS_CACHE_S: Final = 60
_LARGE_BODY_BYTES: Final = 512 * 1024


class HttpTransport:
    """Keep-alive connections of one process to one upstream."""

    def __init__(
        self,
        upstream: str,
        *,
        max_connections: int,
        max_response_bytes: int,
        socket_path: Path | None = None,
    ) -> None:
        self._upstream = upstream
        self._max_connections = max_connections
        self._max_response_bytes = max_response_bytes
        self._socket_path = socket_path
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        connector: aiohttp.BaseConnector
        if self._socket_path is not None:
            connector = _UnixConnector(str(self._socket_path), limit=self._max_connections)
        else:
            connector = _TCPConnector(limit=self._max_connections, ttl_dns_cache=_DNS_CACHE_S)
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        trace.on_connection_queued_start.append(_note_queued)
        trace.on_connection_queued_end.append(_note_turn)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=_NO_TIMEOUT,
            trust_env=False,
            skip_auto_headers=_OWN_HEADERS,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            trace_configs=[trace],
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(
        self, url: URL, headers: Mapping[str, str], body: bytes, timeouts: Timeouts, *, is_streaming: bool
    ) -> HttpResponse:
        """Send, and return when the answer's head is here. Raises the errors of `Upstream.send`."""
        assert self._session is not None, "start() comes first"
        clock = _Clock(self._upstream, timeouts)
        limit = asyncio.timeout(timeouts.total_s)
        try:
            async with limit:
                try:
                    response = await self._send(url, headers, body, clock)
                except _StaleConnection:
                    response = await self._send(url, headers, body, clock)
        except BaseException as error:
            clock.stop()
            if isinstance(error, TimeoutError) and limit.expired():
                raise clock.out_of_time() from None
            raise
        return HttpResponse(response, clock, self._max_response_bytes, is_streaming=is_streaming)

    async def _send(self, url: URL, headers: Mapping[str, str], body: bytes, clock: _Clock) -> aiohttp.ClientResponse:
        assert self._session is not None
        trace = SimpleNamespace(is_reused=False, is_queued=False)
        timeouts = clock.timeouts
        try:
            response = await self._session.post(
                url,
                # Large bodies are written in pieces, so that other requests are not held up.
                data=body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body),
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    # With the wait for a free connection; the connecting alone has its own limit.
                    connect=max(timeouts.first_byte_s, timeouts.connect_s),
                    sock_connect=timeouts.connect_s,
                    sock_read=timeouts.first_byte_s,
                ),
                trace_request_ctx=trace,
            )
        except aiohttp.ServerDisconnectedError as error:
            # A text says that nothing had come; otherwise it holds what there was of a head.
            if trace.is_reused and not clock.has_retried and isinstance(error.message, str):
                clock.has_retried = True
                raise _StaleConnection from None
            raise clock.fault(error) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if trace.is_reused and not clock.has_retried and isinstance(error, ConnectionResetError):
                clock.has_retried = True
                raise _StaleConnection from None
            if trace.is_queued and isinstance(error, aiohttp.ConnectionTimeoutError):
                raise self._no_free_connection(timeouts) from None
            raise clock.fault(error) from None
        clock.head_has_come(response)
        return response

    def _no_free_connection(self, timeouts: Timeouts) -> UpstreamTimeout:
        name = self._upstream
        return UpstreamTimeout(
            f"All {self._max_connections} connections to the upstream {name!r} were busy for "
            f"{max(timeouts.first_byte_s, timeouts.connect_s):g} s (upstreams.{name}.max_connections)"
        )


class _AbortingConnector(aiohttp.BaseConnector):
    """Drops a connection that is not given back at once.

    aiohttp closes it, which first writes out what is still to be sent: for ever, to an upstream that no longer reads.
    """

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        if should_close and protocol.transport is not None:
            protocol.transport.abort()
        super()._release(key, protocol, should_close=should_close)


class _TCPConnector(_AbortingConnector, aiohttp.TCPConnector):
    pass


class _UnixConnector(_AbortingConnector, aiohttp.UnixConnector):
    pass


class HttpResponse(UpstreamResponse):
    """An answer over HTTP."""

    def __init__(self, response: aiohttp.ClientResponse, clock: _Clock, max_bytes: int, *, is_streaming: bool) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response
        self._clock = clock
        self._max_bytes = max_bytes
        if not is_streaming:
            clock.body_has_begun()

    async def read(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        content, clock = self._response.content, self._clock
        clock.body_has_begun()
        try:
            while data := await content.readany():
                size += len(data)
                if size > self._max_bytes:
                    raise UpstreamMalformed(
                        f"The upstream {clock.upstream!r} answered more than limits.max_response_bytes "
                        f"({self._max_bytes}) bytes"
                    )
                parts.append(data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise clock.fault(error) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        content, clock = self._response.content, self._clock
        is_first = True
        try:
            while data := await content.readany():
                if is_first:
                    clock.body_has_begun()
                    is_first = False
                yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise clock.fault(error) from None

    async def close(self) -> None:
        self._clock.stop()
        # A whole body has given its connection back already; this drops that of any other.
        self._response.close()


class _StaleConnection(Exception):
    """A kept-alive connection turned out to be closed by the other end."""


class _Clock:
    """The limits of one call, and which of them an error of aiohttp means."""

    __slots__ = ("_deadline", "_is_over", "_phase", "_response", "has_retried", "timeouts", "upstream")

    def __init__(self, upstream: str, timeouts: Timeouts) -> None:
        self.upstream = upstream
        self.timeouts = timeouts
        self.has_retried = False
        self._phase = "first_byte_s"
        self._is_over = False
        self._response: aiohttp.ClientResponse | None = None
        self._deadline = asyncio.get_running_loop().call_later(timeouts.total_s, self._end)

    def head_has_come(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    def body_has_begun(self) -> None:
        """From now on the limit between two reads holds."""
        self._phase = "idle_s"
        connection = self._response.connection if self._response is not None else None
        if connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = self.timeouts.idle_s
            connection.protocol.start_timeout()

    def stop(self) -> None:
        self._deadline.cancel()
        self._response = None

    def fault(self, error: BaseException) -> RequestError:
        """Our error for aiohttp's."""
        name = self.upstream
        if self._is_over:
            return self.out_of_time()
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return self._timeout("connect_s", "could not be connected to")
        if isinstance(error, TimeoutError):
            what = "fell silent in the middle of its answer" if self._phase == "idle_s" else "did not begin to answer"
            return self._timeout(self._phase, what)
        if isinstance(error, aiohttp.ClientConnectorError):
            return UpstreamUnreachable(f"The upstream {name!r} cannot be reached: {_reason(error.os_error)}")
        if isinstance(error, aiohttp.ClientPayloadError):
            return UpstreamUnreachable(f"The upstream {name!r} cut its answer off in the middle")
        if isinstance(error, aiohttp.ClientResponseError):
            return UpstreamMalformed(f"The upstream {name!r} answered something that is not HTTP")
        return UpstreamUnreachable(f"The upstream {name!r} closed the connection before its answer was whole")

    def out_of_time(self) -> UpstreamTimeout:
        return self._timeout("total_s", "did not finish its answer")

    def _timeout(self, limit: str, what: str) -> UpstreamTimeout:
        seconds = getattr(self.timeouts, limit)
        return UpstreamTimeout(
            f"The upstream {self.upstream!r} {what} within {seconds:g} s (upstreams.{self.upstream}.timeouts.{limit})"
        )

    def _end(self) -> None:
        """The whole call has taken too long: end whatever it waits for."""
        self._is_over = True
        if self._response is not None:
            self._response.content.set_exception(aiohttp.SocketTimeoutError())
            self._response.close()


def _reason(error: OSError) -> str:
    """Why no connection came about, without addresses of the inside."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return "its name has no address" if isinstance(error, socket.gaierror) else type(error).__name__


async def _note_reuse(session: object, context: SimpleNamespace, parameters: object) -> None:
    context.trace_request_ctx.is_reused = True


async def _note_queued(session: object, context: SimpleNamespace, parameters: object) -> None:
    context.trace_request_ctx.is_queued = True


async def _note_turn(session: object, context: SimpleNamespace, parameters: object) -> None:
    context.trace_request_ctx.is_queued = False
