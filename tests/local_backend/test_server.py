"""The HTTP face over real sockets, with the tiny model behind it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import psutil
import pytest

from atoll.local_backend.codec import Codec
from atoll.local_backend.server import EngineServer
from atoll.local_backend.torch_engine import TorchEngine

HELLO = [{"role": "user", "content": "Hi"}]
Serve = Callable[..., Any]


@dataclass
class Served:
    engine: TorchEngine
    http: aiohttp.ClientSession
    path: Path

    async def post(self, route: str, **body: Any) -> tuple[int, Any]:
        async with self.http.post(f"http://engine{route}", json=body) as response:
            return response.status, await response.json()

    async def chat(self, **body: Any) -> Any:
        wanted = {"messages": HELLO, "max_tokens": 12, "ignore_eos": True, "seed": 1} | body
        status, answer = await self.post("/v1/chat/completions", **wanted)
        assert status == 200, answer
        return answer

    async def stream(self, route: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """The data of every event; the last is the text `[DONE]`."""
        wanted = {"messages": HELLO, "max_tokens": 12, "ignore_eos": True, "seed": 1, "stream": True} | body
        async with self.http.post(f"http://engine{route}", json=wanted) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        return [line.removeprefix("data: ") if "[DONE]" in line else json.loads(line[6:]) for line in lines]


@pytest.fixture
async def serve(make_engine: Callable[..., TorchEngine], tiny_codec: Codec) -> AsyncIterator[Serve]:
    servers: list[tuple[EngineServer, aiohttp.ClientSession]] = []
    folder = tempfile.TemporaryDirectory(prefix="atoll-")  # short: a socket's path has at most 107 bytes

    async def start(**limits: Any) -> Served:
        engine = make_engine(**limits)
        path = Path(folder.name) / "run" / f"{len(servers)}.sock"
        server = EngineServer(engine, tiny_codec)
        await server.start(path)
        http = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path), limit=0))
        servers.append((server, http))
        return Served(engine, http, path)

    yield start
    for server, http in servers:
        await http.close()
        await server.close()
    folder.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - other threads make it true
        await asyncio.sleep(0.005)


async def test_a_whole_chat_answer(serve: Serve) -> None:
    served = await serve()
    answer = await served.chat()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


async def test_a_stream_has_openais_shape(serve: Serve) -> None:
    served = await serve()
    *chunks, usage, done = await served.stream(stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert usage["choices"] == []
    assert usage["usage"] == (await served.chat())["usage"]


async def test_a_stream_says_the_same_as_a_whole_answer(serve: Serve) -> None:
    served = await serve()
    chunks = (await served.stream(max_tokens=40))[:-1]
    assert "usage" not in chunks[0]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == (await served.chat(max_tokens=40))["choices"][0]["message"]["content"]


async def test_several_choices(serve: Serve) -> None:
    served = await serve()
    whole = (await served.chat(n=3))["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in whole]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    finished = []
    *chunks, usage, _ = await served.stream(n=3, stream_options={"include_usage": True})
    for chunk in chunks:
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["delta"].get("content") or ""
        finished += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert sorted(finished) == [0, 1, 2]
    assert usage["usage"]["completion_tokens"] == 36


async def test_logprobs_in_both_modes(serve: Serve) -> None:
    served = await serve()
    whole = (await served.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert len(whole) == 12
    assert {"token", "logprob", "bytes", "top_logprobs"} == whole[0].keys()
    assert len(whole[0]["top_logprobs"]) == 2
    streamed = []
    for chunk in (await served.stream(logprobs=True, top_logprobs=2))[:-1]:
        streamed += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [token["bytes"] for token in streamed] == [token["bytes"] for token in whole]


async def test_stop_strings_never_leak_into_a_stream(serve: Serve) -> None:
    served = await serve()
    text = (await served.chat(max_tokens=40))["choices"][0]["message"]["content"]
    stop = text[8:11]
    chunks = (await served.stream(max_tokens=40, stop=[stop, "never"]))[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text.split(stop)[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_text_completions(serve: Serve, tiny_codec: Codec) -> None:
    served = await serve()
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, both = await served.post("/v1/completions", prompt=["one", "two"], n=2, **body)
    assert status == 200
    assert both["object"] == "text_completion"
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    _, one = await served.post("/v1/completions", prompt=tiny_codec.encode("two"), **body)
    assert one["choices"][0]["text"] == both["choices"][2]["text"] == both["choices"][3]["text"]
    assert both["usage"] == {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30} | {
        "prompt_tokens_details": {"cached_tokens": 0}
    }
    chunks = await served.stream("/v1/completions", messages=None, prompt=["one", "two"], **body)
    texts = ["", ""]
    for chunk in chunks[:-1]:
        assert chunk["object"] == "text_completion"
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [both["choices"][0]["text"], both["choices"][2]["text"]]


async def test_a_prompt_can_be_echoed_with_its_logprobs(serve: Serve) -> None:
    served = await serve()
    _, answer = await served.post("/v1/completions", prompt="abc", echo=True, max_tokens=0, logprobs=2)
    [choice] = answer["choices"]
    assert choice["text"] == "abc"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    _, longer = await served.post(
        "/v1/completions", prompt="abc", echo=True, max_tokens=4, logprobs=0, temperature=0, ignore_eos=True
    )
    assert longer["choices"][0]["text"].startswith("abc")
    assert len(longer["choices"][0]["logprobs"]["tokens"]) == 7


@pytest.mark.parametrize(
    ("route", "body", "status", "code", "told"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, None, "empty"),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 600}, 400, "context_length_exceeded", "512 tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True, "max_tokens": 600}, 400, None, "512 tokens"),
        ("/v1/completions", {"prompt": [9999]}, 400, None, "no token id"),
        ("/v1/completions", {"prompt": ""}, 400, None, "empty"),
        ("/v1/elsewhere", {}, 404, "not_found", "Not Found"),
        ("/health", {}, 405, "not_found", "Method Not Allowed"),
    ],
)
async def test_errors_have_openais_shape(
    serve: Serve, route: str, body: dict[str, Any], status: int, code: str | None, told: str
) -> None:
    served = await serve()
    got, answer = await served.post(route, **body)
    assert got == status
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert told in answer["error"]["message"]
    assert code is None or answer["error"]["code"] == code


async def test_a_full_queue_is_429_with_a_time_to_wait(serve: Serve) -> None:
    served = await serve(max_batch=1, max_waiting=0)
    task = asyncio.create_task(served.chat(max_tokens=300))
    await until(lambda: served.engine.stats().running == 1)
    async with served.http.post("http://engine/v1/chat/completions", json={"messages": HELLO}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["code"] == "queue_full"
    await task


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_client_that_leaves_stops_the_work(serve: Serve, is_streaming: bool) -> None:
    served = await serve()
    body = json.dumps({"messages": HELLO, "max_tokens": 450, "ignore_eos": True, "stream": is_streaming}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_unix_connection(str(served.path))
    writer.write(head + body)
    if is_streaming:
        await reader.readuntil(b"data: ")
    else:
        await until(lambda: served.engine.stats().completion_tokens > 0)
    writer.close()
    await until(lambda: served.engine.stats().cancelled == 1)
    assert served.engine.stats().completion_tokens < 450
    assert served.engine.stats().running == 0


async def test_a_client_that_leaves_the_queue_is_forgotten(serve: Serve) -> None:
    served = await serve(max_batch=1)
    running = asyncio.create_task(served.chat(max_tokens=400))
    await until(lambda: served.engine.stats().running == 1)
    waiting = asyncio.create_task(served.stream())
    await until(lambda: served.engine.stats().waiting == 1)
    waiting.cancel()
    await until(lambda: served.engine.stats().cancelled == 1)
    await running
    assert served.engine.stats().finished == 1


async def test_the_server_answers_while_the_model_works(serve: Serve) -> None:
    served = await serve()
    task = asyncio.create_task(served.chat(messages=[{"role": "user", "content": "x" * 400}], max_tokens=50))
    await until(lambda: served.engine.stats().running == 1)
    async with served.http.get("http://engine/health") as response:
        assert (await response.json())["status"] == "ok"
    async with served.http.get("http://engine/stats") as response:
        assert (await response.json())["kv_tokens_budget"] > 0
    assert not task.done()
    await task


async def test_an_engine_that_ends_in_mid_stream_says_so(serve: Serve) -> None:
    served = await serve()
    body = {"messages": HELLO, "max_tokens": 450, "ignore_eos": True, "stream": True}
    async with served.http.post("http://engine/v1/chat/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        await served.engine.close()
        rest = (await response.content.read()).decode()
    assert "[DONE]" not in rest
    error = json.loads(rest.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] == "engine_failed"
    status, answer = await served.post("/v1/chat/completions", messages=HELLO)
    assert status == 503
    assert "shutting down" in answer["error"]["message"]


def open_files() -> int:
    return psutil.Process().num_fds()


async def test_nothing_is_left_behind_by_fifty_requests(serve: Serve) -> None:
    served = await serve()

    async def one(number: int) -> None:
        if number % 3 == 0:
            await served.stream(max_tokens=4)
        elif number % 3 == 1:
            await served.chat(max_tokens=4)
        else:
            task = asyncio.create_task(served.stream(max_tokens=400))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle() -> tuple[int, int]:
        await until(lambda: served.engine.stats().running + served.engine.stats().waiting == 0)
        await asyncio.sleep(0.05)
        return open_files(), len(asyncio.all_tasks())

    await asyncio.gather(*(one(number) for number in range(9)))
    files_before, tasks_before = await settle()
    for _ in range(5):
        await asyncio.gather(*(one(number) for number in range(9)))
    files_after, tasks_after = await settle()
    assert files_after <= files_before + 2
    assert tasks_after <= tasks_before + 2


async def test_the_openai_client_works_unchanged(serve: Serve) -> None:
    served = await serve()
    transport = httpx.AsyncHTTPTransport(uds=str(served.path))
    async with httpx.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http)
        whole = await client.chat.completions.create(model="tiny", messages=HELLO, seed=3, max_tokens=8)  # type: ignore[arg-type]
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, seed=3, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)  # type: ignore[arg-type]
        assert caught.value.param == "temperature"
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_only_this_user_may_connect(serve: Serve) -> None:
    served = await serve()
    assert served.path.stat().st_mode & 0o777 == 0o600
    assert served.path.parent.stat().st_mode & 0o777 == 0o700
