"""What is reef's own, beside the checks that all routers pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import RouterError
from atoll.routers.checks import CHEAP, DIMENSION, POOL, QUALITY, SPACE, STRONG, fitted, regions, world
from atoll.routers.features import Landmarks, Lengths
from atoll.routers.interactions import Parts, fit_interactions, group_effects
from atoll.routers.reef import ReefRouter
from atoll.routers.stacking import contenders, stack
from atoll.routers.table import OutcomeTable
from atoll.types import Candidate, Outcome


def table_of(n: int = 400, seed: int = 0) -> tuple[OutcomeTable, np.ndarray]:
    vectors, region = regions(n, seed=seed)
    rng = np.random.default_rng(seed)
    quality = (rng.random((n, 3)) < QUALITY[region]).astype(np.float32)
    tokens = rng.integers(50, 500, (n, 3)).astype(np.float32)
    return OutcomeTable(vectors, quality, tokens), region


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_landmarks": 0}, "n_landmarks=0 is not allowed"),
        ({"width": 0.0}, "width=0.0"),
        ({"n_folds": -1}, "n_folds=-1"),
    ],
)
def test_parameters_out_of_range_are_refused(parameters: dict[str, float], message: str) -> None:
    outcomes, vectors = world()
    with pytest.raises(RouterError, match=message):
        ReefRouter(**parameters).fit(outcomes, vectors, POOL, space=SPACE)  # type: ignore[arg-type]


def test_task_labels_tell_what_embeddings_hide() -> None:
    """Prompts of two tasks lie in two directions; labels make clear that these directions matter, with few prompts."""
    table, region = table_of(120)
    tasks = tuple(f"task {each}" for each in region)
    truth = QUALITY[regions(400, seed=9)[1]]
    vectors, _ = regions(400, seed=9)
    lengths = np.full(400, 100, dtype=np.int64)
    labelled = ReefRouter().fit_table(replace(table, tasks=tasks), POOL, space=SPACE)
    error = np.abs(labelled.estimate(vectors, lengths).quality - truth).mean()
    assert error < 0.12


@pytest.mark.parametrize("labels", [None, ("the same",) * 400, tuple(f"task {row}" for row in range(400))])
def test_labels_that_are_no_tasks_are_passed_over(labels: tuple[str, ...] | None) -> None:
    table, _ = table_of()
    router = ReefRouter().fit_table(replace(table, tasks=labels), POOL, space=SPACE)
    vectors, region = regions(80, seed=9)
    estimates = router.estimate(vectors, np.full(80, 100, dtype=np.int64))
    np.testing.assert_allclose(estimates.quality[region == 0].mean(axis=0), QUALITY[0], atol=0.2)


def test_some_prompts_may_lack_a_label() -> None:
    table, region = table_of()
    tasks = tuple(None if row % 3 == 0 else f"task {each}" for row, each in enumerate(region))
    router = ReefRouter().fit_table(replace(table, tasks=tasks), POOL, space=SPACE)
    assert np.isfinite(router.estimate(table.embeddings, np.full(400, 100, dtype=np.int64)).quality).all()


def test_the_length_of_a_prompt_tells_how_difficult_it_is() -> None:
    """Everybody fails on long prompts, wherever they lie."""
    table, _ = table_of()
    rng = np.random.default_rng(5)
    lengths = np.where(rng.random(400) < 0.5, 50, 5000).astype(np.float32)
    quality = np.where(lengths[:, None] > 1000, 0.0, table.quality).astype(np.float32)
    router = ReefRouter().fit_table(replace(table, quality=quality, prompt_tokens=lengths), POOL, space=SPACE)
    at = table.embeddings[:1]
    short, long, unknown_far = (router.estimate(at, np.array([n])).quality[0, 1] for n in (50, 5000, 10**7))
    assert short > long + 0.2
    assert unknown_far == pytest.approx(long, abs=1e-6)


def new_model_world(n: int, seed: int) -> tuple[list[Outcome], dict[str, np.ndarray]]:
    """A model that is like `odd`: good where `cheap` is not."""
    vectors, region = regions(n, seed=seed)
    rng = np.random.default_rng(seed)
    truth = np.where(region == 0, 0.1, 0.7)
    outcomes = [Outcome(f"n{row}", "late", float(rng.random() < truth[row]), 100, 60) for row in range(n)]
    return outcomes, {f"n{row}": vector for row, vector in enumerate(vectors)}


def test_fifty_outcomes_admit_a_new_model() -> None:
    """It is told apart by region at once: as a mixture of the known ones, which a level alone could not."""
    router = fitted(lambda: ReefRouter(seed=1))
    late = replace(CHEAP, name="late", model="late")
    router.add_candidate(late, *new_model_world(50, seed=3))
    vectors, region = regions(200, seed=9)
    estimates = router.estimate(vectors, np.full(200, 100, dtype=np.int64))
    assert estimates.quality[region == 0, 3].mean() < 0.35
    assert estimates.quality[region != 0, 3].mean() > 0.5


def test_more_outcomes_of_a_new_model_are_nearer_the_truth() -> None:
    vectors, region = regions(200, seed=9)
    truth = np.where(region == 0, 0.1, 0.7)
    errors = []
    for n in (5, 50, 800):
        router = fitted(lambda: ReefRouter(seed=1))
        router.add_candidate(replace(CHEAP, name="late", model="late"), *new_model_world(n, seed=4))
        estimated = router.estimate(vectors, np.full(200, 100, dtype=np.int64)).quality[:, 3]
        errors.append(np.abs(estimated - truth).mean())
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.1


def test_feedback_counts_by_the_inverse_of_its_propensity() -> None:
    """Where good answers were logged ten times as often as bad ones, the truth is in between, not at the top.

    Both groups of prompts lie in one place, so nothing but the propensity tells that one is rare.
    """
    vectors, region = regions(400, seed=20)
    there = np.flatnonzero(region == 2)
    rng = np.random.default_rng(0)

    def taught(is_logged: bool) -> float:
        router = fitted(lambda: ReefRouter(seed=1))
        for row in np.tile(there, 4):
            is_good = rng.random() < 0.5
            propensity = 1.0 if is_good else 0.1
            if rng.random() < propensity:
                outcome = Outcome("x", "strong", float(is_good), propensity=propensity if is_logged else None)
                router.update([outcome], {"x": vectors[row]})
        return float(router.estimate(vectors[there], np.full(len(there), 100)).quality[:, 1].mean())

    assert taught(is_logged=True) < taught(is_logged=False) - 0.15
    assert taught(is_logged=True) == pytest.approx(0.5, abs=0.2)


def test_a_model_that_silently_changed_is_known_anew() -> None:
    router = fitted(lambda: ReefRouter(seed=1))
    vectors, _ = regions(240, seed=20)
    lengths = np.full(240, 100, dtype=np.int64)
    for quality, n in ((1.0, 3000), (0.0, 1500)):
        for row in range(n):
            router.update([Outcome("x", "cheap", quality)], {"x": vectors[row % 240]})
    assert router.estimate(vectors, lengths).quality[:, 0].mean() < 0.25


def test_one_prompt_has_the_features_it_has_in_a_batch() -> None:
    lengths = Lengths.fit(np.array([10.0, 50.0, 80.0, 1000.0, np.nan]))
    many = np.array([1.0, 60.0, np.nan, 5000.0])
    batch = lengths.features(many)
    for row, value in enumerate(many):
        np.testing.assert_allclose(lengths.features(np.array([value]))[0], batch[row])
    assert (Lengths.fit(None).features(many) == 0).all()


def test_landmarks_make_near_prompts_alike() -> None:
    vectors, region = regions(200, seed=3)
    features = Landmarks.fit(vectors, 32, 5.0, seed=0).features(vectors)
    kernel = features @ features.T
    same = region[:, None] == region
    assert kernel[same].mean() > 2 * kernel[~same].mean()
    apart = ~np.eye(200, dtype=bool)
    assert np.corrcoef(kernel[apart], np.exp(5.0 * (vectors @ vectors.T - 1.0))[apart])[0, 1] > 0.97


def test_a_specialist_keeps_what_sets_it_apart_and_a_generalist_is_the_same_everywhere() -> None:
    rng = np.random.default_rng(0)
    group = np.arange(600) % 6
    specialist = np.where(group == 0, 0.95, 0.2)
    truth = np.stack([specialist, np.full(600, 0.6), np.full(600, 0.5)], axis=1)
    quality = (rng.random((600, 3)) < truth).astype(np.float32)
    effects = group_effects(Parts.of(quality), np.eye(6)[group])
    apart = effects - effects.mean(axis=1, keepdims=True)
    assert apart[0, 0] - apart[1:, 0].mean() > 0.35
    between_generalists = effects[:, 1] - effects[:, 2]
    assert between_generalists.std() < (quality[:, 1] - quality[:, 2]).reshape(-1, 6).mean(axis=0).std()


def test_sparse_cells_are_filled_with_what_is_predicted_without_them() -> None:
    """With three in ten cells, interactions are found nearly as large as with all."""
    table, region = table_of(1200)
    features = np.eye(4)[region] + 0.01
    full, _ = fit_interactions(Parts.of(table.quality), features)
    hidden = np.where(np.random.default_rng(1).random(table.quality.shape) < 0.7, np.nan, table.quality)
    sparse, _ = fit_interactions(Parts.of(hidden), features)
    spread = [np.ptp(weights[:, 0] - weights.mean(axis=1)) for weights in (full, sparse)]
    assert spread[1] > 0.6 * spread[0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 6))
def test_stacking_weights_are_shares(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    quality = rng.random((20, 3))
    quality[rng.random(quality.shape) < 0.2] = np.nan
    weights = stack([rng.random((20, 3)) for _ in range(n)], quality)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()


def test_stacking_prefers_what_tells_models_apart() -> None:
    """The second estimate has a smaller error, but only because it knows how difficult prompts are."""
    rng = np.random.default_rng(0)
    difficulty, apart = rng.standard_normal((500, 1)), 0.3 * rng.standard_normal((500, 3))
    quality = difficulty + apart
    weights = stack([apart, np.repeat(difficulty, 3, axis=1) + 0.5 * rng.standard_normal((500, 3))], quality)
    assert weights[0] > 0.7


def test_contenders_are_those_that_no_cheaper_model_clearly_beats() -> None:
    quality = np.repeat(np.array([[0.9, 0.5, 0.52, 0.1]]), 400, axis=0)
    chosen = contenders(quality, np.array([10.0, 1.0, 2.0, 5.0]))
    assert chosen.tolist() == [0, 1, 2]


def test_prices_change_without_a_new_fit() -> None:
    router = fitted(lambda: ReefRouter(seed=1))
    vectors, _ = regions(4, seed=9)
    before = router.estimate(vectors, np.full(4, 100))
    router.set_candidates([CHEAP, replace(STRONG, input_usd_per_mtok=20.0, output_usd_per_mtok=100.0), POOL[2]])
    after = router.estimate(vectors, np.full(4, 100))
    np.testing.assert_allclose(after.cost_usd[:, 1], 10 * before.cost_usd[:, 1])
    np.testing.assert_allclose(after.quality, before.quality)


def test_a_big_table_of_many_models_needs_no_memory_of_prompts(tmp_path: object) -> None:
    """What is saved does not grow with the prompts."""
    pool = [Candidate(f"m{i}", f"m{i}", "u", output_usd_per_mtok=1.0 + i) for i in range(12)]
    sizes = []
    for n in (1100, 4400):
        rng = np.random.default_rng(n)
        vectors = rng.standard_normal((n, DIMENSION)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        table = OutcomeTable(vectors, rng.random((n, 12)).astype(np.float32), np.full((n, 12), 9.0, dtype=np.float32))
        router = ReefRouter(n_folds=0).fit_table(table, pool, space=SPACE)
        _, arrays = router._state()
        sizes.append(sum(array.nbytes for array in arrays.values()))
    assert sizes[1] < 1.1 * sizes[0]
