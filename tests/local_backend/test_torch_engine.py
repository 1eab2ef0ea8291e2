from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.errors import ContextOverflow, EngineError, InvalidRequest, RateLimited
from atoll.local_backend.batch import Batch
from atoll.local_backend.codec import Codec
from atoll.local_backend.decoder import Decoder
from atoll.local_backend.engine import GenerateRequest, Sampling, TokenEvent
from atoll.local_backend.torch_engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]
GREEDY = Sampling(temperature=0)


def prompt(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


async def events_of(engine: TorchEngine, prompt_ids: Sequence[int], **wanted: Any) -> list[TokenEvent]:
    request = GenerateRequest(prompt_ids, **{"max_tokens": 20, "ignore_end": True} | wanted)
    return [event async for event in engine.generate(request)]


async def text_of(engine: TorchEngine, prompt_ids: Sequence[int], **wanted: Any) -> str:
    return "".join(event.text for event in await events_of(engine, prompt_ids, **wanted))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something has become true; a hang ends in the test's own time limit."""
    while not condition():  # noqa: ASYNC110 - the engine's thread makes it true
        await asyncio.sleep(0.005)


PROMPTS = [prompt(text) for text in ("one", "another prompt", "x" * 100, "a", "the last of them " * 9)]


async def test_batched_answers_are_those_given_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(prompt_tokens_per_step=32)
    alone = [await text_of(engine, ids, sampling=GREEDY) for ids in PROMPTS]
    together = await asyncio.gather(*(text_of(engine, ids, sampling=GREEDY) for ids in PROMPTS))
    assert together == alone
    assert len(set(alone)) == len(PROMPTS)


async def test_requests_join_while_others_run(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=4)
    alone = [await text_of(engine, ids, sampling=GREEDY, max_tokens=60) for ids in PROMPTS]
    tasks = []
    for ids in PROMPTS:
        tasks.append(asyncio.create_task(text_of(engine, ids, sampling=GREEDY, max_tokens=60)))
        await asyncio.sleep(0.02)
    assert await asyncio.gather(*tasks) == alone


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
async def test_a_seed_repeats_an_answer_whatever_the_company(make_engine: MakeEngine, sampling: dict[str, Any]) -> None:
    engine = make_engine()
    seeded = Sampling(seed=11, **sampling)
    first = await text_of(engine, PROMPTS[0], sampling=seeded)
    company = [text_of(engine, ids, sampling=Sampling(seed=number)) for number, ids in enumerate(PROMPTS)]
    second, *_ = await asyncio.gather(text_of(engine, PROMPTS[0], sampling=seeded), *company)
    assert second == first
    assert await text_of(engine, PROMPTS[0], sampling=Sampling(seed=12, **sampling)) != first


async def test_choices_are_answers_of_their_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    events = await events_of(engine, PROMPTS[0], choices=3, sampling=Sampling(seed=5))
    texts = ["".join(event.text for event in events if event.choice == choice) for choice in range(3)]
    assert len(set(texts)) == 3
    assert texts[0] == await text_of(engine, PROMPTS[0], sampling=Sampling(seed=5))
    finished = [event for event in events if event.finish_reason]
    assert sorted(event.choice for event in finished) == [0, 1, 2]
    assert all(event.completion_tokens == 20 for event in finished)


async def test_length_and_stop_are_told(make_engine: MakeEngine, tiny_codec: Codec) -> None:
    engine = make_engine()
    *_, last = await events_of(engine, PROMPTS[0], max_tokens=5)
    assert (last.finish_reason, last.completion_tokens) == ("length", 5)
    end = next(iter(tiny_codec.end_ids))
    forced = Sampling(temperature=0, logit_bias={end: 100})
    events = await events_of(engine, PROMPTS[0], sampling=forced, ignore_end=False)
    assert [(event.text, event.finish_reason, event.completion_tokens) for event in events] == [("", "stop", 1)]


async def test_a_stop_string_ends_the_answer_before_itself(make_engine: MakeEngine) -> None:
    engine = make_engine()
    whole = await text_of(engine, PROMPTS[1], sampling=GREEDY, max_tokens=40)
    stop = whole[10:13]
    events = await events_of(engine, PROMPTS[1], sampling=GREEDY, max_tokens=40, stop=(stop,))
    assert "".join(event.text for event in events) == whole.split(stop)[0]
    assert events[-1].finish_reason == "stop"
    assert all(stop not in event.text for event in events)


async def test_every_piece_of_text_is_whole_characters(make_engine: MakeEngine) -> None:
    """The model writes random bytes; what comes piece by piece is what decoding all bytes at once gives."""
    engine = make_engine()
    for seed in range(5):
        events = await events_of(engine, PROMPTS[0], max_tokens=60, top_logprobs=0, sampling=Sampling(seed=seed))
        raw = b"".join(token.raw for event in events for token in event.tokens if token.token_id > 2)
        assert "".join(event.text for event in events) == raw.decode("utf-8", "replace")


async def test_logprobs_are_complete_and_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    events = await events_of(engine, PROMPTS[0], top_logprobs=5, sampling=GREEDY)
    tokens = [token for event in events for token in event.tokens]
    assert len(tokens) == events[-1].completion_tokens == 20
    for token in tokens:
        assert token.top[0].token_id == token.token_id
        assert token.top[0].logprob == pytest.approx(token.logprob)
        assert [top.logprob for top in token.top] == sorted((top.logprob for top in token.top), reverse=True)
        assert 0 < sum(math.exp(top.logprob) for top in token.top) <= 1 + 1e-6


async def test_scores_are_those_of_generating(make_engine: MakeEngine) -> None:
    engine = make_engine(prompt_tokens_per_step=16)
    events = await events_of(engine, PROMPTS[1], top_logprobs=0, sampling=GREEDY)
    generated = [token for event in events for token in event.tokens]
    text = [*PROMPTS[1], *(token.token_id for token in generated)]
    scored = await engine.score(text, top_logprobs=3)
    assert [token.token_id for token in scored] == text[1:]
    assert [token.logprob for token in scored[-20:]] == pytest.approx([token.logprob for token in generated], abs=1e-3)
    assert all(len(token.top) == 3 for token in scored)
    assert await engine.score(text[:1]) == []


async def test_embeddings_have_unit_length_and_do_not_depend_on_company(make_engine: MakeEngine) -> None:
    engine = make_engine(prompt_tokens_per_step=16)
    together = await engine.embed(PROMPTS)
    assert together.shape == (5, 48)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for place, ids in enumerate(PROMPTS):
        np.testing.assert_allclose((await engine.embed([ids]))[0], together[place], atol=1e-4)
    assert (await engine.embed([])).shape == (0, 48)


async def test_overflow_states_both_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(context_tokens=300)
    with pytest.raises(ContextOverflow, match=r"300 tokens.*301 are needed.*101 tokens and 200 were"):
        await text_of(engine, [5] * 101, max_tokens=200)
    with pytest.raises(ContextOverflow, match=r"300 tokens.*350"):
        await text_of(engine, [5] * 350, max_tokens=None)
    with pytest.raises(ContextOverflow, match=r"300 tokens.*301"):
        await engine.score([5] * 301)
    *_, last = await events_of(engine, [5] * 290, max_tokens=None)
    assert (last.finish_reason, last.completion_tokens) == ("length", 10)


async def test_an_empty_prompt_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="empty"):
        await text_of(engine, [])
    with pytest.raises(InvalidRequest, match="empty"):
        await engine.embed([[]])


