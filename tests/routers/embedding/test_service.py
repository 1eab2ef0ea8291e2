"""The embedding service: cached, batched, in time, never failing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from atoll.config import EmbedderSettings
from atoll.errors import InvalidRequest, RateLimited
from atoll.routers.embedding.base import Embedder, Vectors
from atoll.routers.embedding.service import MAX_API_TEXTS, MAX_API_TEXTS_WAITING, EmbeddingService
from atoll.routers.embedding.static import StaticEmbedder

HANG_GUARD_S = 30.0


class CountingEmbedder(Embedder):
    """A model double: remembers its batches, can be held up, and can fail."""

    space = "counting-2"
    dimension = 2

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()
        self.is_broken = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.batches.append(list(texts))
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_go_on.wait(HANG_GUARD_S)
        if self.is_broken:
            raise RuntimeError("out of order")
        vectors = np.zeros((len(texts), 2), dtype=np.float32)
        vectors[:, len(texts[0]) % 2 if len(texts) == 1 else 0] = 1
        return vectors


def minilm_settings(**more: object) -> EmbedderSettings:
    return EmbedderSettings.model_validate({"kind": "minilm", "time_limit_s": HANG_GUARD_S} | more)


async def started(model: Embedder, tmp_path: Path, **more: object) -> EmbeddingService:
    service = EmbeddingService(minilm_settings(**more), tmp_path, model=model)
    await service.start()
    return service


async def test_static_is_the_static_embedder(tmp_path: Path) -> None:
    service = EmbeddingService(EmbedderSettings(), tmp_path)
    await service.start()
    await service.warm()
    expected = StaticEmbedder()
    embedded = await service.embed("Why is the sky blue?")
    assert embedded.space == service.space == service.fallback_space == expected.space
    assert service.dimension == expected.dimension
    assert np.array_equal(embedded.vector, expected.embed(["Why is the sky blue?"])[0])
    assert np.array_equal(await service.embed_api(["a", "b"]), expected.embed(["a", "b"]))
    many = [f"text {number}" for number in range(100)]
    assert np.array_equal(await service.embed_api(many), expected.embed(many))
    assert [each.space for each in await service.embed_many(many)] == [expected.space] * 100
    await service.close()


@pytest.mark.parametrize("kind", ["static", "minilm"])
async def test_a_text_is_embedded_once(kind: str, tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = EmbeddingService(EmbedderSettings.model_validate({"kind": kind}), tmp_path, model=model)
    if kind == "minilm":
        await service.start()
    first = await service.embed("same")
    second = await service.embed("same")
    assert np.array_equal(first.vector, second.vector)
    assert first.space == second.space
    assert (service.stats.cache_misses, service.stats.cache_hits) == (1, 1)
    assert len(model.batches) == (kind == "minilm")
    await service.close()


async def test_vectors_cannot_be_changed_behind_the_caches_back(tmp_path: Path) -> None:
    service = EmbeddingService(EmbedderSettings(), tmp_path)
    embedded = await service.embed("same")
    with pytest.raises(ValueError, match="read-only"):
        embedded.vector[0] = 1


async def test_concurrent_texts_share_a_batch_off_the_loop(tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = await started(model, tmp_path, batch_window_s=0.05)
    embedded = await asyncio.gather(*(service.embed(f"text {number}") for number in range(20)))
    assert model.batches == [[f"text {number}" for number in range(20)]]
    assert {each.space for each in embedded} == {"counting-2"}
    assert model.threads == {"atoll-embed_0"}
    await service.close()


async def test_a_full_batch_does_not_wait_for_the_window(tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = await started(model, tmp_path, batch_window_s=HANG_GUARD_S, max_batch=4)
    async with asyncio.timeout(HANG_GUARD_S / 2):
        await asyncio.gather(*(service.embed(f"text {number}") for number in range(8)))
    assert [len(batch) for batch in model.batches] == [4, 4]
    await service.close()


async def test_equal_texts_at_once_are_embedded_once(tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = await started(model, tmp_path)
    embedded = await asyncio.gather(*(service.embed("same") for _ in range(10)))
    assert model.batches == [["same"]]
    assert len({each.vector.tobytes() for each in embedded}) == 1
    await service.close()


async def test_a_late_model_is_replaced_by_the_static_embedder(tmp_path: Path) -> None:
    model = CountingEmbedder()
    model.may_go_on.clear()
    service = await started(model, tmp_path, time_limit_s=0.05, batch_window_s=0)
    late = await service.embed("late")
    assert late.space == service.fallback_space
    assert np.array_equal(late.vector, StaticEmbedder().embed(["late"])[0])
    assert service.stats.timeouts == 1
    model.may_go_on.set()
    await service.close()
    assert (await service.embed("late")).space == "counting-2", "what came too late was kept for the next time"
    assert model.batches == [["late"]]


async def test_texts_that_nobody_waits_for_are_not_embedded(tmp_path: Path) -> None:
    model = CountingEmbedder()
    model.may_go_on.clear()
    service = await started(model, tmp_path, time_limit_s=0.05, batch_window_s=0)
    await service.embed("running")
    await asyncio.gather(*(service.embed(f"waiting {number}") for number in range(50)))
    assert service.snapshot()["dropped_texts"] == 50
    model.may_go_on.set()
    await service.close()
    assert model.batches == [["running"]]


async def test_a_leaving_client_takes_its_text_out_of_the_queue(tmp_path: Path) -> None:
    model = CountingEmbedder()
    model.may_go_on.clear()
    service = await started(model, tmp_path, batch_window_s=0)
    running = asyncio.create_task(service.embed("running"))
    await asyncio.to_thread(model.has_begun.wait, HANG_GUARD_S)
    leaving = asyncio.create_task(service.embed("leaving"))
    staying = [asyncio.create_task(service.embed("shared")) for _ in range(2)]
    await asyncio.sleep(0)
    leaving.cancel()
    staying[0].cancel()
    await asyncio.wait([leaving, staying[0]])
    model.may_go_on.set()
    assert (await running).space == (await staying[1]).space == "counting-2"
    assert model.batches == [["running"], ["shared"]]
    await service.close()


async def test_a_failing_model_never_fails_a_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = CountingEmbedder()
    model.is_broken = True
    service = await started(model, tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(9):
            assert (await service.embed(f"text {number}")).space == service.fallback_space
    assert service.stats.failures == 9
    assert len(caplog.records) == 4, "told at the first, second, fourth and eighth"
    model.is_broken = False
    assert (await service.embed("text 0")).space == "counting-2", "a failure is not remembered"
    await service.close()


async def test_many_texts_are_all_in_one_space(tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = await started(model, tmp_path, time_limit_s=0.05, batch_window_s=0)
    await service.embed("known")
    model.may_go_on.clear()
    embedded = await service.embed_many(["known", "late"])
    assert [each.space for each in embedded] == [service.fallback_space] * 2
    model.may_go_on.set()
    await service.close()


async def test_the_api_waits_for_the_model(tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = await started(model, tmp_path, time_limit_s=0.01)
    model.may_go_on.clear()
    call = asyncio.create_task(service.embed_api(["one", "two"]))
    await asyncio.sleep(0.05)
    assert not call.done()
    model.may_go_on.set()
    assert (await call).shape == (2, 2)
    model.is_broken = True
    with pytest.raises(RuntimeError, match="out of order"):
        await service.embed_api(["one"])
    await service.close()


async def test_a_bulk_job_lets_requests_in_between(tmp_path: Path) -> None:
    model = CountingEmbedder()
    model.may_go_on.clear()
    service = await started(model, tmp_path, batch_window_s=0)
    bulk = asyncio.create_task(service.embed_api([f"bulk {number}" for number in range(400)]))
    await asyncio.to_thread(model.has_begun.wait, HANG_GUARD_S)
    request = asyncio.create_task(service.embed("request"))
    await asyncio.sleep(0.01)
    model.may_go_on.set()
    await asyncio.gather(bulk, request)
    assert model.batches[1] == ["request"]
    await service.close()


async def test_the_api_refuses_too_many_texts(tmp_path: Path) -> None:
    model = CountingEmbedder()
    service = await started(model, tmp_path)
    with pytest.raises(InvalidRequest, match="at most 2048"):
        await service.embed_api(["x"] * (MAX_API_TEXTS + 1))
    model.may_go_on.clear()
    calls = [
        asyncio.create_task(service.embed_api(["x"] * MAX_API_TEXTS))
        for _ in range(MAX_API_TEXTS_WAITING // MAX_API_TEXTS)
    ]
    await asyncio.to_thread(model.has_begun.wait, HANG_GUARD_S)
    with pytest.raises(RateLimited, match="wait to be embedded"):
        await service.embed_api(["x"])
    model.may_go_on.set()
    await asyncio.gather(*calls)
    assert (await service.embed_api(["x"])).shape == (1, 2)
    await service.close()


async def test_closing_answers_those_who_wait(tmp_path: Path) -> None:
    model = CountingEmbedder()
    model.may_go_on.clear()
    service = await started(model, tmp_path, batch_window_s=0)
    running = asyncio.create_task(service.embed("running"))
    await asyncio.to_thread(model.has_begun.wait, HANG_GUARD_S)
    waiting = asyncio.create_task(service.embed("waiting"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(service.close())
    assert (await waiting).space == service.fallback_space
    model.may_go_on.set()
    await closing
    assert (await running).space == "counting-2"
    assert (await service.embed("after")).space == service.fallback_space
