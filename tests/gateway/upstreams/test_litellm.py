"""Providers through litellm: what of a request reaches them, and what must not leave for anywhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from atoll.config import LiteLLMUpstream, Timeouts
from atoll.gateway.sse import EventSplitter
from atoll.gateway.upstreams.base import UpstreamRequest
from atoll.gateway.upstreams.litellm import LiteLLM
from atoll.types import Candidate
from doubles.scripted import ScriptedUpstream, Wire, answering

QUICK = Timeouts(connect_s=2, first_byte_s=20, idle_s=20, total_s=30)
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def message(*content: dict[str, Any], stop_reason: str = "end_turn") -> dict[str, Any]:
    """An Anthropic answer."""
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-haiku-4-5",
        "content": list(content),
        "stop_reason": stop_reason,
        "usage": {
            "input_tokens": 10,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 0,
            "output_tokens": 5,
        },
    }


async def text_answer(wire: Wire) -> None:
    await wire.json(message({"type": "text", "text": "Hello"}))


async def tool_answer(wire: Wire) -> None:
    calls = [
        {"type": "tool_use", "id": f"toolu_{city}", "name": "get_weather", "input": {"city": city}}
        for city in ("Oslo", "Rome")
    ]
    await wire.json(message(*calls, stop_reason="tool_use"))


async def tool_stream(wire: Wire) -> None:
    """Two tool calls, their arguments in pieces."""
    start = {**message(), "usage": {"input_tokens": 10, "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, city in enumerate(("Oslo", "Rome")):
        block = {"type": "tool_use", "id": f"toolu_{city}", "name": "get_weather", "input": {}}
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        for piece in ('{"city":', f'"{city}"}}'):
            delta = {"type": "input_json_delta", "partial_json": piece}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 20}})
    events.append({"type": "message_stop"})
    await wire.head()
    for data in events:
        await wire.chunk(b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n")
    await wire.end()


class Asking:
    """An upstream through litellm, and the server that stands for its provider."""

    def __init__(self, provider: str, model: str, server: ScriptedUpstream, base_url: str) -> None:
        settings = LiteLLMUpstream(
            kind="litellm", provider=provider, api_key=SecretStr("provider-key"), base_url=base_url
        )
        self.upstream = LiteLLM("up", settings)
        self.server = server
        self._candidate = Candidate("name", model, "up")

    async def ask(self, *, is_streaming: bool = False, **members: Any) -> tuple[int, bytes]:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **members}
        request = UpstreamRequest("/chat/completions", orjson.dumps(body), is_streaming, QUICK)
        response = await self.upstream.send(request, self._candidate)
        try:
            if is_streaming:
                return response.status, b"".join([data async for data in response.chunks()])
            return response.status, await response.read()
        finally:
            await response.close()

    @property
    def sent(self) -> dict[str, Any]:
        return self.server.received[-1].json


@asynccontextmanager
async def asking(provider: str) -> AsyncIterator[Asking]:
    is_anthropic = provider == "anthropic"
    async with ScriptedUpstream([text_answer if is_anthropic else answering()]).running() as server:
        if is_anthropic:
            running = Asking(provider, "claude-haiku-4-5", server, server.base_url.removesuffix("/v1"))
        else:
            running = Asking(provider, "some-new-model", server, server.base_url)
        await running.upstream.start()
        yield running
        await running.upstream.close()


@pytest.fixture
async def anthropic() -> AsyncIterator[Asking]:
    async with asking("anthropic") as running:
        yield running


@pytest.fixture
async def openai() -> AsyncIterator[Asking]:
    async with asking("openai") as running:
        yield running


@pytest.fixture(params=["anthropic", "openai"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[Asking]:
    async with asking(request.param) as running:
        yield running


async def test_tool_calls_are_translated(anthropic: Asking) -> None:
    anthropic.server.answer(tool_answer)
    status, body = await anthropic.ask(tools=[WEATHER])
    (choice,) = orjson.loads(body)["choices"]
    assert status == 200
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["toolu_Oslo", "toolu_Rome"]
    assert [orjson.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert anthropic.sent["tools"][0]["name"] == "get_weather"


async def test_streamed_tool_calls_keep_their_indexes(anthropic: Asking) -> None:
    anthropic.server.answer(tool_stream)
    status, body = await anthropic.ask(
        is_streaming=True, stream=True, stream_options={"include_usage": True}, tools=[WEATHER]
    )
    assert status == 200
    *events, done = EventSplitter(100_000).feed(body)
    assert done == b"data: [DONE]\n\n"
    chunks = [orjson.loads(event[6:]) for event in events]
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert None not in choice["delta"].values()
            for call in choice["delta"].get("tool_calls", ()):
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    assert {index: orjson.loads(text) for index, text in arguments.items()} == {
        0: {"city": "Oslo"},
        1: {"city": "Rome"},
    }
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["tool_calls"]
    assert chunks[-1]["usage"]["completion_tokens"] == 20


async def test_cached_input_is_part_of_the_prompt(anthropic: Asking) -> None:
    usage = orjson.loads((await anthropic.ask())[1])["usage"]
    assert usage["prompt_tokens"] == 110
    assert usage["prompt_tokens_details"]["cached_tokens"] == 100


async def test_hints_that_a_provider_does_not_know_are_left_out(anthropic: Asking) -> None:
    status, _ = await anthropic.ask(seed=1, frequency_penalty=0.5, presence_penalty=0.1, logit_bias={"1": 2}, n=1)
    assert status == 200
    assert not {"seed", "frequency_penalty", "presence_penalty", "logit_bias"} & set(anthropic.sent)


async def test_a_wish_that_cannot_be_met_is_refused(anthropic: Asking) -> None:
    status, body = await anthropic.ask(n=2)
    assert status == 400
    assert "['n']" in orjson.loads(body)["error"]["message"]
    assert not anthropic.server.received


async def test_unknown_fields_reach_a_provider_that_speaks_openais_format(openai: Asking) -> None:
    await openai.ask(chat_template_kwargs={"thinking": True}, x_vendor=1, seed=7)
    assert openai.sent["chat_template_kwargs"] == {"thinking": True}
    assert openai.sent["x_vendor"] == 1
    assert openai.sent["seed"] == 7
    assert "extra_body" not in openai.sent


async def test_unknown_fields_do_not_break_a_provider_with_a_format_of_its_own(anthropic: Asking) -> None:
    status, _ = await anthropic.ask(x_vendor=1, store=True, metadata={"trace": "1"}, top_k=5)
    assert status == 200
    assert anthropic.sent["top_k"] == 5
    assert not {"extra_body", "x_vendor", "store", "metadata"} & set(anthropic.sent)


async def test_a_request_cannot_choose_where_it_goes(provider: Asking) -> None:
    # CVE-2024-6587 and its kin: the provider's key must go to the provider alone.
    async with ScriptedUpstream([answering("stolen")]).running() as stranger:
        names = ("api_base", "base_url", "API_BASE", "azure_endpoint", "proxy")
        places: dict[str, Any] = dict.fromkeys(names, stranger.base_url)
        await provider.ask(
            **places,
            extra_body=places,
            litellm_params=places,
            extra_headers={"host": "stranger"},
            custom_llm_provider="openai",
            model_list=[{"model_name": "m", "litellm_params": places}],
            fallbacks=[{"model": "openai/x", **places}],
        )
    assert not stranger.received
    (received,) = provider.server.received
    assert received.headers["host"] == f"127.0.0.1:{provider.server.port}"


@pytest.mark.parametrize("kind", ["image_url", "file"])
async def test_nothing_is_fetched_from_inside_for_a_request(anthropic: Asking, kind: str) -> None:
    async with ScriptedUpstream([answering("secret")]).running() as inside:
        url = f"{inside.base_url}/secret.png"
        part = {"image_url": {"url": url}, "file": {"file_id": url}}[kind]
        await anthropic.ask(messages=[{"role": "user", "content": [{"type": kind, kind: part}]}])
    assert not inside.received


async def test_a_tool_of_the_librarys_own_proxy_is_refused(anthropic: Asking) -> None:
    tool = {"type": "mcp", "server_label": "x", "server_url": "litellm_proxy", "require_approval": "never"}
    status, body = await anthropic.ask(tools=[tool])
    assert status == 400
    assert "litellm_proxy" in orjson.loads(body)["error"]["message"]


async def test_an_error_tells_nothing_of_the_machine(anthropic: Asking) -> None:
    async def refuse(wire: Wire) -> None:
        error = {"type": "invalid_request_error", "message": "tools.0: no " + "x" * 100_000}
        await wire.json({"type": "error", "error": error}, 400)

    anthropic.server.answer(refuse)
    status, body = await anthropic.ask()
    assert status == 400
    assert b"tools.0: no" in body
    assert b"Traceback" not in body
    assert b"site-packages" not in body
    assert b"provider-key" not in body
    assert len(body) < 3000
