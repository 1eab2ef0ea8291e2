"""Upstreams that fail, before and in the middle of an answer: who is tried next, and what the client is told."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from doubles.gateway import Running, running_gateway
from doubles.scripted import (
    Script,
    ScriptedUpstream,
    Wire,
    answering,
    chunk,
    closing,
    completion,
    event,
    refusing,
    resetting,
    streaming,
    usage_chunk,
)

CUT_TIMEOUTS = {"timeouts": {"connect_s": 1.0, "first_byte_s": 0.3, "idle_s": 0.3, "total_s": 2.0}}


async def _stalled(wire: Wire) -> None:
    await wire.until_gone()


async def _html(wire: Wire) -> None:
    body = b"<html>Bad gateway</html>"
    await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


async def _error_in_200(wire: Wire) -> None:
    await wire.json({"error": {"message": "provider down", "code": 502}})


FAILING: dict[str, tuple[Script, int, str]] = {
    "401": (refusing(401), 502, "upstream_auth"),
    "402": (refusing(402), 502, "upstream_auth"),
    "403": (refusing(403), 502, "upstream_auth"),
    "404": (refusing(404), 404, None),  # type: ignore[dict-item]
    "408": (refusing(408), 504, "upstream_timeout"),
    "429": (refusing(429), 429, "rate_limit_exceeded"),
    "500": (refusing(500), 502, "upstream_rejected"),
    "502": (refusing(502, b"<html>"), 502, "upstream_rejected"),
    "503": (refusing(503), 503, "upstream_unavailable"),
    "504": (refusing(504), 504, "upstream_timeout"),
    "529": (refusing(529), 502, "upstream_rejected"),
    "reset": (resetting, 502, "upstream_unreachable"),
    "closed": (closing, 502, "upstream_unreachable"),
    "html": (_html, 502, "upstream_malformed"),
    "error in a 200": (_error_in_200, 502, "upstream_rejected"),
}


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("name", FAILING)
async def test_auto_goes_on_to_the_next_and_a_named_model_tells(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream, name: str, is_streaming: bool
) -> None:
    """GW-38: the fallback is really taken, for every way to fail; nothing of it is a 200."""
    script, status, code = FAILING[name]
    first.answer(script)
    second.answer(streaming("ok") if is_streaming else answering("ok"))
    routed = await gateway.chat("auto", stream=is_streaming)
    assert routed.status == 200
    assert routed.headers["x-atoll-model"] == "second"
    assert routed.headers["x-atoll-attempts"] == "2"
    row = await gateway.last_row()
    assert (row.served_model, row.attempts, row.status) == ("second", 2, 200)

    named = await gateway.chat("first", stream=is_streaming)
    assert (named.status, named.error["code"]) == (status, code)
    assert named.headers["content-type"] == "application/json"
    row = await gateway.last_row(2)
    assert (row.status, row.error_code, row.served_model) == (status, code, "first")


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_the_clients_own_mistake_goes_nowhere_else_and_cools_nobody(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream, status: int
) -> None:
    """GW-36: client errors pass through as the upstream put them."""
    told = {"error": {"message": "bad 'seed'", "type": "invalid_request_error", "param": "seed", "code": "x"}, "a": 1}
    first.answer(refusing(status, told))
    if status == 409:
        assert (await gateway.chat("auto")).status == 200
        return
    for _ in range(2):
        answer = await gateway.chat("auto")
        assert (answer.status, answer.json) == (status, told)
    assert second.received == []
    assert gateway.state.health.pauses_s(gateway.state.catalog.candidates.values()) == {}


async def test_a_prompt_too_long_goes_to_a_candidate_with_more_room(
    first: ScriptedUpstream, second: ScriptedUpstream
) -> None:
    told = {"error": {"message": "maximum context length is 100 tokens", "code": "context_length_exceeded"}}
    first.answer(refusing(400, told))
    urls = {"first": first.base_url, "second": second.base_url}
    small = {"first": {"context_tokens": 1000}, "second": {"context_tokens": 900}}
    async with running_gateway(urls, candidates=small) as gateway:
        assert (await gateway.chat("auto")).status == 400
    wide = {"first": {"context_tokens": 1000}, "second": {"context_tokens": 9000}}
    async with running_gateway(urls, candidates=wide) as gateway:
        answer = await gateway.chat("auto")
        assert answer.headers["x-atoll-model"] == "second"
        assert gateway.state.health.pauses_s(gateway.state.catalog.candidates.values()) == {}


async def test_one_layer_owns_retries(first: ScriptedUpstream, second: ScriptedUpstream) -> None:
    """GW-33: an upstream that always says 429 sees one request of each client request, not six."""
    first.answer(refusing(429))
    second.answer(refusing(429))
    async with running_gateway({"first": first.base_url, "second": second.base_url}) as gateway:
        answer = await gateway.chat("auto")
        assert answer.status == 429
        assert (len(first.received), len(second.received)) == (1, 1)
        await gateway.chat("first")
        assert len(first.received) == 2


async def test_attempts_are_bounded() -> None:
    async with ScriptedUpstream([refusing(500)]).running() as upstream:
        urls = {f"c{index}": upstream.base_url for index in range(10)}
        async with running_gateway(urls, routing={"max_attempts": 3}) as gateway:
            answer = await gateway.chat("auto")
    assert (answer.status, len(upstream.received)) == (502, 3)
    assert "c0" in answer.error["message"]


async def test_a_connection_lost_before_any_answer_is_tried_once_more(
    gateway: Running, first: ScriptedUpstream
) -> None:
    first.answer(resetting, answering("second time"))
    answer = await gateway.chat("first")
    assert (answer.status, answer.headers["x-atoll-attempts"]) == (200, "2")
    first.received.clear()
    first.answer(resetting)
    assert (await gateway.chat("first")).status == 502
    assert len(first.received) == 2


async def test_nobody_listening_is_a_502(second: ScriptedUpstream) -> None:
    async with running_gateway({"first": "http://127.0.0.1:9/v1", "second": second.base_url}) as gateway:
        assert (await gateway.chat("auto")).headers["x-atoll-model"] == "second"
        answer = await gateway.chat("first")
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")


# Waiting


async def test_retry_after_reaches_the_client_and_closes_the_candidate(
    gateway: Running, first: ScriptedUpstream
) -> None:
    """GW-34: the client is told the seconds left, and the upstream is not called inside the window."""
    first.answer(refusing(429, retry_after="7"))
    answer = await gateway.chat("first")
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    again = await gateway.chat("first")
    assert again.status == 429
    assert 6 <= int(again.headers["retry-after"]) <= 7
    assert len(first.received) == 1
    assert (await gateway.chat("auto")).headers["x-atoll-model"] == "second"


async def test_retry_after_may_be_a_date(gateway: Running, first: ScriptedUpstream) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=30)
    first.answer(refusing(429, retry_after=format_datetime(moment, usegmt=True)))
    assert 28 <= int((await gateway.chat("first")).headers["retry-after"]) <= 30


async def test_when_all_are_closed_the_soonest_end_is_told(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream
) -> None:
    first.answer(refusing(429, retry_after="60"))
    second.answer(refusing(429, retry_after="20"))
    for _ in range(2):
        answer = await gateway.chat("auto")
        assert answer.status == 429
        assert 18 <= int(answer.headers["retry-after"]) <= 20
    assert (len(first.received), len(second.received)) == (1, 1)


async def test_one_bad_minute_benches_nobody_for_good(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream
) -> None:
    """GW-36: both answered 429 once without naming a time; the next request is tried all the same."""
    first.answer(refusing(429), answering("back"))
    second.answer(refusing(429), answering("back"))
    assert (await gateway.chat("auto")).status == 429
    assert (await gateway.chat("auto")).status == 200


async def test_a_candidate_that_failed_is_tried_last(first: ScriptedUpstream, second: ScriptedUpstream) -> None:
    first.answer(refusing(500), answering("first"))
    urls = {"first": first.base_url, "second": second.base_url}
    async with running_gateway(urls, routing={"cooldown_s": 0.3}) as gateway:
        models = [(await gateway.chat("auto")).headers["x-atoll-model"] for _ in range(2)]
        await asyncio.sleep(0.35)
        models.append((await gateway.chat("auto")).headers["x-atoll-model"])
    assert models == ["second", "second", "first"]


async def test_the_most_useful_error_is_told(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream
) -> None:
    first.answer(refusing(401))
    second.answer(refusing(503, retry_after="9"))
    answer = await gateway.chat("auto")
    assert (answer.status, answer.headers["retry-after"]) == (503, "9")
    assert "first" in answer.error["message"]


# Time


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_silent_upstream_is_given_up(
    first: ScriptedUpstream, second: ScriptedUpstream, is_streaming: bool
) -> None:
    first.answer(_stalled)
    second.answer(streaming("ok") if is_streaming else answering("ok"))
    urls = {"first": first.base_url, "second": second.base_url}
    async with running_gateway(urls, upstream=CUT_TIMEOUTS) as gateway:
        assert (await gateway.chat("auto", stream=is_streaming)).headers["x-atoll-model"] == "second"
        answer = await gateway.chat("first", stream=is_streaming)
        assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
        await gateway.until_idle()


async def test_a_stream_that_stalls_is_ended_with_an_error_event(first: ScriptedUpstream) -> None:
    """GW-10: the idle time has its own limit; upstream and slot are released."""

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.event(chunk("partial"))
        await first.hang(wire)

    first.answer(script)
    async with running_gateway({"first": first.base_url}, upstream=CUT_TIMEOUTS) as gateway:
        started = time.monotonic()
        answer = await gateway.chat(stream=True)
        assert time.monotonic() - started < 2
        assert answer.events[-1]["error"]["code"] == "upstream_timeout"
        await asyncio.wait_for(first.cancelled.wait(), 1)
        row = await gateway.last_row()
        await gateway.until_idle()
    assert (row.status, row.error_code, row.completion_tokens) == (504, "upstream_timeout", 2)


# In the middle of a stream


async def _cut(wire: Wire) -> None:
    await wire.head()
    for _ in range(40):
        await wire.event(chunk("word "))
    wire.close()


async def _reset_midway(wire: Wire) -> None:
    await wire.head()
    await wire.event(chunk("word " * 40))
    await asyncio.sleep(0.05)
    wire.reset()


async def _ended_early(wire: Wire) -> None:
    await wire.head()
    await wire.event(chunk("word " * 40))
    await wire.end()


async def _unframed_and_closed(wire: Wire) -> None:
    """An answer that ends with the connection, so that a lost connection looks like the end."""
    await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    await wire.raw(event(chunk("word " * 40)))
    wire.close()


async def _says_error(wire: Wire) -> None:
    await wire.head()
    await wire.event(chunk("word " * 40))
    await asyncio.sleep(0.05)
    await wire.event({"error": {"message": "overloaded", "type": "server_error", "code": "overloaded"}})
    await wire.end()


async def _not_json(wire: Wire) -> None:
    await wire.head()
    await wire.event(chunk("word " * 40))
    await asyncio.sleep(0.05)
    await wire.chunk(b'data: {"choices": [\n\n')
    await wire.event(chunk("never"))
    await wire.end()


@pytest.mark.parametrize("script", [_cut, _reset_midway, _ended_early, _unframed_and_closed, _says_error, _not_json])
async def test_a_broken_stream_ends_with_an_error_event(
    gateway: Running, first: ScriptedUpstream, script: Script
) -> None:
    """GW-08: no clean end, no invented finish reason; what was delivered is booked and the row is a failure."""
    first.answer(script)
    answer = await gateway.chat(stream=True)
    assert answer.status == 200
    *delivered, last = answer.events
    assert set(last) == {"error"}
    assert {"message", "type", "code"} <= set(last["error"])
    assert answer.body.endswith(b"\n\n")
    assert b"[DONE]" not in answer.body
    assert all(piece["choices"][0]["finish_reason"] is None for piece in delivered)
    assert "never" not in answer.body.decode()
    row = await gateway.last_row()
    assert row.status == 502
    assert row.error_code is not None
    assert (row.completion_tokens, row.is_usage_estimated) == (50, True)
    assert (row.cost_usd or 0) > 1e-4


@pytest.mark.parametrize(
    "begin",
    [[], [b": comment\n\n"], [event({"error": {"message": "no"}})], [b"data: {not json\n\n"], [b"data: [DONE]\n\n"]],
)
async def test_a_stream_that_breaks_before_its_first_token_is_tried_elsewhere(
    gateway: Running, first: ScriptedUpstream, second: ScriptedUpstream, begin: list[bytes]
) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        for data in begin:
            await wire.chunk(data)
        await wire.end()

    first.answer(script)
    second.answer(streaming("ok"))
    answer = await gateway.chat("auto", stream=True)
    assert (answer.status, answer.headers["x-atoll-model"]) == (200, "second")
    assert b"comment" not in answer.body


# What is told


async def test_a_huge_echo_in_an_error_is_bounded_everywhere(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-70: an upstream that refuses a request by quoting all of it."""
    first.answer(
        refusing(400, {"error": {"message": "bad image: " + "A" * 5_000_000, "type": "invalid_request_error"}})
    )
    answer = await gateway.chat()
    assert answer.status == 400
    assert answer.error["message"].startswith("bad image: AAA")
    assert len(answer.body) < 3000
    assert len((await gateway.last_row()).error_message or "") <= 2000


