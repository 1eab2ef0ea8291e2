"""The prior that ships, and what is the prior router's own beside the checks that all routers pass."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import DataError, RouterError
from atoll.routers.beliefs import Beliefs, Prior
from atoll.routers.checks import POOL, SPACE, fitted, probe
from atoll.routers.embedding.load import KINDS
from atoll.routers.embedding.static import StaticEmbedder
from atoll.routers.guess import EFFORTS, blended_price, size_billion
from atoll.routers.prior import SHIPPED, PriorRouter
from atoll.types import Candidate, Outcome

STATIC = StaticEmbedder()
PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()
VECTORS = STATIC.embed(PROMPTS)
LENGTHS = np.full(len(PROMPTS), 50, dtype=np.int64)
UNKNOWN = Candidate("unheard-of", "unheard-of", "u", input_usd_per_mtok=1.0, output_usd_per_mtok=4.0)
SMOLLM = Candidate("smollm2-135m-instruct", "smollm2-135m-instruct", "local", parameters_billion=0.135)


def table_prices() -> dict[str, Any]:
    """litellm's price table, without importing litellm."""
    spec = find_spec("litellm")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("model_prices_and_context_window_backup.json").read_text(encoding="utf-8")
    table = json.loads(text)
    assert isinstance(table, dict)
    return table


def at_list_price(model: str) -> Candidate:
    entry = table_prices()[model]
    return Candidate(
        model,
        model,
        "u",
        input_usd_per_mtok=entry["input_cost_per_token"] * 1e6,
        output_usd_per_mtok=entry["output_cost_per_token"] * 1e6,
    )


def mean_quality(*candidates: Candidate) -> list[float]:
    router = PriorRouter.shipped(candidates, space=STATIC.space)
    return [float(each) for each in router.estimate(VECTORS, LENGTHS).quality.mean(axis=0)]


def test_what_ships_is_small_and_holds_numbers_only() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 400_000
    about = json.loads((SHIPPED / "router.json").read_text())
    texts = [value for value in _strings(about) if len(value) > 60]
    assert texts == []
    router = PriorRouter.load(SHIPPED)
    per_cluster = router.skills_.share * 22_000
    assert per_cluster.min() > 15, "an aggregate of few prompts could tell of one"


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in _strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in _strings(each)]
    return [value] if isinstance(value, str) else []


def test_there_are_centres_for_every_embedder_that_ships() -> None:
    """When the static table is made anew its space changes: then run scripts/fit_prior.py again."""
    spaces = PriorRouter.load(SHIPPED).spaces
    assert STATIC.space in spaces
    assert {space.split("-")[0] for space in spaces} == set(KINDS)


def test_a_space_without_centres_is_refused() -> None:
    with pytest.raises(RouterError, match=r"no centres for vectors of 'other-1'.*atoll fit"):
        PriorRouter.shipped([UNKNOWN], space="other-1")


