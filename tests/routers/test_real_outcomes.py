"""Decisions judged by what really happened, on prompts that neither the prior nor the static table was fitted on."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from atoll.routers.base import Router
from atoll.routers.datasets import Dataset, is_held_out, load_dataset
from atoll.routers.decision import decide
from atoll.routers.embedding.static import StaticEmbedder
from atoll.routers.knn import KNNRouter
from atoll.routers.prior import PriorRouter
from atoll.routers.table import OutcomeTable
from atoll.types import Candidate, Preference

CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class Split:
    """A dataset with what its models cost, and who is best and cheapest on the prompts that may be learned from."""

    pool: tuple[Candidate, ...]
    learned: OutcomeTable
    vectors: np.ndarray
    prompt_tokens: np.ndarray
    quality: np.ndarray
    cost_usd: np.ndarray
    best: int
    cheapest: int


def split(data: Path, name: str) -> Split:
    dataset = load_dataset(data / name)
    pool = priced_pool(data, dataset)
    prompt_tokens = np.array([len(text) // CHARS_PER_TOKEN for text in dataset.texts])
    output_tokens = np.where(np.isnan(dataset.output_tokens), 100.0, dataset.output_tokens)
    cost = (
        prompt_tokens[:, None] * np.array([each.input_usd_per_mtok for each in pool])
        + output_tokens * np.array([each.output_usd_per_mtok for each in pool])
    ) / 1e6
    held = np.array([is_held_out(text) for text in dataset.texts])
    vectors = StaticEmbedder().embed(dataset.texts)
    return Split(
        pool,
        OutcomeTable(vectors[~held], dataset.quality[~held], dataset.output_tokens[~held]),
        vectors[held],
        prompt_tokens[held],
        dataset.quality[held],
        cost[held],
        int(dataset.quality[~held].mean(axis=0).argmax()),
        int(cost[~held].mean(axis=0).argmin()),
    )


def priced_pool(data: Path, dataset: Dataset) -> tuple[Candidate, ...]:
    with (data / "prices.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["dataset"] == dataset.name]
    prices = {row["model"]: (float(row["usd_per_m_input"]), float(row["usd_per_m_output"])) for row in rows}
    return tuple(
        Candidate(model, model, "u", input_usd_per_mtok=prices[model][0], output_usd_per_mtok=prices[model][1])
        for model in dataset.models
    )


def chosen(router: Router, split: Split, preference: float) -> np.ndarray:
    estimates = router.estimate(split.vectors, split.prompt_tokens)
    names = [candidate.name for candidate in split.pool]
    return np.array(
        [
            names.index(
                decide(
                    estimates.row(row, split.pool), Preference(preference), router=router.name, router_version="1"
                ).candidate
            )
            for row in range(len(split.vectors))
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["knn", "prior"])
@pytest.mark.parametrize("name", ["mmlupro", "routellm2", "fusionbench9"])
def test_choices_are_worth_it(routing_data: Path, name: str, kind: str) -> None:
    """At 1 as good as the best single model and not dearer; lower, cheaper; at 0 no worse than the cheapest."""
    data = split(routing_data, name)
    space = StaticEmbedder().space
    router = (
        KNNRouter().fit_table(data.learned, data.pool, space=space)
        if kind == "knn"
        else PriorRouter.shipped(data.pool, space=space)
    )
    rows = np.arange(len(data.quality))
    best, cheapest = data.quality[:, data.best].mean(), data.quality[:, data.cheapest].mean()
    results = {}
    for preference in (1.0, 0.75, 0.5, 0.0):
        picked = chosen(router, data, preference)
        results[preference] = data.quality[rows, picked].mean(), data.cost_usd[rows, picked].mean()
    assert results[1.0][0] >= best - 0.01
    assert results[1.0][0] > data.quality.mean() + 0.05
    assert results[1.0][1] <= 1.05 * data.cost_usd[:, data.best].mean()
    assert results[0.0][0] >= cheapest - 0.01
    qualities, costs = zip(*results.values(), strict=True)
    assert list(costs) == sorted(costs, reverse=True)
    assert all(lower <= higher + 0.01 for higher, lower in pairwise(qualities))
