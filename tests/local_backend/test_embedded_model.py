"""The embedded model itself: its answers are those of transformers' `generate`, alone and in company."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.local_backend.codec import Codec
from atoll.local_backend.engine import GenerateRequest, Sampling
from atoll.local_backend.torch_engine import TorchEngine

pytestmark = pytest.mark.slow

ANSWER_TOKENS = 16
QUESTIONS = [
    "What is the capital of France?",
    "Translate 'good morning' into Spanish, then use it in a sentence about " + "a very busy market " * 20,
    "def fibonacci(n):",
    "Reply with an emoji 👋",
]


@pytest.fixture(scope="module")
def prompts(smol_codec: Codec) -> list[list[int]]:
    return [smol_codec.encode(smol_codec.render([{"role": "user", "content": text}])) for text in QUESTIONS]


@pytest.fixture
async def engine(smol_folder: Path, smol_codec: Codec) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine.load(smol_folder, model_name="smol", codec=smol_codec, dtype="float32")
    yield engine
    await engine.close()


async def answer(engine: TorchEngine, prompt: list[int], **wanted: Any) -> list[int]:
    """The token ids of a greedy answer."""
    request = GenerateRequest(
        prompt, max_tokens=ANSWER_TOKENS, sampling=Sampling(temperature=0), top_logprobs=0, ignore_end=True, **wanted
    )
    return [token.token_id async for event in engine.generate(request) for token in event.tokens]


async def test_greedy_answers_are_transformers_own(
    engine: TorchEngine, smol_folder: Path, prompts: list[list[int]]
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smol_folder, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
            eos_token_id=-1,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert [await answer(engine, prompt) for prompt in prompts[:2]] == expected[:2]
    assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == expected


async def test_it_knows_the_capital_of_france(engine: TorchEngine, prompts: list[list[int]]) -> None:
    request = GenerateRequest(prompts[0], sampling=Sampling(temperature=0))
    events = [event async for event in engine.generate(request)]
    assert "Paris" in "".join(event.text for event in events)
    assert events[-1].finish_reason == "stop"
