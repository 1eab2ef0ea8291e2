"""Streams that go well, and what upstreams do to them without breaking them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from doubles.gateway import Running, running_gateway
from doubles.scripted import (
    ScriptedUpstream,
    Wire,
    chunk,
    completion,
    event,
    stream_events,
    streaming,
    usage_chunk,
)

USAGE = {"stream_options": {"include_usage": True}}


def exact(*events: bytes, pieces: int = 0) -> Any:
    """Send these bytes: an event a chunk, or in `pieces` bytes at a time."""

    async def script(wire: Wire) -> None:
        await wire.head()
        if pieces:
            whole = b"".join(events)
            for start in range(0, len(whole), pieces):
                await wire.chunk(whole[start : start + pieces])
        else:
            for data in events:
                await wire.chunk(data)
        await wire.end()

    return script


async def test_a_stream_arrives_as_the_upstream_sent_it(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(streaming("Hel", "lo"))
    answer = await gateway.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-atoll-model"] == "first"
    sent = b"".join(one for one in stream_events(first.received[0], ("Hel", "lo")) if b'"usage"' not in one)
    assert answer.body == sent


async def test_the_gateways_own_usage_chunk_does_not_reach_a_client_that_did_not_ask(
    gateway: Running, first: ScriptedUpstream
) -> None:
    """GW-01: usage is asked for and booked, and the extra chunk stays here."""
    first.answer(streaming("Hi"))
    answer = await gateway.chat(stream=True)
    assert first.received[0].json["stream_options"] == {"include_usage": True}
    assert all("usage" not in one for one in answer.events if one != "[DONE]")
    row = await gateway.last_row()
    assert (row.prompt_tokens, row.completion_tokens, row.is_usage_estimated) == (10, 5, False)
    assert (row.cost_usd, row.is_streaming) == (2e-5, True)


async def test_the_usage_chunk_that_was_asked_for_is_the_last_and_holds_the_cost(
    gateway: Running, first: ScriptedUpstream
) -> None:
    first.answer(streaming("Hi"))
    answer = await gateway.chat("auto", stream=True, **USAGE)
    *_, last, done = answer.events
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    assert last["atoll"]["cost_usd"] == 2e-5
    assert last["atoll"]["model"] == "first"
    assert last["atoll"]["request_id"] == answer.headers["x-atoll-request-id"]
    assert "decision" not in last["atoll"]
    assert sum("usage" in one for one in answer.events if one != "[DONE]") == 1


async def test_explain_comes_before_done_without_usage_too(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(streaming("Hi"))
    answer = await gateway.chat("auto", stream=True, atoll={"explain": True})
    *_, last, done = answer.events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert "usage" not in last
    assert last["atoll"]["decision"]["alternatives"] == ["second"]
    assert last["object"] == "chat.completion.chunk"


async def test_other_stream_options_are_kept_when_usage_is_added(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(streaming("Hi"))
    await gateway.chat(stream=True, stream_options={"include_obfuscation": False, "include_usage": False})
    assert first.received[0].json["stream_options"] == {"include_obfuscation": False, "include_usage": True}


async def test_an_upstream_that_knows_no_stream_usage_is_not_asked_and_the_client_gets_an_estimate(
    first: ScriptedUpstream,
) -> None:
    first.answer(exact(event(chunk("four")), event(chunk(None, "stop")), b"data: [DONE]\n\n"))
    async with running_gateway({"first": first.base_url}, upstream={"stream_usage": False}) as gateway:
        answer = await gateway.chat(stream=True, **USAGE)
    assert "stream_options" not in first.received[0].json
    *_, last, _ = answer.events
    assert last["usage"]["completion_tokens"] == 1
    assert last["atoll"]["is_usage_estimated"] is True


@pytest.mark.parametrize("pieces", [1, 2, 7, 64, 100_000])
async def test_characters_cut_by_the_network_arrive_whole(
    gateway: Running, first: ScriptedUpstream, pieces: int
) -> None:
    """GW-05: bytes are identical whatever the segmentation."""
    events = [event(chunk("你好🙂é")), b'data: {"choices":[{"delta":{"content":"\\u4f60"}}],"x": 1 }\r\n\r\n']
    events += [event(chunk(None, "stop")), b"data: [DONE]\n\n"]
    first.answer(exact(*events, pieces=pieces))
    assert (await gateway.chat(stream=True)).body == b"".join(events)


async def test_an_event_without_choices_passes(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-07: Azure's first chunk has `choices: []` and filter results."""
    events = [event({**chunk(), "choices": [], "prompt_filter_results": [{"a": 1}]}), event(chunk("x"))]
    events += [event({"object": "odd"}), event(chunk(None, "stop")), b"data: [DONE]\n\n"]
    first.answer(exact(*events))
    assert (await gateway.chat(stream=True)).body == b"".join(events)


