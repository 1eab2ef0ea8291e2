"""How long a routing decision takes, and what decisions are worth on real outcomes.

    python benchmarks/routing.py [--data DIR] [--json]

Times, for one prompt and 20 candidates: embedding (static), the estimate of the prior router and of a kNN router
fitted on 10,000 random prompts, the decision, and all together. A plain loop stands beside them: where its p99 is
milliseconds, the machine is busy, and so are the others' p99.

With --data (folders of outcome tables with `prices.csv` beside them), also the mean quality and cost of decisions on
held-out prompts, by preference, beside what is to be beaten: the best single model, the cheapest, chance, and the best
in hindsight.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.routers import KNNRouter, PriorRouter, Router, decide
from atoll.routers.datasets import is_held_out, load_dataset
from atoll.routers.embedding.load import load_embedder
from atoll.routers.table import OutcomeTable
from atoll.types import Candidate, Preference

N_CANDIDATES = 20
N_PROMPTS = 10_000
REPEATS = 3_000
PREFERENCES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
DATASETS = ("mmlupro", "routellm2", "fusionbench9")
QUESTIONS = [
    "Why is the sky blue?",
    "Write a Python function that merges two sorted lists.",
    "What is the integral of x squared times e to the minus x?",
    "Draft a polite reminder to a customer whose invoice is 30 days overdue.",
]
Vectors = npt.NDArray[np.float32]


def timed(act: Callable[[int], object]) -> dict[str, float]:
    for index in range(50):
        act(index)
    times = np.empty(REPEATS)
    for index in range(REPEATS):
        start = time.perf_counter()
        act(index)
        times[index] = time.perf_counter() - start
    p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e6
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def pool_of(n: int) -> list[Candidate]:
    prices = np.geomspace(0.05, 15, n)
    return [
        Candidate(f"model-{i}", f"model-{i}", "u", input_usd_per_mtok=price, output_usd_per_mtok=4 * price)
        for i, price in enumerate(prices.tolist())
    ]


def random_knn(pool: Sequence[Candidate], dimension: int, space: str) -> KNNRouter:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((N_PROMPTS, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    quality = (rng.random((N_PROMPTS, len(pool))) < 0.5).astype(np.float32)
    tokens = rng.integers(50, 500, (N_PROMPTS, len(pool))).astype(np.float32)
    return KNNRouter(k=100, cv_prompts=100).fit_table(OutcomeTable(vectors, quality, tokens), pool, space=space)


def latencies() -> dict[str, dict[str, float]]:
    embedder = load_embedder("static")
    pool = pool_of(N_CANDIDATES)
    prior = PriorRouter.shipped(pool, space=embedder.space)
    knn = random_knn(pool, embedder.dimension, embedder.space)
    vectors = embedder.embed(QUESTIONS)
    rows = [prior.estimate_one(vector, 50) for vector in vectors]
    preference = Preference(0.5)

    def whole(index: int) -> object:
        text = f"{QUESTIONS[index % len(QUESTIONS)]} {index}"
        estimates = prior.estimate_one(embedder.embed([text])[0], 50)
        return decide(estimates, preference, router=prior.name, router_version=prior.version)

    return {
        "busy_loop": timed(lambda index: sum(range(3000))),
        "embed_static": timed(lambda index: embedder.embed([QUESTIONS[index % len(QUESTIONS)]])),
        "estimate_prior": timed(lambda index: prior.estimate_one(vectors[index % len(vectors)], 50)),
        "estimate_knn_10k": timed(lambda index: knn.estimate_one(vectors[index % len(vectors)], 50)),
        "decide_20": timed(lambda index: decide(rows[index % len(rows)], preference, router="r", router_version="1")),
        "embed_estimate_decide": timed(whole),
    }


def judged(folder: Path, kind: str) -> dict[str, Any]:
    """Decisions on the held-out prompts of one dataset."""
    dataset = load_dataset(folder)
    with (folder.parent / "prices.csv").open(encoding="utf-8") as lines:
        prices = {row["model"]: row for row in csv.DictReader(lines) if row["dataset"] == dataset.name}
    pool = [
        Candidate(
            model,
            model,
            "u",
            input_usd_per_mtok=float(prices[model]["usd_per_m_input"]),
            output_usd_per_mtok=float(prices[model]["usd_per_m_output"]),
        )
        for model in dataset.models
    ]
    embedder = load_embedder(kind)
    vectors = embedder.embed(dataset.texts)
    held = np.array([is_held_out(text) for text in dataset.texts])
    prompt_tokens = np.array([len(text) // 4 for text in dataset.texts])
    output_tokens = np.where(np.isnan(dataset.output_tokens), 100.0, dataset.output_tokens)
    cost = (
        prompt_tokens[:, None] * np.array([each.input_usd_per_mtok for each in pool])
        + output_tokens * np.array([each.output_usd_per_mtok for each in pool])
    ) / 1e6
    best, cheapest = dataset.quality[~held].mean(axis=0).argmax(), cost[~held].mean(axis=0).argmin()
    quality, cost, n = dataset.quality[held], cost[held], int(held.sum())
    table = OutcomeTable(vectors[~held], dataset.quality[~held], dataset.output_tokens[~held])
    routers: list[Router] = [
        KNNRouter().fit_table(table, pool, space=embedder.space),
        PriorRouter.shipped(pool, space=embedder.space),
    ]
    result: dict[str, Any] = {
        "prompts": n,
        f"best single ({dataset.models[best]})": _mean(quality[:, best], cost[:, best]),
        f"cheapest single ({dataset.models[cheapest]})": _mean(quality[:, cheapest], cost[:, cheapest]),
        "random": _mean(quality, cost),
        "oracle": _mean(
            quality.max(axis=1), np.where(quality == quality.max(axis=1, keepdims=True), cost, np.inf).min(1)
        ),
    }
    for router in routers:
        estimates = router.estimate(vectors[held], prompt_tokens[held])
        rows = [estimates.row(row, pool) for row in range(n)]
        for preference in PREFERENCES:
            picked = [
                dataset.models.index(decide(row, Preference(preference), router="r", router_version="1").candidate)
                for row in rows
            ]
            at = np.arange(n), np.array(picked)
            result[f"{router.name} at {preference:g}"] = _mean(quality[at], cost[at])
    return result


def _mean(quality: npt.NDArray[Any], cost: npt.NDArray[Any]) -> dict[str, float]:
    return {"quality": round(float(quality.mean()), 4), "cost_usd": float(f"{cost.mean():.3e}")}


def echo(results: dict[str, Any]) -> None:
    print(f"one prompt, {N_CANDIDATES} candidates")
    for what, each in results["latency"].items():
        print(f"  {what:24} p50 {each['p50_us']:8.1f} us   p99 {each['p99_us']:8.1f} us")
    for name, rows in results.get("outcomes", {}).items():
        print(f"{name}: {rows.pop('prompts')} held-out prompts")
        for what, each in rows.items():
            print(f"  {what:50} quality {each['quality']:.3f}  ${each['cost_usd']:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = os.environ.get("ATOLL_ROUTING_DATA")
    parser.add_argument("--data", type=Path, default=Path(found) if found else None)
    parser.add_argument("--embedder", choices=["static", "minilm"], default="static", help="for --data")
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"latency": latencies()}
    if arguments.data is not None:
        results["outcomes"] = {name: judged(arguments.data / name, arguments.embedder) for name in DATASETS}
    if arguments.as_json:
        print(json.dumps(results, indent=2))
    else:
        echo(results)


if __name__ == "__main__":
    main()
