"""Routing with the real embedder and the router that ships."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from atoll.config import CandidateSettings, OpenAIUpstream, RoutingSettings, Settings
from atoll.errors import InvalidRequest
from atoll.gateway.catalog import Catalog, build_catalog
from atoll.gateway.chooser import LearnedChooser
from atoll.gateway.parse import Endpoint, ParsedRequest, parse_request
from atoll.gateway.parts import open_request_router
from atoll.gateway.router_file import open_router
from atoll.gateway.routing import Plan, RequestRouter
from atoll.gateway.sessions import Sessions
from atoll.routers.embedding.service import EmbeddingService
from atoll.routers.prior import PriorRouter
from atoll.types import Outcome

CHEAP, DEAR = "gpt-4o-mini", "gpt-4o"
PROMPTS = [
    "Hello!",
    "Prove that there are infinitely many primes of the form 4k + 3.",
    "Write a Python function that merges overlapping intervals.",
    "What is the capital of Mongolia?",
    "Explain the difference between a mutex and a semaphore to a child.",
]


def _settings(folder: Path, **routing: Any) -> Settings:
    return Settings(
        upstreams={"up": OpenAIUpstream(kind="openai", base_url="http://127.0.0.1:9/v1")},
        candidates=tuple(CandidateSettings(name=name, upstream="up") for name in (CHEAP, DEAR)),
        routing=RoutingSettings(**routing),
        data_dir=folder,
    )


def _request(content: Any = "Hello!", **members: Any) -> ParsedRequest:
    messages = members.pop("messages", [{"role": "user", "content": content}])
    body = orjson.dumps({"model": "auto", "messages": messages, **members})
    settings = Settings()
    return parse_request(Endpoint.CHAT, body, {}, settings.limits, settings.routing.default_preference)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return build_catalog(_settings(tmp_path), {})


@pytest.fixture
async def router(tmp_path: Path, catalog: Catalog) -> AsyncIterator[RequestRouter]:
    async with open_request_router(_settings(tmp_path), catalog) as opened:
        yield opened


def _cost(plan: Plan) -> float:
    assert plan.choice is not None
    decision = plan.choice.decision
    return next(each.cost_usd for each in decision.estimates if each.candidate == decision.candidate)


async def test_cost_falls_with_the_preference(router: RequestRouter) -> None:
    costs = []
    for preference in (1.0, 0.5, 0.0):
        plans = [await router.plan(_request(text, atoll={"preference": preference}), None) for text in PROMPTS]
        assert all(plan.choice is not None and not plan.choice.decision.is_fallback for plan in plans)
        costs.append(sum(map(_cost, plans)))
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


@pytest.mark.parametrize(
    "content",
    [
        "lorem ipsum " * 30_000,
        "",
        None,
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "text", "text": "🙂 你好"}, {"type": "unknown"}],
        "\x00\u2028",
    ],
)
async def test_any_content_is_really_routed(router: RequestRouter, content: Any) -> None:
    """GW-26."""
    plan = await router.plan(_request(content), None)
    assert plan.choice is not None
    assert not plan.choice.decision.is_fallback
    assert plan.choice.embedding is not None
    assert np.linalg.norm(plan.choice.embedding) == pytest.approx(1.0, abs=1e-5)


async def test_a_hard_cap_is_kept_or_refused(router: RequestRouter) -> None:
    capped = await router.plan(_request(PROMPTS[1], atoll={"preference": 1, "max_cost_usd": 0.0007}), None)
    assert _cost(capped) <= 0.0007
    with pytest.raises(InvalidRequest, match="max_cost_usd") as raised:
        await router.plan(_request(PROMPTS[1], atoll={"max_cost_usd": 1e-9}), None)
    assert raised.value.error_code == "max_cost_exceeded"


async def test_a_conversation_stays_inside_a_tool_loop(tmp_path: Path, catalog: Catalog) -> None:
    settings = _settings(tmp_path)
    embedder = EmbeddingService(settings.routing.embedder, tmp_path)
    chooser = LearnedChooser(open_router(settings, catalog, embedder.space), embedder, exploration=0.0)
    sessions = Sessions(60.0, 10)
    router = RequestRouter(catalog, chooser, sessions)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": "ok"})
    for name in (CHEAP, DEAR):
        sessions.note(None, name, name, 1000)
        for preference in (0, 1):
            request = _request(messages=turns, atoll={"session": name, "preference": preference})
            plan = await router.plan(request, None)
            assert plan.candidates[0].name == name


async def test_feedback_moves_the_estimate_of_like_prompts(tmp_path: Path, catalog: Catalog) -> None:
    settings = _settings(tmp_path)
    embedder = EmbeddingService(settings.routing.embedder, tmp_path)
    chooser = LearnedChooser(open_router(settings, catalog, embedder.space), embedder, exploration=0.0)
    router = RequestRouter(catalog, chooser, Sessions(60.0, 10))

    async def quality() -> float:
        choice = (await router.plan(_request(PROMPTS[2]), None)).choice
        assert choice is not None
        return next(each.quality for each in choice.decision.estimates if each.candidate == DEAR)

    before = await quality()
    embedded = await embedder.embed(PROMPTS[2])
    outcomes = [Outcome(f"r{index}", DEAR, 0.0) for index in range(30)]
    vectors = {outcome.prompt: embedded.vector for outcome in outcomes}
    assert chooser.learn(outcomes, vectors, embedded.space) == 30
    assert chooser.learn([Outcome("x", "unknown-model", 0.0)], {"x": embedded.vector}, embedded.space) == 0
    assert chooser.learn(outcomes, vectors, "another-space") == 0
    assert await quality() < before


async def test_a_cap_holds_when_routing_fails_too(tmp_path: Path, catalog: Catalog) -> None:
    class Broken:
        async def choose(self, *_: Any) -> Any:
            raise ZeroDivisionError

    router = RequestRouter(catalog, Broken(), Sessions(60.0, 10))
    plan = await router.plan(_request("Hello", atoll={"max_cost_usd": 0.001}), None)
    assert [candidate.name for candidate in plan.candidates] == [CHEAP]
    with pytest.raises(InvalidRequest, match="max_cost_usd"):
        await router.plan(_request("Hello", atoll={"max_cost_usd": 1e-9}), None)


async def test_a_policy_ranks_by_its_own_scores(tmp_path: Path, catalog: Catalog) -> None:
    settings = _settings(tmp_path)
    embedder = EmbeddingService(settings.routing.embedder, tmp_path)

    class Policy(PriorRouter):
        is_policy = True

        def score(self, embeddings: Any, prompt_tokens: Any, preference: float) -> Any:
            return np.array([[name.name == (DEAR if preference < 0.5 else CHEAP) for name in self.candidates_]], float)

    policy = Policy.shipped(open_router(settings, catalog, embedder.space).candidates_, space=embedder.space)
    router = RequestRouter(catalog, LearnedChooser(policy, embedder, exploration=0.0), Sessions(60.0, 10))
    for preference, name in ((0.0, DEAR), (1.0, CHEAP)):
        plan = await router.plan(_request(PROMPTS[1], atoll={"preference": preference}), None)
        assert plan.candidates[0].name == name
        assert plan.choice is not None
        assert "policy" in plan.choice.decision.reason or "best estimated quality" in plan.choice.decision.reason
