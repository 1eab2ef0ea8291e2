"""Requests that go well, not streamed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from atoll.types import Usage
from doubles.gateway import PROVIDER_KEY, Running, row_fields, running_gateway
from doubles.scripted import ScriptedUpstream, Wire, answering, completion


async def test_a_named_model_answers_with_the_upstreams_bytes(gateway: Running, first: ScriptedUpstream) -> None:
    body = b'{ "id":"x","usage":{"prompt_tokens":10,"completion_tokens":5},\n "choices": [], "new_field": 1.50 }'

    async def script(wire: Wire) -> None:
        await wire.json(body)

    first.answer(script)
    answer = await gateway.chat()
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["x-atoll-model"] == "first"
    assert answer.headers["x-atoll-cost-usd"] == "0.00002"
    assert answer.headers["x-atoll-attempts"] == "1"
    assert answer.headers["content-type"] == "application/json"
    row = await gateway.last_row()
    assert row.request_id == answer.headers["x-atoll-request-id"]
    assert row_fields(row, "requested_model", "served_model", "upstream", "upstream_id", "status", "attempts") == (
        "first", "first", "up-first", "x", 200, 1,
    )  # fmt: skip
    assert row_fields(row, "prompt_tokens", "completion_tokens", "cost_usd", "is_usage_estimated") == (
        10,
        5,
        2e-5,
        False,
    )
    assert row.ttft_s is not None
    assert row.latency_s is not None
    assert 0 < row.ttft_s <= row.latency_s
    assert row.decision_json is None
    assert row.prompt_json is None


async def test_auto_is_routed_and_says_why(gateway: Running) -> None:
    answer = await gateway.chat("auto")
    assert answer.json["choices"][0]["message"]["content"] == "from first"
    assert answer.headers["x-atoll-router"] == "in-order/1"
    assert answer.headers["x-atoll-reason"] == "The first one that can"
    row = await gateway.last_row()
    assert row_fields(row, "requested_model", "router", "propensity", "preference") == ("auto", "in-order", 1.0, 0.5)
    assert orjson.loads(row.decision_json or "")["alternatives"] == ["second"]


async def test_explain_puts_the_decision_into_the_body(gateway: Running) -> None:
    answer = await gateway.chat("auto", atoll={"explain": True})
    told = answer.json.pop("atoll")
    assert told["decision"]["candidate"] == told["model"] == "first"
    assert told["request_id"] == answer.headers["x-atoll-request-id"]
    assert answer.body.startswith(orjson.dumps(completion("from first"))[:-1])


async def test_the_upstream_sees_the_clients_bytes_with_its_own_model(
    gateway: Running, first: ScriptedUpstream
) -> None:
    """GW-21, GW-23.

    Unknown fields, cache marks and the order of everything survive; the same request twice is the same.
    """
    body = (
        b'{"messages": [{"role": "user", "content": ['
        b'{"type":"text","text":"\\u00e9","cache_control":{"type":"ephemeral"}}]}'
        b',{"role":"assistant","content":null,"tool_calls":[]},{"role":"assistant"}], "atoll":{"session":"s"},\n'
        b'"chat_template_kwargs":{"thinking":true},"x_vendor":1.0, "model" : "first","tools":[{"z":1,"a":2}] }'
    )
    for _ in range(2):
        assert (await gateway.post("/v1/chat/completions", body)).status == 200
    expected = body.replace(b'"first"', b'"first-model"').replace(b' "atoll":{"session":"s"},', b"")
    assert [received.body for received in first.received] == [expected, expected]


async def test_no_clients_credentials_travel_and_the_providers_key_does(
    gateway: Running, first: ScriptedUpstream
) -> None:
    await gateway.chat(
        headers={"authorization": "Bearer client-key", "cookie": "a=b", "x_api_key": "k", "traceparent": "00-1"}
    )
    sent = first.received[0].headers
    assert sent["authorization"] == f"Bearer {PROVIDER_KEY}"
    assert sent["traceparent"] == "00-1"
    assert "cookie" not in sent
    assert "x-api-key" not in sent
    assert b"client-key" not in orjson.dumps(sent)


async def test_an_effort_is_sent_and_wins_over_the_clients(first: ScriptedUpstream) -> None:
    candidates = {"first": {"effort": "high"}}
    async with running_gateway({"first": first.base_url}, candidates=candidates) as gateway:
        await gateway.chat()
        await gateway.chat(reasoning_effort="low")
    assert [received.json["reasoning_effort"] for received in first.received] == ["high", "high"]


async def test_completions_and_embeddings_pass_through_to_candidates(gateway: Running, first: ScriptedUpstream) -> None:
    assert (await gateway.post("/v1/completions", {"model": "first", "prompt": "Once"})).status == 200
    assert (await gateway.post("/v1/embeddings", {"model": "first", "input": ["a", "b"]})).status == 200
    assert [received.path for received in first.received] == ["/v1/completions", "/v1/embeddings"]


async def test_cached_tokens_are_billed_once_at_their_own_price(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-47: (prompt - cached) * in + cached * cached_in + completion * out."""
    usage = {"prompt_tokens": 2006, "completion_tokens": 300, "prompt_tokens_details": {"cached_tokens": 1920}}
    first.answer(answering(usage=usage))
    answer = await gateway.chat()
    expected = (86 * 1.0 + 1920 * 0.5 + 300 * 2.0) / 1e6
    assert float(answer.headers["x-atoll-cost-usd"]) == pytest.approx(expected)
    assert (await gateway.last_row()).cached_tokens == 1920


