"""An upstream on loopback that does what a test scripts, down to the byte and the socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        parsed = orjson.loads(self.body)
        assert isinstance(parsed, dict)
        return parsed


class Wire:
    """The upstream's end of one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Received) -> None:
        self.request = received
        self._reader = reader
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int = 200, content_type: str = "text/event-stream", **headers: str) -> None:
        """The head of a chunked answer."""
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", "transfer-encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, data: Any) -> None:
        await self.chunk(event(data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def json(self, data: Any, status: int = 200, **headers: str) -> None:
        body = data if isinstance(data, bytes) else orjson.dumps(data)
        lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    def reset(self) -> None:
        """Cut the connection the hard way (RST)."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        """End the connection in the middle of whatever was being sent (FIN)."""
        self._writer.close()

    async def until_gone(self) -> None:
        """Wait until the gateway has closed its end."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


Script = Callable[[Wire], Awaitable[None]]


@dataclass
class ScriptedUpstream:
    """Answers each request by the next script; the last one stays."""

    scripts: list[Script] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by `hang` when the gateway closes its end."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first request."""
    connections: int = 0
    running_requests: int = 0
    port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def answer(self, *scripts: Script) -> None:
        self.scripts = list(scripts)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def hang(self, wire: Wire) -> None:
        """Say nothing until the gateway leaves."""
        await wire.until_gone()
        self.cancelled.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while (received := await _read_request(reader)) is not None:
                self.received.append(received)
                self.asked.set()
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                self.running_requests += 1
                try:
                    await script(Wire(reader, writer, received))
                finally:
                    self.running_requests -= 1
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def running(self, socket_path: Path | None = None) -> AsyncIterator[ScriptedUpstream]:
        """On a free port of loopback, or on a Unix socket."""
        if socket_path is not None:
            server = await asyncio.start_unix_server(self._serve, socket_path, limit=32_000_000)
        else:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=32_000_000)
            self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    request_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(request_line.split(" ")[1], headers, body)


def event(data: Any) -> bytes:
    payload = data if isinstance(data, bytes) else orjson.dumps(data)
    return b"data: " + payload + b"\n\n"


def completion(content: str | None = "Hello", **members: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "upstream-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        **members,
    }


def chunk(content: str | None = None, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    if content is not None:
        delta["content"] = content
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "upstream-model",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


def usage_chunk(prompt_tokens: int = 10, completion_tokens: int = 5) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return {**chunk(), "choices": [], "usage": usage}


def answering(content: str = "Hello", **members: Any) -> Script:
    async def script(wire: Wire) -> None:
        await wire.json(completion(content, **members))

    return script


def refusing(status: int, body: Any = None, **headers: str) -> Script:
    async def script(wire: Wire) -> None:
        told = body if body is not None else {"error": {"message": f"no: {status}", "type": "t", "code": None}}
        await wire.json(told, status, **headers)

    return script


def streaming(*texts: str) -> Script:
    """A whole stream, with the usage chunk when it is asked for."""

    async def script(wire: Wire) -> None:
        await wire.head()
        for data in stream_events(wire.request, texts or ("Hel", "lo")):
            await wire.chunk(data)
        await wire.end()

    return script


def stream_events(request: Received, texts: tuple[str, ...]) -> list[bytes]:
    events = [event(chunk("", role="assistant")), *(event(chunk(text)) for text in texts), event(chunk(None, "stop"))]
    if (request.json.get("stream_options") or {}).get("include_usage"):
        events.append(event(usage_chunk()))
    return [*events, b"data: [DONE]\n\n"]


async def resetting(wire: Wire) -> None:
    wire.reset()


async def closing(wire: Wire) -> None:
    wire.close()
