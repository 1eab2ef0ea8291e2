"""One gateway, as a user runs it, in front of an upstream that does what the prompt wishes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from doubles.process import Process, serving
from doubles.scripted import ScriptedUpstream, Wire, chunk, completion, event, stream_events, usage_chunk

TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
LOGPROBS = {
    "content": [
        {
            "token": "Hello",
            "logprob": -0.1,
            "bytes": [72, 101, 108, 108, 111],
            "top_logprobs": [{"token": "Hello", "logprob": -0.1, "bytes": [72, 101, 108, 108, 111]}],
        }
    ],
    "refusal": None,
}


async def as_wished(wire: Wire) -> None:
    """Do what the last message (or the prompt) asks for."""
    body = wire.request.json
    if wire.request.path.endswith("/embeddings"):
        await wire.json(
            {
                "object": "list",
                "model": "upstream-model",
                "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
                "usage": {"prompt_tokens": 2, "total_tokens": 2},
            }
        )
        return
    if "prompt" in body:
        text = {"index": 0, "text": " world", "finish_reason": "stop", "logprobs": None}
        await wire.json({**completion(), "object": "text_completion", "choices": [text]})
        return
    wish = body["messages"][-1]["content"]
    if wish.startswith("status "):
        status = int(wish.removeprefix("status "))
        await wire.json({"error": {"message": "as wished", "type": "t", "code": "c"}}, status, retry_after="0")
    elif body.get("stream"):
        await _stream(wire, wish)
    elif wish == "tools":
        message = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
        await wire.json(completion(choices=[{"index": 0, "message": message, "finish_reason": "tool_calls"}]))
    elif wish == "logprobs":
        await wire.json(completion(choices=[{**completion()["choices"][0], "logprobs": LOGPROBS}]))
    else:
        choices = [
            {**completion(f"Hello {index}")["choices"][0], "index": index} for index in range(body.get("n") or 1)
        ]
        await wire.json(completion(choices=choices))


async def _stream(wire: Wire, wish: str) -> None:
    await wire.head()
    if wish == "tools":
        start = {**TOOL_CALL, "index": 0, "function": {"name": "get_weather", "arguments": ""}}
        await wire.event(chunk(None, role="assistant", tool_calls=[start]))
        for part in ('{"city":', '"Oslo"}'):
            await wire.event(chunk(None, tool_calls=[{"index": 0, "function": {"arguments": part}}]))
        await wire.event(chunk(None, "tool_calls"))
        if (wire.request.json.get("stream_options") or {}).get("include_usage"):
            await wire.event(usage_chunk())
        await wire.chunk(b"data: [DONE]\n\n")
    elif wish == "endless":
        while True:
            await wire.chunk(event(chunk("x")))
            await asyncio.sleep(0.02)
    else:
        for data in stream_events(wire.request, ("Hel", "lo")):
            await wire.chunk(data)
    await wire.end()


@dataclass
class Upstream(threading.Thread):
    """The scripted upstream in a thread: the clients under test block theirs."""

    server: ScriptedUpstream = field(default_factory=lambda: ScriptedUpstream([as_wished]))

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.is_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self.join(10)

    async def _serve(self) -> None:
        async with self.server.running():
            self.is_up.set()
            await self._over.wait()


@pytest.fixture(scope="session")
def upstream() -> Iterator[ScriptedUpstream]:
    thread = Upstream()
    thread.start()
    assert thread.is_up.wait(10)
    yield thread.server
    thread.stop()


@pytest.fixture(scope="session")
def gateway(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    config = f"""
server: {{api_keys: [client-key]}}
upstreams:
  scripted: {{kind: openai, base_url: "{upstream.base_url}", api_key: provider-key}}
candidates:
  - {{name: gpt-4o-mini, upstream: scripted}}
  - {{name: gpt-4o, upstream: scripted}}
  - {{name: text-embedding-3-small, upstream: scripted, capabilities: [embeddings]}}
"""
    with serving(tmp_path_factory.mktemp("clients"), config, until="/health") as running:
        yield running