@pytest.mark.parametrize(
    "names",
    [
        ("gemini-1.5-pro-002", "gemini-1.5-flash-002", "Llama-3.1-8B-Instruct", "Llama-2-7b-hf"),
        ("gpt-4-1106-preview", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral-7b-instruct-v0.1"),
        ("llama3.1:70b", "llama3.1:8b", "smollm2-135m-instruct"),
    ],
)
def test_known_models_are_in_the_order_that_was_measured(names: tuple[str, ...]) -> None:
    quality = mean_quality(*(Candidate(name, name, "u") for name in names))
    assert quality == sorted(quality, reverse=True)
    assert quality[0] - quality[-1] > 0.15


def test_an_alias_is_as_good_as_the_name() -> None:
    plain, aliased = mean_quality(
        Candidate("gpt-4-1106-preview", "gpt-4-1106-preview", "u"),
        Candidate("ours", "deployment-7", "u", aliases=("openai/gpt-4-1106-preview",)),
    )
    assert plain == aliased


@pytest.mark.parametrize(
    "dear_to_cheap",
    [
        ("claude-opus-5-5", "claude-sonnet-5-5", "claude-haiku-5-5"),
        ("gpt-6.1-sol", "gpt-6.1-terra", "gpt-5.4-nano", "gpt-6-luna"),
        ("gpt-5", "gpt-5-mini", "gpt-5-nano"),
        ("gemini/gemini-4-argon", "gemini/gemini-3.8-flash", "gemini/gemini-3.5-flash-lite"),
    ],
)
def test_unknown_models_of_one_family_are_in_the_order_of_their_prices(dear_to_cheap: tuple[str, ...]) -> None:
    quality = mean_quality(*map(at_list_price, dear_to_cheap))
    assert quality == sorted(quality, reverse=True)
    assert len(set(quality)) == len(quality)
    assert quality[0] > 0.6


def test_the_embedded_model_is_well_below_any_other() -> None:
    small, eight, cheap = mean_quality(SMOLLM, Candidate("some-8b", "some-8b", "local"), at_list_price("gpt-6-luna"))
    assert small < 0.5 * eight
    assert small < 0.5 * cheap
    assert small > 0.01


def test_size_counts_where_there_is_no_price() -> None:
    sizes = [Candidate(f"thing-{size}b", "thing", "local", parameters_billion=size) for size in (0.1, 1, 3, 8, 70, 400)]
    quality = mean_quality(*sizes)
    assert quality == sorted(quality)
    assert len(set(quality)) == len(quality)


@pytest.mark.parametrize("stated", [0.05, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("name", ["unheard-of", "gpt-4-1106-preview"])
def test_a_stated_quality_is_the_average_over_prompts(stated: float, name: str) -> None:
    router = PriorRouter.shipped([UNKNOWN], space=STATIC.space)
    prior = router.prior_of(replace(UNKNOWN, name=name, model=name, quality_prior=stated))
    assert prior.quality[-1] == pytest.approx(stated, abs=1e-6)
    assert np.ptp(prior.quality) > 0.01, "some kinds of prompts are harder"


@pytest.mark.parametrize("stated", [0.0, 1.0])
def test_stated_extremes_stay_within_bounds(stated: float) -> None:
    quality = PriorRouter.shipped([replace(UNKNOWN, quality_prior=stated)], space=STATIC.space).estimate(
        VECTORS, LENGTHS
    )
    np.testing.assert_allclose(quality.quality, stated, atol=0.02)


def test_efforts_of_one_model_are_in_order() -> None:
    pool = [replace(UNKNOWN, name=f"m-{effort}", effort=effort) for effort in ("minimal", "low", "medium", "high")]
    assert {candidate.effort for candidate in pool} <= set(EFFORTS)
    estimates = PriorRouter.shipped(pool, space=STATIC.space).estimate(VECTORS, LENGTHS)
    assert (np.diff(estimates.quality, axis=1) > 0).all()
    assert (np.diff(estimates.cost_usd, axis=1) > 0).all()


def test_hard_prompts_are_told_from_easy_ones() -> None:
    router = PriorRouter.shipped([UNKNOWN], space=STATIC.space)
    quality = router.estimate(VECTORS, LENGTHS).quality[:, 0]
    assert quality.std() > 0.05


def test_feedback_moves_the_candidate_and_makes_it_surer() -> None:
    other = replace(UNKNOWN, name="other", model="other")
    router = PriorRouter.shipped([UNKNOWN, other], space=STATIC.space)
    before = router.estimate(VECTORS, LENGTHS)
    for row, prompt in enumerate(PROMPTS):
        router.update([Outcome(prompt, "unheard-of", 1.0, 50, 400)], {prompt: VECTORS[row]})
    after = router.estimate(VECTORS, LENGTHS)
    assert (after.quality[:, 0] > before.quality[:, 0] + 0.1).all()
    assert (after.quality_std[:, 0] < before.quality_std[:, 0]).all()
    np.testing.assert_allclose(after.quality_std[:, 1], before.quality_std[:, 1])
    assert after.output_tokens[:, 0].mean() > 300
    gained = after.quality - before.quality
    assert (gained[:, 1] > 0).all(), "kind feedback is half a reason to expect it of others"
    assert gained[:, 0].mean() > gained[:, 1].mean() + 0.1


def test_lenient_feedback_on_everybody_ranks_nobody() -> None:
    """What all candidates gain alike is the scale of the feedback, not their quality."""
    pool = [
        replace(UNKNOWN, name=f"m{index}", model=f"m{index}", quality_prior=0.4 + 0.1 * index) for index in range(3)
    ]
    router = PriorRouter.shipped(pool, space=STATIC.space)
    before = router.estimate(VECTORS, LENGTHS).quality
    for row, prompt in enumerate(PROMPTS):
        outcomes = [
            Outcome(prompt, candidate.name, min(1.0, float(before[row, column]) + 0.15))
            for column, candidate in enumerate(pool[:2])
        ]
        router.update(outcomes, {prompt: VECTORS[row]})
    after = router.estimate(VECTORS, LENGTHS).quality
    assert (after.mean(axis=0).argsort() == [0, 1, 2]).all()
    assert 0.04 < (after - before)[:, 2].mean() < 0.15


def test_feedback_from_one_kind_of_prompt_counts_there_most() -> None:
    router = PriorRouter.shipped([UNKNOWN], space=STATIC.space)
    sums = STATIC.embed([f"What is {a} times {a + 3}? Answer with the number." for a in range(40)])
    law = STATIC.embed(["Under English law, when is silence acceptance of an offer? Cite the leading case."])
    both = np.concatenate([sums[:1], law]), LENGTHS[:2]
    before = router.estimate(*both).quality[:, 0]
    for row in range(40):
        router.update(
            [Outcome("sum", "unheard-of", 0.0), Outcome("law", "unheard-of", 1.0)], {"sum": sums[row], "law": law[0]}
        )
    gained = router.estimate(*both).quality[:, 0] - before
    assert gained[0] < -0.1
    assert gained[1] > 0.1


def test_feedback_in_one_space_serves_the_other() -> None:
    router = fitted(PriorRouter)
    assert isinstance(router, PriorRouter)
    two_spaces = PriorRouter.shipped([UNKNOWN], space=STATIC.space)
    other = next(space for space in two_spaces.spaces if space != STATIC.space)
    centres = two_spaces._clusters[other].centres
    before = two_spaces.estimate(centres[:5], LENGTHS[:5], space=other).quality
    two_spaces.update([Outcome("p", "unheard-of", 1.0)], {"p": VECTORS[0]})
    assert (two_spaces.estimate(centres[:5], LENGTHS[:5], space=other).quality > before).all()
    two_spaces.update([Outcome("q", "unheard-of", 1.0)], {"q": centres[0]}, space=other)
    with pytest.raises(RouterError, match="expected vectors of shape"):
        two_spaces.update([Outcome("q", "unheard-of", 1.0)], {"q": centres[0]})


def test_a_run_goes_on_from_what_an_earlier_one_learned(tmp_path: Path) -> None:
    state = tmp_path / "prior"
    first = PriorRouter.shipped([UNKNOWN, SMOLLM], space=STATIC.space, state=state)
    for row, prompt in enumerate(PROMPTS):
        first.update([Outcome(prompt, "unheard-of", 1.0, 50, 200)], {prompt: VECTORS[row]})
    first.save(state)
    dearer = replace(UNKNOWN, output_usd_per_mtok=40.0)
    second = PriorRouter.shipped([SMOLLM, dearer], space=STATIC.space, state=state)
    assert second.version == first.version
    fresh = PriorRouter.shipped([dearer], space=STATIC.space)
    learned = second.estimate(VECTORS, LENGTHS)
    # The configuration's price, and what was learned on top of what that price lets expect.
    assert (learned.quality[:, 1] > fresh.estimate(VECTORS, LENGTHS).quality[:, 0] + 0.05).all()
    np.testing.assert_allclose(learned.output_tokens[:, 1], first.estimate(VECTORS, LENGTHS).output_tokens[:, 0])


def test_of_another_releases_prior_the_level_is_kept(tmp_path: Path) -> None:
    older = fitted(PriorRouter)
    older.add_candidate(UNKNOWN)
    vectors, _ = probe()
    for row, vector in enumerate(vectors):
        older.update([Outcome(f"p{row}", "unheard-of", 0.0)], {f"p{row}": vector})
    older.save(tmp_path / "prior")
    router = PriorRouter.shipped([UNKNOWN], space=STATIC.space, state=tmp_path / "prior")
    fresh = PriorRouter.shipped([UNKNOWN], space=STATIC.space)
    fallen = fresh.estimate(VECTORS, LENGTHS).quality - router.estimate(VECTORS, LENGTHS).quality
    assert (fallen > 0.05).all()


def test_a_damaged_state_is_told(tmp_path: Path) -> None:
    state = tmp_path / "prior"
    PriorRouter.shipped([UNKNOWN], space=STATIC.space).save(state)
    about = json.loads((state / "router.json").read_text())
    (state / "router.json").write_text(json.dumps(about | {"slot_names": ["a", "b", "c"]}))
    with pytest.raises(DataError, match=r"is damaged.*Remove it"):
        PriorRouter.shipped([UNKNOWN], space=STATIC.space, state=state)
    shutil.copy(Path(__file__), state / "router.safetensors")
    with pytest.raises(DataError, match="not a router that Atoll saved"):
        PriorRouter.shipped([UNKNOWN], space=STATIC.space, state=state)


def test_prices_are_blended_and_sizes_read() -> None:
    assert blended_price(UNKNOWN) == pytest.approx(0.75 * 1.0 + 0.25 * 4.0)
    assert size_billion(Candidate("x", "llama3.1:8b", "u")) == 8.0
    assert size_billion(SMOLLM) == 0.135
    assert size_billion(UNKNOWN) is None


def test_beliefs_without_feedback_are_the_prior() -> None:
    beliefs = Beliefs(3)
    slot = beliefs.add("a")
    prior = Prior(np.array([0.2, 0.5, 0.4]), 0.1, 5.0, np.array([10.0, 20.0, 15.0]))
    beliefs.set_prior(slot, prior)
    quality, std, tokens = beliefs.posterior([slot])
    np.testing.assert_allclose(quality[0], prior.quality)
    np.testing.assert_allclose(tokens[0], prior.output_tokens)
    assert (std >= 0.1).all()


def test_much_feedback_overrules_any_prior() -> None:
    beliefs = Beliefs(3)
    beliefs.set_prior(beliefs.add("a"), Prior(np.full(3, 0.9), 0.05, 20.0, np.full(3, 10.0)))
    for _ in range(3000):
        beliefs.learn(0, np.array([1.0, 0.0, 0.0]), 0.2, 100.0)
    quality, std, tokens = beliefs.posterior([0])
    assert quality[0, 0] == pytest.approx(0.2, abs=0.02)
    assert std[0, 0] < 0.02
    assert tokens[0, 0] == pytest.approx(100.0, rel=0.05)


def test_the_fitted_pool_is_the_known_one() -> None:
    router = fitted(PriorRouter)
    assert isinstance(router, PriorRouter)
    assert router.known_ == POOL
    assert router.spaces == (SPACE,)
    assert router.summary()["clusters"] > 1
