"""The endpoints that are not hot, and `/v1/route`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest

from atoll.gateway.routing import Choice
from atoll.types import Decision, Estimate
from doubles.gateway import Running, running_gateway
from doubles.scripted import ScriptedUpstream, streaming

MESSAGES = [{"role": "user", "content": "x"}]


class Vectors:
    """Embeds a text as its length."""

    async def embed_api(self, texts: Any) -> npt.NDArray[np.float32]:
        return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)


async def test_models_lists_auto_candidates_and_embedders(first: ScriptedUpstream) -> None:
    async with running_gateway({"first": first.base_url}, embedders={"atoll-static": Vectors()}) as gateway:
        answer = await gateway.get("/v1/models")
        assert [entry["id"] for entry in answer.json["data"]] == ["auto", "first", "atoll-static"]
        one = (await gateway.get("/v1/models/first")).json
        assert (one["object"], one["owned_by"], one["atoll"]["output_usd_per_mtok"]) == ("model", "up-first", 2.0)
        missing = await gateway.get("/v1/models/frist")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert "Did you mean 'first'" in missing.error["message"]


async def test_route_decides_and_calls_nobody(gateway: Running, first: ScriptedUpstream) -> None:
    estimates = (Estimate("first", 0.9, 0.1, 100.0, 0.01), Estimate("second", 0.5, 0.2, 50.0, 0.001))
    choice = Choice(
        Decision("first", ("second",), "knn", "3", "Better by far", estimates, (0.8, 0.4)), np.ones(2, np.float32), "s"
    )

    async def choose(*_: Any) -> Choice:
        return choice

    gateway.chooser.choose = choose  # type: ignore[method-assign]
    answer = await gateway.post("/v1/route", {"messages": MESSAGES, "atoll": {"preference": 0.2}})
    assert answer.status == 200
    told = answer.json
    assert (told["candidate"], told["alternatives"], told["router"]) == ("first", ["second"], "knn")
    assert told["estimates"][1] == {
        "candidate": "second",
        "quality": 0.5,
        "quality_std": 0.2,
        "output_tokens": 50.0,
        "cost_usd": 0.001,
        "score": 0.4,
    }
    assert told["excluded"] == {}
    assert first.received == []
    row = await gateway.last_row()
    assert (row.endpoint, row.served_model, row.cost_usd) == ("/v1/route", None, None)
    assert row.embedding == np.ones(2, np.float32).tobytes()


async def test_feedback_joins_its_request_and_teaches_the_router(gateway: Running) -> None:
    async def choose(*_: Any) -> Choice:
        decision = Decision("first", (), "knn", "1", "so", propensity=0.25)
        return Choice(decision, np.ones(2, np.float32), "test-space")

    gateway.chooser.choose = choose  # type: ignore[method-assign]
    request_id = (await gateway.chat("auto")).headers["x-atoll-request-id"]
    await gateway.last_row()
    for score in (0.5, 1):
        answer = await gateway.post("/v1/feedback", {"request_id": request_id, "score": score, "comment": "fine"})
        assert (answer.status, answer.json["router_updated"]) == (200, True)
    assert gateway.ledger.scores == {request_id: (1.0, "fine")}
    outcome = gateway.learner.learned[-1]
    assert (outcome.candidate, outcome.quality, outcome.propensity, outcome.completion_tokens) == (
        "first",
        1.0,
        0.25,
        5,
    )


async def test_feedback_on_a_named_model_is_kept_and_teaches_nobody(gateway: Running) -> None:
    request_id = (await gateway.chat()).headers["x-atoll-request-id"]
    await gateway.last_row()
    answer = await gateway.post("/v1/feedback", {"request_id": request_id, "score": 0})
    assert (answer.status, answer.json["router_updated"]) == (200, False)
    assert gateway.learner.learned == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"request_id": "req_unknown", "score": 1}, 404, "request_id"),
        ({"score": 1}, 400, "request_id"),
        ({"request_id": "r"}, 400, "score"),
        ({"request_id": "r", "score": 1.01}, 400, "score"),
        ({"request_id": "r", "score": True}, 400, "score"),
        ({"request_id": "r", "score": "good"}, 400, "score"),
        ({"request_id": "r", "score": 1, "comment": 5}, 400, "comment"),
        ({"request_id": "r", "score": 1, "thumbs": "up"}, 400, "thumbs"),
        ([], 400, None),
        (b"{", 400, None),
        (b"x" * 100_000, 413, None),
    ],
)
async def test_bad_feedback_is_told(gateway: Running, body: Any, status: int, param: str | None) -> None:
    answer = await gateway.post("/v1/feedback", body)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_embeddings_by_the_gateways_own_embedder(first: ScriptedUpstream) -> None:
    async with running_gateway({"first": first.base_url}, embedders={"atoll-static": Vectors()}) as gateway:
        for model in ("auto", "atoll-static"):
            answer = await gateway.post("/v1/embeddings", {"model": model, "input": ["abc", "é"]})
            assert answer.status == 200
            assert [entry["embedding"] for entry in answer.json["data"]] == [[3.0, 1.0], [1.0, 1.0]]
            assert answer.json["model"] == answer.headers["x-atoll-model"] == "atoll-static"
        packed = await gateway.post("/v1/embeddings", {"model": "auto", "input": "abc", "encoding_format": "base64"})
        raw = base64.b64decode(packed.json["data"][0]["embedding"])
        assert np.frombuffer(raw, "<f4").tolist() == [3.0, 1.0]
        row = await gateway.last_row(3)
        assert (row.served_model, row.status, row.cost_usd) == ("atoll-static", 200, 0.0)
        for wrong, param in (
            ({"input": [[1, 2]]}, "input"),
            ({"input": "a", "dimensions": 7}, "dimensions"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": ["a"] * 3000}, "input"),
        ):
            answer = await gateway.post("/v1/embeddings", {"model": "auto", **wrong})
            assert (answer.status, answer.error["param"]) == (400, param)
    assert first.received == []


async def test_health_ready_and_index(gateway: Running) -> None:
    assert (await gateway.get("/health")).json == {"status": "ok"}
    assert (await gateway.get("/ready")).json == {"status": "ready", "upstreams": {"up-first": True, "up-second": True}}
    assert "/v1/chat/completions" in (await gateway.get("/")).json["endpoints"]


async def test_the_official_client_works_unchanged(gateway: Running, first: ScriptedUpstream) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)
    try:
        whole = await client.chat.completions.create(model="first", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "from first"
        first.answer(streaming("Hel", "lo"))
        stream = await client.chat.completions.create(
            model="auto",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"atoll": {"explain": True}},
        )
        pieces = [piece async for piece in stream]
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "Hello"
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == 5
        assert "first" in [model.id async for model in client.models.list()]
        with pytest.raises(openai.NotFoundError, match="There is no model"):
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    finally:
        await client.close()
