"""How long a text takes to embed, for each embedder, side by side.

    python benchmarks/embedding.py [--rounds 100] [--threads 1] [--json]

Each round embeds both texts with every embedder in turn, so that a busy machine slows all of them alike: trust the
ratios. Times are wall time of one text (batch 1), tokenising included, caches left out. MiniLM reads 128 tokens of the
long text; sentence-transformers reads all. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import MissingExtraError
from atoll.routers.embedding.base import Embedder
from atoll.routers.embedding.load import load_embedder

Embed = Callable[[str], Any]
Times = dict[str, dict[str, list[float]]]

_STORY = (
    "A company weighs two projects with different cash flows over five years. The first costs 120 thousand dollars "
    "today and returns 40 thousand a year; the second costs 200 thousand and returns 35 thousand in the first year, "
    "growing by twenty percent in each of the years that follow. "
)
TEXTS = {
    "21 tokens": "Write a Python function that returns the nth prime number, and explain how it works well.",
    "222 tokens": _STORY * 4 + "Which one should the company choose?",
}
REFERENCE = "sentence-transformers"


def embedders(threads: int, cache_dir: Path) -> dict[str, Embed]:
    """By name; those that can run here."""
    made = {"static": alone(load_embedder("static"))}
    for dtype in ("float32", "bfloat16", "int8"):
        try:
            made[f"minilm {dtype}"] = alone(load_embedder("minilm", dtype=dtype, cache_dir=cache_dir, threads=threads))
        except MissingExtraError as error:
            print(f"minilm {dtype} is left out: {error}", file=sys.stderr)
    try:
        made[REFERENCE] = reference()
    except (ImportError, MissingExtraError) as error:
        print(f"{REFERENCE} is left out: {error}", file=sys.stderr)
    return made


def alone(embedder: Embedder) -> Embed:
    return lambda text: embedder.embed([text])


def reference() -> Embed:
    """sentence-transformers' own `encode`, in float32."""
    from sentence_transformers import SentenceTransformer

    from atoll.routers.embedding.minilm import model_folder

    model = SentenceTransformer(str(model_folder()), device="cpu")
    return lambda text: model.encode([text], normalize_embeddings=True)


def measure(rivals: dict[str, Embed], rounds: int) -> Times:
    """Seconds by embedder and text."""
    times: Times = {name: {length: [] for length in TEXTS} for name in rivals}
    for number in range(rounds + 3):
        for name, embed in rivals.items():
            for length, text in TEXTS.items():
                embed("The text before, so that what the last embedder left in the processor's caches is gone.")
                start = time.perf_counter()
                embed(text)
                if number >= 3:  # The first rounds warm up.
                    times[name][length].append(time.perf_counter() - start)
    return times


def summary(times: Times) -> list[dict[str, Any]]:
    """One row per embedder and text; `ratio` is the reference's p50 over this one's."""
    rows = []
    for name, by_length in times.items():
        for length, seconds in by_length.items():
            p50, p99 = np.percentile(seconds, [50, 99])
            against = float(np.median(times[REFERENCE][length])) if REFERENCE in times else float("nan")
            rows.append(
                {
                    "embedder": name,
                    "text": length,
                    "p50_ms": round(p50 * 1e3, 4),
                    "p99_ms": round(p99 * 1e3, 4),
                    "times_faster_than_reference": round(against / p50, 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache_dir:
        rivals = embedders(arguments.threads, Path(cache_dir))
        rows = summary(measure(rivals, arguments.rounds))
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "threads": arguments.threads, "rows": rows}, indent=2))
        return
    print(f"{'embedder':<24}{'text':<12}{'p50 ms':>10}{'p99 ms':>10}{'x faster':>10}")
    for row in rows:
        print("{embedder:<24}{text:<12}{p50_ms:>10}{p99_ms:>10}{times_faster_than_reference:>10}".format(**row))


if __name__ == "__main__":
    main()
