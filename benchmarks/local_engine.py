"""Tokens per second of the local engine beside transformers' `generate`, on the same machine, model, dtype and prompts.

    python benchmarks/local_engine.py [--batches 1,8,64] [--tokens 64] [--rounds 3] [--dtype auto] [--json]

Both generate greedily to the same length. `generate` gets all prompts of a batch at once, padded on the left, which is
the best case for it; the engine gets them as separate concurrent requests. Rounds alternate between the two, and the
best round of each counts, so that a disturbance of the machine does not land on one side. `latency_ms` is the engine's
time from one token to the next for one request. `start_s` is the time from nothing loaded to ready, `first_token_ms`
that of a single short request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from atoll.local_backend.checkpoint import EMBEDDED_MODEL, prepare
from atoll.local_backend.codec import Codec
from atoll.local_backend.engine import GenerateRequest, Sampling

if TYPE_CHECKING:
    from atoll.local_backend.torch_engine import TorchEngine

_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper who befriends a whale.",
    "Give me a recipe for pancakes with the amounts in grams.",
)


@dataclass(frozen=True, slots=True)
class Row:
    batch: int
    engine_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    latency_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/models"))
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    report = asyncio.run(_measure(options))
    print(orjson.dumps(report).decode() if options.json else _table(report))
    return 0


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = prepare(options.model, options.cache_dir)
    engine, codec, start_s = _start(folder, options)
    reference = _load_reference(folder, engine, options)
    prompts = [codec.encode(codec.render([{"role": "user", "content": question}])) for question in _QUESTIONS]
    first_token_ms = min([await _first_token_ms(engine, prompts[0]) for _ in range(5)])
    rows = []
    for batch in (int(text) for text in options.batches.split(",")):
        chosen = [prompts[place % len(prompts)] for place in range(batch)]
        rows.append(await _compare(engine, reference, chosen, options))
    await engine.close()
    return {
        "model": options.model,
        "dtype": str(reference.dtype).removeprefix("torch."),
        "threads": options.threads,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "tokens": options.tokens,
        "start_s": round(start_s, 2),
        "first_token_ms": round(first_token_ms, 1),
        "rows": [asdict(row) for row in rows],
    }


def _start(folder: Path, options: argparse.Namespace) -> tuple[TorchEngine, Codec, float]:
    """From nothing imported to an engine that takes requests."""
    began = time.perf_counter()
    import torch

    from atoll.local_backend.torch_engine import TorchEngine

    torch.set_num_threads(options.threads)
    codec = Codec.load(folder)
    engine = TorchEngine.load(folder, model_name=options.model, codec=codec, dtype=options.dtype)
    return engine, codec, time.perf_counter() - began


def _load_reference(folder: Path, engine: TorchEngine, options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from atoll.local_backend.machine import choose_device, choose_dtype

    logging.disable_progress_bar()
    device = choose_device()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=choose_dtype(options.dtype, device))
    return model.to(device).eval()


async def _compare(engine: TorchEngine, reference: Any, prompts: list[list[int]], options: argparse.Namespace) -> Row:
    ours_s, theirs_s = [], []
    await _engine_s(engine, prompts, 4)
    _reference_s(reference, prompts, 4)
    for _ in range(options.rounds):
        ours_s.append(await _engine_s(engine, prompts, options.tokens))
        theirs_s.append(_reference_s(reference, prompts, options.tokens))
    total = len(prompts) * options.tokens
    ours, theirs = total / min(ours_s), total / min(theirs_s)
    return Row(
        batch=len(prompts),
        engine_tokens_per_s=round(ours, 1),
        transformers_tokens_per_s=round(theirs, 1),
        ratio=round(ours / theirs, 2),
        latency_ms=round(1000 * len(prompts) / ours, 1),
    )


async def _engine_s(engine: TorchEngine, prompts: list[list[int]], tokens: int) -> float:
    async def one(prompt: list[int]) -> None:
        request = GenerateRequest(prompt, max_tokens=tokens, sampling=Sampling(temperature=0), ignore_end=True)
        async for _ in engine.generate(request):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    return time.perf_counter() - began


def _reference_s(reference: Any, prompts: list[list[int]], tokens: int) -> float:
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=reference.device)
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=reference.device
    )
    began = time.perf_counter()
    out = reference.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0
    )
    seconds = time.perf_counter() - began
    assert out.shape[1] == longest + tokens
    return seconds


async def _first_token_ms(engine: TorchEngine, prompt: list[int]) -> float:
    began = time.perf_counter()
    request = GenerateRequest(prompt, max_tokens=1, sampling=Sampling(temperature=0), ignore_end=True)
    async for _ in engine.generate(request):
        pass
    return 1000 * (time.perf_counter() - began)


def _table(report: dict[str, Any]) -> str:
    head = (
        f"{report['model']}, {report['dtype']}, {report['threads']} threads, {report['machine']}; "
        f"ready in {report['start_s']} s, first token after {report['first_token_ms']} ms"
    )
    lines = [head, "", "| requests at once | engine tok/s | transformers tok/s | ratio | ms per token |"]
    lines.append("|---:|---:|---:|---:|---:|")
    lines += [
        f"| {row['batch']} | {row['engine_tokens_per_s']} | {row['transformers_tokens_per_s']} | {row['ratio']} "
        f"| {row['latency_ms']} |"
        for row in report["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
