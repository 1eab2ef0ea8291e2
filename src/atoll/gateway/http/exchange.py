"""One HTTP request and its answer.

ASGI servers swallow what is sent after a client has left, so a request learns of it only by reading `receive()` all the
time. `watch` does so and cancels the task that serves the request; `interruption` tells what that cancellation meant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from atoll.errors import ClientClosed, InvalidRequest, RequestError, Unavailable
from atoll.gateway import headers as names
from atoll.gateway.parse import body_too_large

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Exchange:
    """Reads a body once, answers once. Belongs to the task that serves the request."""

    __slots__ = (
        "_loop",
        "_reason",
        "_receive",
        "_send",
        "_task",
        "_watcher",
        "deadline",
        "has_begun",
        "has_ended",
        "headers",
        "last_sent_at",
        "path",
        "sending_since",
        "started_at",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._reason: RequestError | None = None
        self.path: str = scope["path"]
        self.headers = names.by_name(scope["headers"])
        self.started_at = self.last_sent_at = time.monotonic()
        """`time.monotonic()`, as all times here."""
        self.has_begun = False
        """Whether the answer's head has gone out: from then on an error can only be told inside the answer."""
        self.has_ended = False
        self.deadline: float | None = None
        """By when the body must be here; the watchdog looks at it."""
        self.sending_since: float | None = None
        """Since when the client has not taken what it was sent."""

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises PayloadTooLarge before more than `max_bytes` are read, ClientClosed when it never ends.
        """
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise InvalidRequest(
                f"Bodies must not be compressed, found content-encoding {encoding[:40].decode('latin-1')!r}",
                status=415,
                code="unsupported_encoding",
            )
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise body_too_large(max_bytes)
        self._task = asyncio.current_task()
        self.deadline = self.started_at + timeout_s
        parts: list[bytes] = []
        length = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientClosed("The client left before its request was complete")
            part: bytes = message.get("body", b"")
            length += len(part)
            if length > max_bytes:
                raise body_too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                break
        self.deadline = None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch(self) -> None:
        """From now on, cancel the current task when the client leaves. The body must have been read."""
        self._task = asyncio.current_task()
        self._watcher = self._loop.create_task(self._watch())

    def unwatch(self) -> None:
        """No cancellation will come from here any more."""
        self._task = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                # The end of our own answer reads the same as a client that leaves.
                if not self.has_ended:
                    self.interrupt(ClientClosed("The client left before the answer was complete"))
                return

    def interrupt(self, reason: RequestError) -> None:
        """Cancel the task that serves this request, because of `reason`."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    def expire(self, now: float, stall_s: float) -> None:
        """Interrupt a request whose client keeps it waiting for too long."""
        if self.deadline is not None and now > self.deadline:
            self.deadline = None
            self.interrupt(
                InvalidRequest(
                    "The body did not arrive in time (limits.body_timeout_s)", status=408, code="body_timeout"
                )
            )
        elif self.sending_since is not None and now > self.sending_since + stall_s:
            self.interrupt(ClientClosed("The client stopped reading its answer (limits.client_stall_s)"))

    def interruption(self) -> RequestError:
        """Why this task was cancelled.

        The cancellation counts as dealt with; without a reason here, the server is stopping.
        """
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return self._reason or Unavailable("The gateway is shutting down; send the request again", code="shutting_down")

    async def begin(self, status: int, headers: names.Headers) -> None:
        """Send the answer's head."""
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes) -> None:
        """Send part of the answer; waits while the client is slow."""
        self.sending_since = self.last_sent_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.sending_since = None

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the answer."""
        self.has_ended = True
        self.sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, headers: names.Headers, body: bytes) -> None:
        """Send a whole answer."""
        headers.append((b"content-length", b"%d" % len(body)))
        await self.begin(status, headers)
        await self.end(body)
