"""One list of checks that every kind of upstream passes, each against a server that speaks its provider's wire."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from atoll.config import LiteLLMUpstream, ReplayUpstream, Timeouts
from atoll.errors import UpstreamFault
from atoll.gateway.sse import EventSplitter
from atoll.gateway.upstreams.base import Upstream, UpstreamRequest
from atoll.gateway.upstreams.litellm import LiteLLM
from atoll.gateway.upstreams.openai import OpenAICompatible
from atoll.gateway.upstreams.replay import Replay
from atoll.types import Candidate
from doubles.scripted import Script, ScriptedUpstream, Wire, answering, refusing, streaming

QUICK = Timeouts(connect_s=2, first_byte_s=20, idle_s=20, total_s=30)
CANDIDATE = Candidate("name", "gpt-4o-mini", "up")
ANTHROPIC = Candidate("name", "claude-haiku-4-5", "up")


@dataclass
class Case:
    """An upstream that runs, and the server behind it where there is one."""

    upstream: Upstream
    candidate: Candidate
    server: ScriptedUpstream | None
    whole: Script
    stream: Script


async def anthropic_answer(wire: Wire) -> None:
    await wire.json(
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-haiku-4-5",
            "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 10, "output_tokens": 5},
        }
    )


async def anthropic_stream(wire: Wire) -> None:
    await wire.head()
    start = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-haiku-4-5",
        "content": [],
        "usage": {"input_tokens": 10, "output_tokens": 1},
    }
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    for data in events:
        await wire.chunk(b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n")
    await wire.end()


def _openai(base_url: str, socket_path: Path | None = None) -> OpenAICompatible:
    return OpenAICompatible(
        "up",
        base_url,
        api_key=SecretStr("provider-key"),
        max_connections=100,
        max_response_bytes=1_000_000,
        socket_path=socket_path,
    )


@asynccontextmanager
async def openai_case(folder: Path) -> AsyncIterator[Case]:
    async with ScriptedUpstream([answering("Hello")]).running() as server:
        yield Case(_openai(server.base_url), CANDIDATE, server, answering("Hello"), streaming("Hel", "lo"))


@asynccontextmanager
async def socket_case(folder: Path) -> AsyncIterator[Case]:
    path = folder / "engine.sock"
    async with ScriptedUpstream([answering("Hello")]).running(path) as server:
        yield Case(_openai("http://engine/v1", path), CANDIDATE, server, answering("Hello"), streaming("Hel", "lo"))


@asynccontextmanager
async def litellm_openai_case(folder: Path) -> AsyncIterator[Case]:
    async with ScriptedUpstream([answering("Hello")]).running() as server:
        settings = LiteLLMUpstream(
            kind="litellm", provider="openai", api_key=SecretStr("provider-key"), base_url=server.base_url
        )
        yield Case(LiteLLM("up", settings), CANDIDATE, server, answering("Hello"), streaming("Hel", "lo"))


@asynccontextmanager
async def litellm_anthropic_case(folder: Path) -> AsyncIterator[Case]:
    async with ScriptedUpstream([anthropic_answer]).running() as server:
        settings = LiteLLMUpstream(
            kind="litellm",
            provider="anthropic",
            api_key=SecretStr("provider-key"),
            base_url=server.base_url.removesuffix("/v1"),
        )
        yield Case(LiteLLM("up", settings), ANTHROPIC, server, anthropic_answer, anthropic_stream)


@asynccontextmanager
async def replay_case(folder: Path) -> AsyncIterator[Case]:
    table = folder / "answers.jsonl"
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    table.write_bytes(orjson.dumps({"prompt": "Hi", "answer": "Hello", "usage": usage}) + b"\n")
    upstream = Replay("up", ReplayUpstream(kind="replay", table=table))
    yield Case(upstream, CANDIDATE, None, answering(), streaming())


CASES: dict[str, Callable[[Path], AbstractAsyncContextManager[Case]]] = {
    "openai": openai_case,
    "unix socket": socket_case,
    "litellm openai": litellm_openai_case,
    "litellm anthropic": litellm_anthropic_case,
    "replay": replay_case,
}
WITH_SERVER = [name for name in CASES if name != "replay"]


@pytest.fixture(params=CASES)
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    async with CASES[request.param](tmp_path) as case:
        await case.upstream.start()
        yield case
        await case.upstream.close()


@pytest.fixture(params=WITH_SERVER)
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    async with CASES[request.param](tmp_path) as case:
        await case.upstream.start()
        yield case
        await case.upstream.close()


def asked(*, is_streaming: bool = False, timeouts: Timeouts = QUICK, **members: Any) -> UpstreamRequest:
    body: dict[str, Any] = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hi"}], **members}
    if is_streaming:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return UpstreamRequest("/chat/completions", orjson.dumps(body), is_streaming, timeouts)


async def streamed(case: Case, request: UpstreamRequest) -> list[Any]:
    """The parsed events of a whole stream."""
    response = await case.upstream.send(request, case.candidate)
    splitter = EventSplitter(100_000)
    events: list[bytes] = []
    try:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for data in response.chunks():
            events += splitter.feed(data)
    finally:
        await response.close()
    assert splitter.rest() == b""
    payloads = [event[6:].strip() for event in events]
    return [payload.decode() if payload == b"[DONE]" else orjson.loads(payload) for payload in payloads]


def script(case: Case, *scripts: Script) -> None:
    if case.server is not None:
        case.server.answer(*scripts)


async def test_an_answer_is_openais(case: Case) -> None:
    script(case, case.whole)
    response = await case.upstream.send(asked(), case.candidate)
    answer = orjson.loads(await response.read())
    await response.close()
    assert response.status == 200
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (10, 5)


async def test_a_stream_is_openais(case: Case) -> None:
    script(case, case.stream)
    *chunks, done = await streamed(case, asked(is_streaming=True))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hello"
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["stop"]
    assert chunks[-1]["choices"] == []
    assert (chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]) == (10, 5)


async def test_many_at_once(case: Case) -> None:
    script(case, case.whole)

    async def one() -> int:
        response = await case.upstream.send(asked(), case.candidate)
        await response.read()
        await response.close()
        return response.status

    assert await asyncio.gather(*(one() for _ in range(50))) == [200] * 50


async def test_closing_twice_or_unread_is_fine(case: Case) -> None:
    script(case, case.stream)
    response = await case.upstream.send(asked(is_streaming=True), case.candidate)
    await response.close()
    await response.close()


async def test_nothing_is_left_behind(case: Case) -> None:
    script(case, case.stream)
    await streamed(case, asked(is_streaming=True))
    before = len(asyncio.all_tasks())
    for _ in range(10):
        await streamed(case, asked(is_streaming=True))
    gc.collect()
    await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks()) <= before


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_an_error_status_is_an_answer(served: Case, status: int) -> None:
    script(served, refusing(status, {"error": {"message": "no", "type": "t"}}, retry_after="7"))
    response = await served.upstream.send(asked(), served.candidate)
    error = orjson.loads(await response.read())["error"]
    await response.close()
    assert response.status == status
    assert "no" in error["message"]
    if status == 429:
        assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("status", [429, 500])
async def test_nobody_retries_below_the_gateway(served: Case, status: int) -> None:
    assert served.server is not None
    script(served, refusing(status))
    await (await served.upstream.send(asked(), served.candidate)).close()
    assert len(served.server.received) == 1


async def test_the_key_is_sent_and_the_path_is_right(served: Case) -> None:
    assert served.server is not None
    script(served, served.whole)
    await (await served.upstream.send(asked(), served.candidate)).close()
    (received,) = served.server.received
    sent = received.headers.get("authorization", "") + received.headers.get("x-api-key", "")
    assert "provider-key" in sent
    assert received.path in ("/v1/chat/completions", "/v1/messages")


async def test_an_upstream_that_says_nothing_runs_into_the_first_byte_limit(served: Case) -> None:
    assert served.server is not None
    script(served, served.server.hang)
    limits = Timeouts(connect_s=2, first_byte_s=0.3, idle_s=20, total_s=30)
    with pytest.raises(UpstreamFault, match=r"timeouts\.first_byte_s") as caught:
        await served.upstream.send(asked(timeouts=limits), served.candidate)
    assert caught.value.http_status == 504
    async with asyncio.timeout(5):
        await served.server.cancelled.wait()


async def test_a_cancelled_call_ends_at_the_upstream(served: Case) -> None:
    assert served.server is not None
    script(served, served.server.hang)
    task = asyncio.create_task(served.upstream.send(asked(), served.candidate))
    async with asyncio.timeout(10):
        await served.server.asked.wait()
        task.cancel()
        await served.server.cancelled.wait()


async def test_a_stream_left_in_the_middle_ends_at_the_upstream(served: Case) -> None:
    assert served.server is not None
    server = served.server

    async def first_part(wire: Wire) -> None:
        original = wire.end

        async def instead_of_end() -> None:
            await server.hang(wire)

        wire.end = instead_of_end  # type: ignore[method-assign]
        await served.stream(wire)
        wire.end = original  # type: ignore[method-assign]

    script(served, first_part)
    response = await served.upstream.send(asked(is_streaming=True), served.candidate)
    await anext(aiter(response.chunks()))
    await response.close()
    async with asyncio.timeout(5):
        await server.cancelled.wait()


async def test_a_lost_connection_is_told(served: Case) -> None:
    async def reset(wire: Wire) -> None:
        wire.reset()

    script(served, reset)
    with pytest.raises(UpstreamFault) as caught:
        await served.upstream.send(asked(), served.candidate)
    assert caught.value.http_status == 502
    assert "provider-key" not in str(caught.value)
