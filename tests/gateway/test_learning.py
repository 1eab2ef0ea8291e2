"""Teaching and replacing the router of a gateway that runs: a real process, a scripted upstream, real artefacts."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import yaml

from atoll.gateway.chooser import LearnedChooser
from atoll.gateway.learning import BackgroundLearner
from atoll.routers.embedding.static import StaticEmbedder
from atoll.routers.knn import KNNRouter
from atoll.routers.prior import PriorRouter
from atoll.routers.registry import ROUTERS, make_router
from atoll.types import Candidate, Outcome
from doubles.process import Process, serving
from doubles.scripted import ScriptedUpstream, answering

SUMS = [f"What is {a} plus {a * 7}? Show the steps of the addition." for a in range(40)]
POEMS = [
    f"Write a short poem about {thing} in the {season}."
    for thing in ("rain", "snow", "a cat", "the sea", "bread", "a train", "my sister", "the moon")
    for season in ("spring", "summer", "autumn", "winter", "morning")
]
NAMES = ("counter", "poet")
POOL = [Candidate(name, name, "up", input_usd_per_mtok=1.0, output_usd_per_mtok=1.0) for name in NAMES]
LIVE = sorted({"knn", "prior", "reef", "barp", "mixllm"})


def fitted(name: str, path: Path, is_swapped: bool = False) -> Path:
    """`counter` can add and `poet` can write; the other way round in the world that `is_swapped`."""
    embedder = StaticEmbedder()
    texts = SUMS + POEMS
    vectors = dict(zip(texts, embedder.embed(texts), strict=True))
    outcomes = [
        Outcome(text, model, float((model == "counter") == ((text in SUMS) != is_swapped)), completion_tokens=20)
        for text in texts
        for model in NAMES
    ]
    make_router(name).fit(outcomes, vectors, POOL, space=embedder.space).save(path)
    return path


@asynccontextmanager
async def gateway(
    folder: Path, server: dict[str, Any] | None = None, **routing: Any
) -> AsyncIterator[tuple[Process, aiohttp.ClientSession]]:
    async with ScriptedUpstream([answering("Hello")]).running() as upstream:
        config = {
            "upstreams": {"up": {"kind": "openai", "base_url": upstream.base_url, "api_key": "k"}},
            "candidates": [{"name": name, "upstream": "up", "prices": {"input": 1, "output": 1}} for name in NAMES],
            "server": server or {},
            "routing": {"default_preference": 1.0, **routing},
        }
        manager = serving(folder, yaml.safe_dump(config))
        process = await asyncio.to_thread(manager.__enter__)
        try:
            async with aiohttp.ClientSession(process.url) as client:
                yield process, client
        finally:
            await asyncio.to_thread(manager.__exit__, None, None, None)


async def ask(client: aiohttp.ClientSession, text: str) -> tuple[str, str]:
    """Who answered, and the request's id."""
    body = {"model": "auto", "messages": [{"role": "user", "content": text}]}
    async with client.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-atoll-model"], answer.headers["x-atoll-request-id"]


async def until_current(client: aiohttp.ClientSession, is_current: bool, version: str = "") -> None:
    async with asyncio.timeout(20):
        while True:
            async with client.get("/ready") as answer:
                router = (await answer.json())["router"]
            if router["is_current"] == is_current and router["version"] != version:
                return
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_five_replacements_under_requests_fail_none_and_change_who_answers(tmp_path: Path) -> None:
    path = fitted("knn", tmp_path / "router")
    async with gateway(tmp_path, router={"name": "knn", "path": str(path)}) as (process, client):
        served: list[str] = []
        is_over = asyncio.Event()

        async def keep_asking() -> None:
            while not is_over.is_set():
                served.append((await ask(client, SUMS[3]))[0])

        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        for turn in range(1, 6):
            async with client.get("/ready") as answer:
                version = (await answer.json())["router"]["version"]
            fitted("knn", path, is_swapped=turn % 2 == 1)
            process.process.send_signal(signal.SIGHUP)
            await until_current(client, True, version)
            assert (await ask(client, SUMS[3]))[0] == NAMES[turn % 2]
        is_over.set()
        await asyncio.gather(*asking)
        assert set(served) == set(NAMES)
        async with client.get("/metrics") as answer:
            assert 'atoll_router{router="knn"' in await answer.text()