async def test_a_full_queue_refuses_and_recovers(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=2, max_waiting=1)
    tasks = [asyncio.create_task(text_of(engine, PROMPTS[0], max_tokens=100)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited, match="at most 3"):
        await text_of(engine, PROMPTS[0])
    await asyncio.gather(*tasks)
    assert await text_of(engine, PROMPTS[0])


async def test_leaving_frees_the_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine()
    other = asyncio.create_task(text_of(engine, PROMPTS[1], sampling=GREEDY, max_tokens=300))
    request = GenerateRequest(PROMPTS[0], max_tokens=400, ignore_end=True)
    async with contextlib.aclosing(engine.generate(request)) as events:
        await anext(events)
    await until(lambda: engine.stats().cancelled == 1)
    assert engine.stats().completion_tokens < 700
    await other
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_reserved) == (0, 0, 0)


@pytest.mark.parametrize("max_batch", [1, 8])
async def test_leaving_before_the_first_token_frees_the_sequence(make_engine: MakeEngine, max_batch: int) -> None:
    """Waiting in the queue (batch of one) or in the middle of the prompt."""
    engine = make_engine(max_batch=max_batch, prompt_tokens_per_step=16)
    other = asyncio.create_task(text_of(engine, PROMPTS[1], max_tokens=300))
    await until(lambda: engine.stats().running == 1)
    leaver = asyncio.create_task(text_of(engine, [5] * 400, max_tokens=50))
    await until(lambda: engine.stats().running + engine.stats().waiting == 2)
    leaver.cancel()
    await until(lambda: engine.stats().cancelled == 1)
    assert not other.done()
    assert len(await other) > 0