async def test_an_answer_without_usage_is_booked_as_an_estimate(gateway: Running, first: ScriptedUpstream) -> None:
    first.answer(answering(usage=None))
    await gateway.chat()
    row = await gateway.last_row()
    assert row.is_usage_estimated
    assert (row.prompt_tokens or 0) > 0


async def test_an_upstreams_id_is_only_a_column(gateway: Running, first: ScriptedUpstream) -> None:
    """GW-50: the upstream answers the same empty id for ever; every row is kept."""
    first.answer(answering(id=""))
    for _ in range(3):
        await gateway.chat()
    await gateway.last_row(3)
    assert len({row.request_id for row in gateway.ledger.rows}) == 3
    assert {row.upstream_id for row in gateway.ledger.rows} == {""}


async def test_a_session_is_known_to_the_router_next_time(gateway: Running) -> None:
    for _ in range(2):
        await gateway.chat("auto", headers={"x_atoll_session": "talk"})
    (_, before), (_, after) = gateway.chooser.asked
    assert before is None
    assert after is not None
    assert (after.candidate, after.prompt_tokens) == ("first", 15)


async def test_content_is_stored_only_when_asked_for(first: ScriptedUpstream) -> None:
    async with running_gateway({"first": first.base_url}, ledger={"store_content": True}) as gateway:
        await gateway.chat()
        row = await gateway.last_row()
    assert "Hello there" in (row.prompt_json or "")
    assert "from first" in (row.answer_text or "")


async def test_ten_thousand_embeddings_are_not_parsed_for_their_usage(
    gateway: Running, first: ScriptedUpstream
) -> None:
    data = [{"object": "embedding", "index": index, "embedding": [0.125] * 100} for index in range(3000)]

    async def script(wire: Wire) -> None:
        await wire.json({"object": "list", "data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}})

    first.answer(script)
    answer = await gateway.post("/v1/embeddings", {"model": "first", "input": ["a"]})
    assert len(answer.body) > 1_000_000
    row = await gateway.last_row()
    assert (row.prompt_tokens, row.is_usage_estimated) == (7, False)


@pytest.mark.parametrize("needs", ["vision", "tools", "json_schema", "logprobs"])
async def test_auto_leaves_out_who_cannot_do_it(first: ScriptedUpstream, second: ScriptedUpstream, needs: str) -> None:
    members: dict[str, Any] = {
        "vision": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
        "logprobs": {"logprobs": True},
    }[needs]
    candidates = {"first": {"capabilities": frozenset()}, "second": {"capabilities": frozenset({needs})}}
    urls = {"first": first.base_url, "second": second.base_url}
    async with running_gateway(urls, candidates=candidates) as gateway:
        assert (await gateway.chat("auto", **members)).headers["x-atoll-model"] == "second"
        assert (await gateway.chat("first", **members)).headers["x-atoll-model"] == "first"
        told = await gateway.post("/v1/route", {"messages": [{"role": "user", "content": "x"}], **members})
    assert told.json["excluded"] == {"first": {"reason": "capability", "detail": f"cannot do {needs}"}}


async def test_nobody_who_can_do_it_is_a_400_that_names_it(first: ScriptedUpstream) -> None:
    candidates = {"first": {"capabilities": frozenset({"tools"})}}
    async with running_gateway({"first": first.base_url}, candidates=candidates) as gateway:
        answer = await gateway.chat("auto", logprobs=True)
    assert (answer.status, answer.error["code"]) == (400, "no_capable_model")
    assert "logprobs" in answer.error["message"]


async def test_a_hard_cap_holds_for_a_named_model_too(gateway: Running, first: ScriptedUpstream) -> None:
    assert (await gateway.chat(atoll={"max_cost_usd": 0.1})).status == 200
    answer = await gateway.chat(atoll={"max_cost_usd": 1e-9})
    assert (answer.status, answer.error["code"]) == (400, "max_cost_exceeded")
    assert len(first.received) == 1


def test_usage_adds_up() -> None:
    assert Usage(3, 1, 4).total_tokens == 7