async def test_comments_of_the_upstream_are_no_first_token(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-13: comments pass, and time to first token is measured at the first data event."""

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.chunk(b": OPENROUTER PROCESSING\n\n")
        await asyncio.sleep(0.2)
        await wire.chunk(b": OPENROUTER PROCESSING\n\n" + event(chunk("x")))
        await wire.chunk(event(chunk(None, "stop")) + b"data: [DONE]\n\n")
        await wire.end()

    first.answer(script)
    answer = await gateway.chat(stream=True)
    assert answer.body.count(b": OPENROUTER PROCESSING") == 2
    assert answer.events[-1] == "[DONE]"
    row = await gateway.last_row()
    assert row.ttft_s is not None
    assert row.ttft_s >= 0.2


async def test_logprobs_and_finish_reasons_stay_as_they_came(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-17."""
    logprobs = {"content": [{"token": "x", "logprob": -0.1, "bytes": [120], "top_logprobs": []}]}
    sent = chunk("x", "length")
    sent["choices"][0]["logprobs"] = logprobs
    first.answer(exact(event(sent), b"data: [DONE]\n\n"))
    answer = await gateway.chat(stream=True, logprobs=True, top_logprobs=2)
    assert answer.events[0]["choices"][0]["logprobs"] == logprobs
    assert answer.events[0]["choices"][0]["finish_reason"] == "length"
    assert first.received[0].json["top_logprobs"] == 2


async def test_parallel_tool_calls_get_stable_indexes(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-03, GW-19: both calls say index 0, and the end says `stop`."""
    calls = [
        [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"x":1}'}}],
        [{"index": 0, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": "{}"}}],
    ]
    events = [event(chunk(tool_calls=call)) for call in calls] + [event(chunk(None, "stop")), b"data: [DONE]\n\n"]
    first.answer(exact(*events))
    *pieces, last, _ = (await gateway.chat(stream=True)).events
    indexes = [piece["choices"][0]["delta"]["tool_calls"][0]["index"] for piece in pieces]
    assert indexes == [0, 0, 1, 1]
    assert last["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_without_done_is_ended_for_the_client(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(exact(event(chunk("x", "stop"))))
    answer = await gateway.chat(stream=True)
    assert answer.body == event(chunk("x", "stop")) + b"data: [DONE]\n\n"
    assert (await gateway.last_row()).status == 200


async def test_a_last_event_without_its_empty_line_is_not_lost(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(exact(event(chunk("x", "stop")), b"data: [DONE]"))
    assert (await gateway.chat(stream=True)).events[-1] == "[DONE]"


async def test_connections_serve_one_stream_after_the_other(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(streaming("x"))
    for _ in range(5):
        await gateway.chat(stream=True)
        await gateway.until_idle()
    assert first.connections == 1


async def test_an_upstream_that_lingers_after_done_does_not_hold_the_client(
    gateway: Running, first: ScriptedUpstream
) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.chunk(event(chunk("x", "stop")) + b"data: [DONE]\n\n")
        await first.hang(wire)

    first.answer(script)
    async with asyncio.timeout(0.9):
        assert (await gateway.chat(stream=True)).events[-1] == "[DONE]"
    await asyncio.wait_for(first.cancelled.wait(), 5)
    row = await gateway.last_row()
    assert (row.status, row.error_code) == (200, None)


async def test_comments_keep_a_silent_stream_alive_before_and_after_the_first_token(first: ScriptedUpstream) -> None:
    """GW-12."""

    async def script(wire: Wire) -> None:
        await asyncio.sleep(0.25)
        await wire.head()
        await wire.event(chunk("x"))
        await asyncio.sleep(0.25)
        await wire.chunk(event(chunk(None, "stop")) + b"data: [DONE]\n\n")
        await wire.end()

    first.answer(script)
    async with running_gateway({"first": first.base_url}, server={"keepalive_comment_s": 0.1}) as gateway:
        answer = await gateway.chat(stream=True, **USAGE)
        row = await gateway.last_row()
    before, _, after = answer.body.partition(event(chunk("x")))
    assert before.count(b": keep-alive\n\n") >= 1
    assert after.count(b": keep-alive\n\n") >= 1
    assert answer.events[-2]["atoll"]["model"] == "first"
    assert row.ttft_s is not None
    assert row.ttft_s >= 0.25


async def test_a_failure_after_a_comment_is_told_as_an_event(first: ScriptedUpstream) -> None:
    async def script(wire: Wire) -> None:
        await asyncio.sleep(0.25)
        await wire.json({"error": {"message": "broken"}}, 500)

    first.answer(script)
    async with running_gateway({"first": first.base_url}, server={"keepalive_comment_s": 0.1}) as gateway:
        answer = await gateway.chat(stream=True)
        row = await gateway.last_row()
    assert answer.status == 200
    assert "broken" in answer.events[-1]["error"]["message"]
    assert row.status == 502


async def test_without_the_setting_no_comment_is_sent(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(streaming("x"))
    assert b": " not in (await gateway.chat(stream=True)).body.replace(b"data: ", b"")


async def test_64_streams_at_once_are_not_mixed_up(gateway: Running, first: ScriptedUpstream) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        word = wire.request.json["messages"][0]["content"]
        for _ in range(20):
            await wire.event(chunk(word))
            await asyncio.sleep(0)
        await wire.chunk(event(chunk(None, "stop")) + event(usage_chunk()) + b"data: [DONE]\n\n")
        await wire.end()

    first.answer(script)

    async def one(index: int) -> set[str]:
        messages = [{"role": "user", "content": f"word-{index}"}]
        answer = await gateway.chat(stream=True, messages=messages)
        return {piece["choices"][0]["delta"].get("content", "") for piece in answer.events[:-1]}

    assert await asyncio.gather(*(one(index) for index in range(64))) == [{f"word-{index}", ""} for index in range(64)]
    await gateway.until_idle()


async def test_text_of_a_stream_is_stored_only_when_asked_for(first: ScriptedUpstream) -> None:
    first.answer(streaming("Hel", "lo"))
    async with running_gateway({"first": first.base_url}, ledger={"store_content": True}) as gateway:
        await gateway.chat(stream=True)
        assert (await gateway.last_row()).answer_text == "Hello"


async def test_an_answer_that_is_no_stream_though_one_was_asked_for_is_a_502(
    gateway: Running, first: ScriptedUpstream
) -> None:
    async def script(wire: Wire) -> None:
        await wire.json(completion("x"))

    first.answer(script)
    answer = await gateway.chat(stream=True)
    assert (answer.status, answer.error["code"]) == (502, "upstream_malformed")


def test_events_are_json_lines() -> None:
    assert orjson.loads(event(chunk("x"))[6:])["choices"][0]["delta"] == {"content": "x"}