async def test_when_memory_runs_out_answers_wait_and_stay_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(context_tokens=512, kv_budget_tokens=4096)
    ids = [prompt(f"sequence number {number} " * 10) for number in range(24)]
    tasks = [text_of(engine, one, sampling=GREEDY, max_tokens=300) for one in ids]
    together = await asyncio.gather(*tasks)
    assert engine.stats().preempted > 0
    roomy = make_engine()
    alone = await asyncio.gather(*(text_of(roomy, one, sampling=GREEDY, max_tokens=300) for one in ids[:3]))
    assert together[:3] == alone
    assert roomy.stats().preempted == 0


async def test_a_long_prompt_does_not_stop_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine(prompt_tokens_per_step=16)
    running = asyncio.create_task(events_of(engine, PROMPTS[0], max_tokens=200))
    await until(lambda: engine.stats().completion_tokens > 0)
    before = engine.stats().completion_tokens
    await events_of(engine, [5] * 480, max_tokens=1)
    assert engine.stats().completion_tokens - before >= 480 // 16
    await running


async def test_closing_ends_everything_with_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch=1)
    tasks = [asyncio.create_task(text_of(engine, PROMPTS[0], max_tokens=400)) for _ in range(3)]
    await until(lambda: engine.stats().running == 1)
    await engine.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineError)
    with pytest.raises(EngineError, match="shutting down"):
        await text_of(engine, PROMPTS[0])
    await engine.close()


async def test_ids_beyond_the_vocabulary_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="100000 is no token id"):
        await text_of(engine, [100_000])
    with pytest.raises(InvalidRequest, match="-1 is no token id"):
        await engine.score([5, -1])
    with pytest.raises(InvalidRequest, match="no token id"):
        await text_of(engine, PROMPTS[0], sampling=Sampling(logit_bias={260: 1.0}))


class StopsInTheMiddle(Decoder):
    """Its first pass goes no further than the first layer before everybody has left."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, batch: Batch) -> torch.Tensor:
        self.has_begun.set()
        self.may_go_on.wait(60)
        return super().forward(batch)


async def test_a_step_for_nobody_is_broken_off(tiny_folder: Path, tiny_codec: Codec) -> None:
    model = StopsInTheMiddle.load(tiny_folder, torch.float32, torch.device("cpu"))
    assert isinstance(model, StopsInTheMiddle)
    engine = TorchEngine(model, tiny_codec, model_name="slow")
    task = asyncio.create_task(text_of(engine, PROMPTS[0]))
    await asyncio.to_thread(model.has_begun.wait, 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    model.may_go_on.set()
    await until(lambda: engine.stats().cancelled == 1)
    assert engine.stats().steps == 0
    assert engine.stats().failed == 0
    assert await text_of(engine, PROMPTS[0])
    await engine.close()


class FailsOnToken7(Decoder):
    """As a model does that runs out of memory, say."""

    def forward(self, batch: Batch) -> torch.Tensor:
        if 7 in batch.token_ids.tolist():
            raise RuntimeError("not enough memory")
        return super().forward(batch)


async def test_a_failing_step_ends_what_runs_and_the_engine_goes_on(tiny_folder: Path, tiny_codec: Codec) -> None:
    model = FailsOnToken7.load(tiny_folder, torch.float32, torch.device("cpu"))
    engine = TorchEngine(model, tiny_codec, model_name="failing")
    no_seven = Sampling(logit_bias={7: -100})
    other = asyncio.create_task(text_of(engine, PROMPTS[0], sampling=no_seven, max_tokens=400))
    await until(lambda: engine.stats().running == 1)
    with pytest.raises(EngineError, match="RuntimeError: not enough memory"):
        await text_of(engine, [7])
    with pytest.raises(EngineError, match="not enough memory"):
        await other
    assert await text_of(engine, PROMPTS[0], sampling=no_seven)
    stats = engine.stats()
    assert (stats.failed, stats.finished, stats.kv_tokens_reserved) == (2, 1, 0)
    await engine.close()


async def test_fifty_requests_leave_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await text_of(engine, PROMPTS[0])
    tasks_before = len(asyncio.all_tasks())
    await asyncio.gather(
        *(text_of(engine, PROMPTS[number % 5], sampling=Sampling(seed=number)) for number in range(50))
    )
    gc.collect()
    assert len(asyncio.all_tasks()) == tasks_before
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_tokens_used, stats.kv_tokens_reserved) == (0, 0, 0, 0)
    assert stats.finished == 51