@pytest.mark.parametrize("status", [400, 401, 422, 429, 500])
async def test_a_secret_in_an_upstreams_error_reaches_nobody(
    gateway: Running, first: ScriptedUpstream, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """GW-61."""

    async def script(wire: Wire) -> None:
        key = wire.request.headers["authorization"].removeprefix("Bearer ")
        told = {"error": {"message": f"Incorrect API key provided: {key}", "debug": key, "type": "t"}}
        await wire.json(told, status)

    first.answer(script)
    answer = await gateway.chat()
    row = await gateway.last_row()
    metrics = await gateway.get("/metrics")
    everything = answer.body + repr(answer.headers).encode() + repr(row).encode() + metrics.body
    assert b"provider-secret" not in everything + caplog.text.encode()


async def test_metrics_tell_what_happened_without_a_clients_words(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(refusing(429, {"error": {"message": "no", "code": "weird-code-1234"}}))
    await gateway.chat("auto")
    await gateway.chat("no-such-model-5678")
    await gateway.until_idle()
    shown = (await gateway.get("/metrics")).body.decode()
    assert (
        'atoll_upstream_attempts_total{candidate="first",outcome="rate_limit_exceeded",upstream="up-first"} 1.0'
        in shown
    )
    assert 'atoll_requests_total{candidate="second",endpoint="/chat/completions",status="200"} 1.0' in shown
    assert 'atoll_tokens_total{candidate="second",kind="prompt"} 10.0' in shown
    assert "atoll_in_flight 0.0" in shown
    assert "5678" not in shown
    assert "1234" not in shown


async def test_usage_that_came_before_a_break_is_booked(gateway: Running, first: ScriptedUpstream) -> None:
    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.event(chunk("word"))
        await wire.event(usage_chunk(10, 99))
        wire.close()

    first.answer(script)
    await gateway.chat(stream=True)
    row = await gateway.last_row()
    assert (row.completion_tokens, row.is_usage_estimated, row.status) == (99, False, 502)


def test_the_doubles_speak_openais_shape() -> None:
    assert completion()["choices"][0]["finish_reason"] == "stop"
    assert isinstance(FAILING, dict)
    assert Any is not None
