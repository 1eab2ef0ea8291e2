"""The dial as a user turns it: real prompts, at least six known models, preferences from 1 to 0."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atoll.routers.datasets import load_dataset
from atoll.routers.decision import decide
from atoll.routers.embedding.static import StaticEmbedder
from atoll.routers.prior import PriorRouter
from atoll.types import Candidate, Estimate, Preference

OUR_PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()
PREFERENCES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1, 0.0)
DATASETS = ("mmlupro", "routellm2", "fusionbench9", "routerbench", "bfcl")


def priced(name: str, input_usd: float, output_usd: float) -> Candidate:
    return Candidate(name, name, "u", input_usd_per_mtok=input_usd, output_usd_per_mtok=output_usd)


KNOWN = (
    priced("gemini-1.5-pro-002", 1.25, 5.0),
    priced("gemini-1.5-flash-002", 0.075, 0.3),
    priced("gpt-4-1106-preview", 10.0, 30.0),
    priced("llama-3.1-70b-instruct", 0.88, 0.88),
    priced("llama-3.1-8b-instruct", 0.18, 0.18),
    priced("mixtral-8x7b-instruct-v0.1", 0.6, 0.6),
    priced("qwen2.5-7b-instruct", 0.2, 0.2),
    priced("gemma-2-9b-it", 0.1, 0.1),
)


def turned(texts: list[str]) -> dict[float, list[Estimate]]:
    """What is chosen for each text, by preference."""
    embedder = StaticEmbedder()
    router = PriorRouter.shipped(KNOWN, space=embedder.space)
    rows = [
        router.estimate_one(vector, 8 + len(text) // 4)
        for text, vector in zip(texts, embedder.embed(texts), strict=True)
    ]
    chosen: dict[float, list[Estimate]] = {}
    for quality_weight in PREFERENCES:
        names = [
            decide(row, Preference(quality_weight), router="prior", router_version=router.version).candidate
            for row in rows
        ]
        chosen[quality_weight] = [
            next(each for each in row if each.candidate == name) for row, name in zip(rows, names, strict=True)
        ]
    return chosen


def assert_sensible(chosen: dict[float, list[Estimate]]) -> None:
    costs = [np.mean([each.cost_usd for each in chosen[preference]]) for preference in PREFERENCES]
    qualities = [np.mean([each.quality for each in chosen[preference]]) for preference in PREFERENCES]
    assert costs == sorted(costs, reverse=True)
    assert qualities == sorted(qualities, reverse=True)
    # Between the ends lies something worth turning the dial for.
    assert costs[0] > 5 * costs[-1]
    assert qualities[0] > qualities[-1] + 0.1
    counts = {preference: Counter(each.candidate for each in chosen[preference]) for preference in (0.0, 0.5, 1.0)}
    assert len({name for count in counts.values() for name in count}) >= 4
    assert len({count.most_common(1)[0][0] for count in counts.values()}) == 3
    assert len(counts[1.0]) >= 2, "one model for everything is no routing"


def test_our_own_prompts() -> None:
    assert len(OUR_PROMPTS) == 50
    assert_sensible(turned(OUR_PROMPTS))


def test_fifty_real_prompts(routing_data: Path) -> None:
    texts = []
    for name in DATASETS:
        dataset = load_dataset(routing_data / name)
        texts += [dataset.texts[row] for row in np.random.default_rng(1).permutation(len(dataset))[:10]]
    assert_sensible(turned(texts))


@pytest.mark.parametrize("preference", [0.0, 0.5, 1.0])
def test_every_choice_has_a_reason_and_a_fallback_order(preference: float) -> None:
    embedder = StaticEmbedder()
    router = PriorRouter.shipped(KNOWN, space=embedder.space)
    for vector in embedder.embed(OUR_PROMPTS):
        decision = decide(
            router.estimate_one(vector, 50), Preference(preference), router="prior", router_version=router.version
        )
        assert len(decision.alternatives) == len(KNOWN) - 1
        assert decision.reason.startswith(f"{decision.candidate}: ")
