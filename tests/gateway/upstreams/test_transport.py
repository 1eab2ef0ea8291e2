"""HTTP to an upstream: the four limits, kept-alive connections, and what is not HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil
import pytest
from pydantic import SecretStr

from atoll.config import Timeouts
from atoll.errors import UpstreamFault, UpstreamMalformed, UpstreamTimeout, UpstreamUnreachable
from atoll.gateway.upstreams.base import UpstreamRequest
from atoll.gateway.upstreams.openai import OpenAICompatible
from atoll.types import Candidate
from doubles.scripted import ScriptedUpstream, Wire, answering, streaming

CANDIDATE = Candidate("name", "m", "up")
QUICK = Timeouts(connect_s=2, first_byte_s=5, idle_s=5, total_s=10)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream([answering()]).running() as server:
        yield server


@pytest.fixture
async def upstream(server: ScriptedUpstream) -> AsyncIterator[OpenAICompatible]:
    upstream = OpenAICompatible(
        "up", server.base_url, api_key=SecretStr("provider-key"), max_connections=10, max_response_bytes=10_000
    )
    await upstream.start()
    yield upstream
    await upstream.close()


def asked(*, is_streaming: bool = False, **limits: float) -> UpstreamRequest:
    timeouts = QUICK.model_copy(update=limits)
    return UpstreamRequest("/chat/completions", b'{"model":"m"}', is_streaming, timeouts, {"x-client": "1"})


async def whole(upstream: OpenAICompatible, **limits: float) -> bytes:
    response = await upstream.send(asked(**limits), CANDIDATE)
    try:
        return await response.read()
    finally:
        await response.close()


async def pieces(upstream: OpenAICompatible, **limits: float) -> list[bytes]:
    response = await upstream.send(asked(is_streaming=True, **limits), CANDIDATE)
    try:
        return [data async for data in response.chunks()]
    finally:
        await response.close()


async def test_bytes_and_headers_arrive_as_they_were_sent(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    await whole(upstream)
    (received,) = server.received
    assert received.body == b'{"model":"m"}'
    assert received.headers["x-client"] == "1"
    assert received.headers["authorization"] == "Bearer provider-key"
    assert received.headers["accept-encoding"] == "identity"
    assert "cookie" not in received.headers


async def test_connections_are_kept(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    for _ in range(5):
        await whole(upstream)
    assert server.connections == 1


async def test_a_connection_that_went_stale_is_replaced_once(
    upstream: OpenAICompatible, server: ScriptedUpstream
) -> None:
    async def close_on_the_second(wire: Wire) -> None:
        if len(server.received) == 2:
            wire.close()
        else:
            await answering("fresh")(wire)

    server.answer(close_on_the_second)
    await whole(upstream)
    assert b"fresh" in await whole(upstream)
    assert server.connections == 2


async def test_a_new_connection_that_is_closed_is_not_tried_again(
    upstream: OpenAICompatible, server: ScriptedUpstream
) -> None:
    async def close(wire: Wire) -> None:
        wire.close()

    server.answer(close)
    with pytest.raises(UpstreamUnreachable, match="'up' closed the connection"):
        await whole(upstream)
    assert len(server.received) == 1


async def test_nobody_listening_is_told_as_unreachable() -> None:
    upstream = OpenAICompatible("up", "http://127.0.0.1:9/v1", max_connections=1, max_response_bytes=100)
    await upstream.start()
    with pytest.raises(UpstreamUnreachable, match="'up' cannot be reached") as caught:
        await whole(upstream)
    assert "127.0.0.1" not in str(caught.value)
    await upstream.close()


async def test_silence_in_the_middle_of_a_stream_runs_into_the_idle_limit(
    upstream: OpenAICompatible, server: ScriptedUpstream
) -> None:
    async def stall(wire: Wire) -> None:
        await wire.head()
        await wire.event({"choices": []})
        await server.hang(wire)

    server.answer(stall)
    with pytest.raises(UpstreamTimeout, match=r"within 0\.2 s \(upstreams\.up\.timeouts\.idle_s\)"):
        await pieces(upstream, idle_s=0.2)
    async with asyncio.timeout(5):
        await server.cancelled.wait()


async def test_a_head_without_body_runs_into_the_first_byte_limit_of_a_stream(
    upstream: OpenAICompatible, server: ScriptedUpstream
) -> None:
    async def head_only(wire: Wire) -> None:
        await wire.head()
        await server.hang(wire)

    server.answer(head_only)
    with pytest.raises(UpstreamTimeout, match=r"timeouts\.first_byte_s"):
        await pieces(upstream, first_byte_s=0.2)


async def test_an_answer_that_drips_runs_into_the_total_limit(
    upstream: OpenAICompatible, server: ScriptedUpstream
) -> None:
    async def drip(wire: Wire) -> None:
        await wire.head()
        for _ in range(100):
            await wire.event({"choices": []})
            await asyncio.sleep(0.05)

    server.answer(drip)
    with pytest.raises(UpstreamTimeout, match=r"timeouts\.total_s"):
        await pieces(upstream, total_s=0.4)


async def test_the_total_limit_holds_before_the_head_too(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    server.answer(server.hang)
    with pytest.raises(UpstreamTimeout, match=r"timeouts\.total_s"):
        await whole(upstream, total_s=0.2)


async def test_a_stream_cut_off_is_not_taken_for_its_end(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    async def cut(wire: Wire) -> None:
        await wire.head()
        await wire.event({"choices": []})
        wire.close()

    server.answer(cut)
    with pytest.raises(UpstreamUnreachable, match="in the middle"):
        await pieces(upstream)


async def test_an_answer_shorter_than_it_said_is_told(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    async def short(wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        wire.close()

    server.answer(short)
    with pytest.raises(UpstreamUnreachable, match="in the middle"):
        await whole(upstream)


async def test_an_answer_over_the_size_limit_is_refused(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    server.answer(answering("x" * 20_000))
    with pytest.raises(UpstreamMalformed, match="max_response_bytes"):
        await whole(upstream)


@pytest.mark.parametrize("garbage", [b"hello\r\n\r\n", b"HTTP/1.1 banana\r\n\r\n", b"SSH-2.0-x\r\n"])
async def test_what_is_not_http_is_told(upstream: OpenAICompatible, server: ScriptedUpstream, garbage: bytes) -> None:
    async def speak(wire: Wire) -> None:
        await wire.raw(garbage)
        wire.close()

    server.answer(speak)
    with pytest.raises(UpstreamFault) as caught:
        await whole(upstream)
    assert caught.value.http_status == 502


async def test_a_redirect_is_not_followed(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    async def redirect(wire: Wire) -> None:
        await wire.json({}, 307, location="http://127.0.0.1:9/steal")

    server.answer(redirect)
    response = await upstream.send(asked(), CANDIDATE)
    await response.close()
    assert response.status == 307
    assert len(server.received) == 1


async def test_bytes_of_a_stream_are_passed_on_one_by_one(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    sent = "data: 你好🙂é\n\n".encode()

    async def byte_by_byte(wire: Wire) -> None:
        await wire.head()
        for byte in sent:
            await wire.chunk(bytes([byte]))
        await wire.end()

    server.answer(byte_by_byte)
    assert b"".join(await pieces(upstream)) == sent


async def test_a_stream_gives_its_connection_back(upstream: OpenAICompatible, server: ScriptedUpstream) -> None:
    server.answer(streaming("a"))
    for _ in range(3):
        await pieces(upstream)
    assert server.connections == 1


async def test_a_head_cut_off_on_a_kept_connection_is_not_asked_for_again(
    upstream: OpenAICompatible, server: ScriptedUpstream
) -> None:
    async def half_a_head(wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-")
        wire.close()

    server.answer(answering(), half_a_head)
    await whole(upstream)
    with pytest.raises(UpstreamUnreachable, match="before its answer was whole"):
        await whole(upstream)
    assert len(server.received) == 2


async def test_waiting_for_a_free_connection_ends_and_says_so(server: ScriptedUpstream) -> None:
    server.answer(server.hang)
    upstream = OpenAICompatible("up", server.base_url, max_connections=1, max_response_bytes=10_000)
    await upstream.start()
    holder = asyncio.create_task(whole(upstream))
    async with asyncio.timeout(5):
        await server.asked.wait()
    with pytest.raises(UpstreamTimeout, match=r"All 1 connections .* busy for 0\.3 s \(upstreams\.up\.max_connections"):
        await whole(upstream, connect_s=0.3, first_byte_s=0.3)
    holder.cancel()
    await asyncio.gather(holder, return_exceptions=True)
    server.answer(answering("free again"))
    assert b"free again" in await whole(upstream)
    await upstream.close()


async def test_leaving_while_an_upstream_does_not_read_drops_the_connection() -> None:
    begun, may_read, gone, received = asyncio.Event(), asyncio.Event(), asyncio.Event(), bytearray()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.readexactly(100_000))
        begun.set()
        await may_read.wait()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                received.extend(data)
        writer.close()
        gone.set()

    listener = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    upstream = OpenAICompatible("up", f"http://127.0.0.1:{port}/v1", max_connections=1, max_response_bytes=100)
    await upstream.start()
    body = b"x" * 16_000_000
    request = UpstreamRequest("/chat/completions", body, is_streaming=False, timeouts=QUICK)
    sending = asyncio.create_task(upstream.send(request, CANDIDATE))
    async with asyncio.timeout(5):
        await begun.wait()
    # Until what the kernel takes is full.
    await asyncio.sleep(0.3)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await asyncio.sleep(0)
    left = [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
    assert not left
    may_read.set()
    async with asyncio.timeout(5):
        await gone.wait()
    await upstream.close()
    listener.close()
    await listener.wait_closed()
    assert len(received) < len(body)


async def test_a_query_of_the_base_url_stays_behind_the_path(server: ScriptedUpstream) -> None:
    base_url = f"{server.base_url}/deployments/my%20model/?api-version=2026-01-01"
    upstream = OpenAICompatible("up", base_url, max_connections=1, max_response_bytes=10_000)
    await upstream.start()
    await whole(upstream)
    await upstream.close()
    assert server.received[0].path == "/v1/deployments/my%20model/chat/completions?api-version=2026-01-01"
