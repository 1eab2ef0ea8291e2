"""Clients that leave, stop reading or never finish their request; servers that are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import orjson
import pytest

from doubles.gateway import Running, running_gateway, until
from doubles.scripted import ScriptedUpstream, Wire, answering, chunk, completion, event, streaming

MESSAGES = [{"role": "user", "content": "Hello there, tell me a story"}]


async def _leave_while_waiting(gateway: Running, upstream: ScriptedUpstream, **members: Any) -> None:
    """Send a request, and close the socket once the upstream has it."""
    count = len(upstream.received)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = orjson.dumps({"model": "first", "messages": MESSAGES, **members})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await until(lambda: len(upstream.received) > count)
    writer.close()
    del reader


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_client_that_leaves_before_the_answer_cancels_the_upstream(
    gateway: Running, first: ScriptedUpstream, is_streaming: bool
) -> None:
    """GW-14, GW-49: not streamed, and streamed before the first token; the prompt is booked as an estimate."""
    first.answer(first.hang)
    await _leave_while_waiting(gateway, first, stream=is_streaming)
    await asyncio.wait_for(first.cancelled.wait(), 1)
    row = await gateway.last_row()
    assert (row.status, row.error_code, row.served_model) == (499, "client_closed_request", "first")
    assert (row.prompt_tokens or 0) >= 5
    assert (row.completion_tokens, row.is_usage_estimated) == (0, True)
    await gateway.until_idle()


async def test_a_client_that_leaves_before_the_upstreams_first_event_cancels_it(
    gateway: Running, first: ScriptedUpstream
) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await first.hang(wire)

    first.answer(script)
    await _leave_while_waiting(gateway, first, stream=True)
    await asyncio.wait_for(first.cancelled.wait(), 1)
    assert (await gateway.last_row()).status == 499


async def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_it_and_pays_for_what_it_got(
    gateway: Running, first: ScriptedUpstream
) -> None:
    """GW-14, GW-49."""

    async def script(wire: Wire) -> None:
        await wire.head()
        for _ in range(3):
            await wire.event(chunk("word " * 8))
        await first.hang(wire)

    first.answer(script)
    body = {"model": "first", "messages": MESSAGES, "stream": True}
    async with gateway.client.post("/v1/chat/completions", json=body) as answer:
        seen = 0
        async for line in answer.content:
            seen += line.startswith(b"data: ")
            if seen == 3:
                break
        answer.close()
    await asyncio.wait_for(first.cancelled.wait(), 1)
    row = await gateway.last_row()
    assert (row.status, row.completion_tokens, row.is_usage_estimated) == (499, 30, True)
    assert (row.cost_usd or 0) >= 30 * 2 / 1e6
    await gateway.until_idle()
    assert "atoll_in_flight 0.0" in (await gateway.get("/metrics")).body.decode()


async def test_a_client_that_leaves_tries_nobody_else(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream
) -> None:
    first.answer(first.hang)
    await _leave_while_waiting(gateway, first, model="auto")
    await asyncio.wait_for(first.cancelled.wait(), 1)
    await gateway.last_row()
    assert second.received == []
    assert gateway.state.health.pauses_s(gateway.state.catalog.candidates.values()) == {}


async def test_nothing_stays_behind_after_many_ways_to_end(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-45: failures, leavers and bad bodies release what they held; a good request then works."""
    tasks_before = len(asyncio.all_tasks())
    for _ in range(5):
        first.answer(first.hang)
        await _leave_while_waiting(gateway, first, stream=True)
        first.answer(answering("x"))
        await gateway.post("/v1/chat/completions", b"{broken")
        await gateway.chat("nobody")
    first.answer(answering("good"))
    assert (await gateway.chat()).status == 200
    await gateway.last_row(16)
    await gateway.until_idle()
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) <= tasks_before + 3


async def test_a_body_that_stops_halfway_is_given_up(first: ScriptedUpstream) -> None:
    async with running_gateway({"first": first.base_url}, limits={"body_timeout_s": 0.3}) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
        assert b" 408 " in head
        writer.close()
        row = await gateway.last_row()
    assert (row.status, row.error_code) == (408, "body_timeout")


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_499(gateway: Running) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    assert (await gateway.last_row()).status == 499


async def test_a_client_that_stops_reading_is_given_up(first: ScriptedUpstream) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        with contextlib.suppress(ConnectionError):
            while True:
                await wire.event(chunk("x" * 10_000))
        first.cancelled.set()

    first.answer(script)
    async with running_gateway({"first": first.base_url}, limits={"client_stall_s": 0.5}) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = orjson.dumps({"model": "first", "messages": MESSAGES, "stream": True})
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(first.cancelled.wait(), 10)
        row = await gateway.last_row()
        writer.transport.abort()
    assert row.status == 499
    assert "stopped reading" in (row.error_message or "")


async def test_a_slow_reader_gets_everything(gateway: Running, first: ScriptedUpstream) -> None:
    words = [f"{index:05d}" + "x" * 2000 for index in range(1000)]
    first.answer(streaming(*words))
    body = {"model": "first", "messages": MESSAGES, "stream": True}
    received = bytearray()
    async with gateway.client.post("/v1/chat/completions", json=body) as answer:
        await asyncio.sleep(0.3)
        async for data in answer.content.iter_any():
            received += data
            await asyncio.sleep(0)
    assert [f"{index:05d}".encode() in received for index in range(1000)] == [True] * 1000
    assert received.endswith(b"data: [DONE]\n\n")


async def test_running_answers_end_before_the_server_does(first: ScriptedUpstream) -> None:
    released = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.event(chunk("a"))
        await released.wait()
        await wire.chunk(event(chunk("b", "stop")) + b"data: [DONE]\n\n")
        await wire.end()

    first.answer(script)
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway({"first": first.base_url}))
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}"))
        asking = asyncio.create_task(_whole(session))
        await until(lambda: bool(first.received))
        gateway.stop()
        await asyncio.sleep(0.2)
        released.set()
        assert (await asking).endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_outlasts_the_servers_patience_ends_with_an_error_event(first: ScriptedUpstream) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.event(chunk("a"))
        await first.hang(wire)

    first.answer(script)
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway({"first": first.base_url}, server={"drain_s": 0.0}))
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}"))
        asking = asyncio.create_task(_whole(session))
        await until(lambda: bool(first.received))
        await asyncio.sleep(0.05)
        gateway.stop()
        assert b"shutting down" in await asking
        await asyncio.wait_for(first.cancelled.wait(), 5)
        row = await gateway.last_row()
    assert (row.status, row.error_code) == (503, "shutting_down")


async def _whole(session: aiohttp.ClientSession) -> bytes:
    body = {"model": "first", "messages": MESSAGES, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as answer:
        return await answer.read()


async def test_two_requests_on_one_connection_at_once_are_both_answered(gateway: Running) -> None:
    """Pipelining: the second request must not look like a client that has left."""
    body = orjson.dumps({"model": "first", "messages": MESSAGES})
    one = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(one + one)
    async with asyncio.timeout(5):
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert orjson.loads(await reader.readexactly(length)) == completion("from first")
    writer.close()