@pytest.mark.slow
async def test_a_hangup_reaches_every_worker_and_ends_none(tmp_path: Path) -> None:
    path = fitted("knn", tmp_path / "router")
    async with gateway(tmp_path, {"workers": 2}, router=str(path)) as (process, _):
        fitted("knn", path, is_swapped=True)
        process.process.send_signal(signal.SIGHUP)
        in_a_row = 0
        async with asyncio.timeout(30):
            while in_a_row < 16:
                # Each connection may be another worker's.
                async with aiohttp.ClientSession(process.url) as fresh:
                    in_a_row = in_a_row + 1 if (await ask(fresh, SUMS[3]))[0] == "poet" else 0
        assert process.process.poll() is None


@pytest.mark.slow
async def test_a_broken_replacement_leaves_the_old_router_and_is_told(tmp_path: Path) -> None:
    path = fitted("knn", tmp_path / "router")
    async with gateway(tmp_path, router=str(path), reload_s=0.05) as (process, client):
        file = path / "router.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:100])
        await until_current(client, False)
        assert (await ask(client, SUMS[3]))[0] == "counter"
        assert "stays as it is" in process.log
        fitted("knn", path, is_swapped=True)
        await until_current(client, True)
        assert (await ask(client, SUMS[3]))[0] == "poet"


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
async def test_feedback_changes_who_answers(tmp_path: Path, name: str) -> None:
    """The world has turned since the router was fitted, and feedback through the API tells."""
    if name not in ROUTERS:
        pytest.skip(f"there is no router {name!r} in the registry")
    routing: dict[str, Any] = {"exploration": 0.3}
    if name != "prior":
        routing["router"] = {"name": name, "path": str(fitted(name, tmp_path / "router"))}
    right = {"sum": "poet", "poem": "counter"}
    async with gateway(tmp_path, **routing) as (_, client):

        async def share_right(n: int) -> float:
            hits = 0
            for index in range(n):
                for kind, text in (("sum", SUMS[index % 40]), ("poem", POEMS[index % 40])):
                    who, request_id = await ask(client, text)
                    score = float(who == right[kind])
                    hits += int(score)
                    body = {"request_id": request_id, "score": score}
                    async with client.post("/v1/feedback", json=body) as answer:
                        assert answer.status == 200, await answer.text()
            return hits / (2 * n)

        await share_right(200)
        assert await share_right(40) > 0.65


class Slow(PriorRouter):
    """Takes 200 ms to learn, and notes whether two ever learn at once."""

    running = 0
    most_running = 0
    calls = 0

    def update(self, *args: Any, **options: Any) -> Any:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.calls += 1
        time.sleep(0.2)
        self.running -= 1
        return super().update(*args, **options)


async def test_a_slow_router_delays_nobody_and_learns_everything_at_the_end() -> None:
    embedder = StaticEmbedder()
    router = Slow.shipped(POOL, space=embedder.space)
    chooser = LearnedChooser(router, embedder, exploration=0.0)  # type: ignore[arg-type]
    learner = BackgroundLearner(chooser, reopen=lambda: router, artefact=None)
    await learner.start()
    vector = np.asarray(embedder.embed([SUMS[0]])[0])
    longest_s = 0.0
    for index in range(50):
        began = time.monotonic()
        assert learner.learn([Outcome(f"r{index}", "poet", 1.0)], {f"r{index}": vector}, embedder.space) == 1
        longest_s = max(longest_s, time.monotonic() - began)
    assert learner.learn([Outcome("x", "stranger", 1.0)], {"x": vector}, embedder.space) == 0
    await learner.close()
    assert longest_s < 0.1
    assert router.summary()["feedback"] == pytest.approx(50, rel=0.01)
    assert router.calls <= 3
    assert router.most_running == 1
    assert learner.learn([Outcome("late", "poet", 1.0)], {"late": vector}, embedder.space) == 0


async def test_a_new_router_is_taught_what_waited_and_a_broken_one_does_not_come() -> None:
    embedder = StaticEmbedder()
    old, new = (PriorRouter.shipped(POOL, space=embedder.space) for _ in range(2))
    answers: list[Any] = [ZeroDivisionError("broken"), new]
    asked = threading.Event()

    def reopen() -> PriorRouter:
        asked.set()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, PriorRouter)
        return answer

    chooser = LearnedChooser(old, embedder, exploration=0.0)  # type: ignore[arg-type]
    learner = BackgroundLearner(chooser, reopen=reopen, artefact=None)
    await learner.start()
    learner.reload()
    await asyncio.to_thread(asked.wait, 5)
    async with asyncio.timeout(5):
        while learner.status()["error"] is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    assert chooser.router is old
    learner.reload()
    await learner.close()
    assert chooser.router is new
    assert learner.status()["error"] is None


def test_the_pool_of_this_file_is_known_to_a_fitted_router(tmp_path: Path) -> None:
    assert [each.name for each in KNNRouter.load(fitted("knn", tmp_path / "r")).candidates_] == list(NAMES)
