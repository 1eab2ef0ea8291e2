"""The pieces that the prior is fitted with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.routers.clusters import Clusters, find_clusters
from atoll.routers.guess import SkillCurves
from atoll.routers.monotone import MonotoneCurve
from atoll.routers.skills import fit_skills, sigmoid
from atoll.types import Candidate


def simulated(
    skill: np.ndarray, difficulty: np.ndarray, per_cluster: int, slope: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(len(difficulty)), per_cluster)
    slope = np.broadcast_to(slope, difficulty.shape)
    p = sigmoid(skill + difficulty[cluster][:, None] + slope[cluster][:, None] * (skill - skill.mean()))
    return (rng.random(p.shape) < p).astype(np.float32), cluster


def unknown(like: np.ndarray) -> np.ndarray:
    return np.full_like(like, np.nan)


def test_skills_and_difficulties_are_recovered() -> None:
    skill, difficulty = np.array([-1.0, 0.0, 1.5]), np.linspace(-1, 1, 8)
    quality, cluster = simulated(skill, difficulty, 400)
    found = fit_skills(quality, unknown(quality), cluster, np.zeros(len(cluster), int), 8, deviation_std=0.5)
    np.testing.assert_allclose(found.skill, skill, atol=0.2)
    np.testing.assert_allclose(found.difficulty, difficulty, atol=0.25)
    np.testing.assert_allclose(found.deviation, 0.0, atol=0.3)
    assert found.share.sum() == pytest.approx(1.0)


def test_sets_of_different_hardness_are_compared_through_the_model_they_share() -> None:
    """`good` was asked the easy set only, `fair` the hard one; raw means have them the wrong way round."""
    skill = np.array([0.0, -0.5, 0.5])  # shared, fair, good
    easy, cluster = simulated(skill, np.full(4, 1.5), 500)
    hard, _ = simulated(skill, np.full(4, -1.0), 500)
    easy[:, 1], hard[:, 2] = np.nan, np.nan
    quality = np.concatenate([easy, hard])
    dataset = np.repeat([0, 1], len(easy))
    found = fit_skills(quality, unknown(quality), np.tile(cluster, 2), dataset, 4, deviation_std=0.5)
    assert found.skill[2] - found.skill[1] == pytest.approx(1.0, abs=0.25)


def test_a_models_strength_in_a_cluster_is_found() -> None:
    skill, difficulty = np.zeros(6), np.zeros(4)
    quality, cluster = simulated(skill, difficulty, 400)
    quality[cluster == 2, 0] = 1.0
    found = fit_skills(quality, unknown(quality), cluster, np.zeros(len(cluster), int), 4, deviation_std=0.8)
    assert found.deviation[0].argmax() == 2
    assert found.deviation[0, 2] > 1.0


def test_clusters_in_which_skill_matters_more_are_found() -> None:
    skill = np.linspace(-1.5, 1.5, 12)
    quality, cluster = simulated(skill, np.zeros(3), 800, slope=np.array([-0.5, 0.0, 0.5]))
    found = fit_skills(quality, unknown(quality), cluster, np.zeros(len(cluster), int), 3, deviation_std=0.8)
    assert found.slope[0] < found.slope[1] < found.slope[2]
    assert found.slope[2] - found.slope[0] == pytest.approx(1.0, abs=0.35)


def test_a_model_without_outcomes_has_no_skill_and_a_cluster_without_any_the_mean_difficulty() -> None:
    quality, cluster = simulated(np.array([0.0, 1.0]), np.array([-1.0, 1.0]), 200)
    quality[:, 1] = np.nan
    found = fit_skills(quality, unknown(quality), cluster, np.zeros(len(cluster), int), 3, deviation_std=0.5)
    assert np.isnan(found.skill[1])
    assert np.isfinite(found.difficulty).all()
    assert found.difficulty[2] == pytest.approx(0.0, abs=0.1)


def test_lengths_are_split_into_models_and_clusters() -> None:
    quality, cluster = simulated(np.zeros(2), np.zeros(2), 50)
    tokens = np.array([100.0, 300.0]) * np.where(cluster == 1, 2.0, 1.0)[:, None]
    found = fit_skills(quality, tokens.astype(np.float32), cluster, np.zeros(len(cluster), int), 2, deviation_std=0.5)
    expected = np.exp(found.log_tokens[:, None] + found.cluster_log_tokens)
    np.testing.assert_allclose(expected, [[100, 200], [300, 600]], rtol=0.01)


points = st.lists(st.tuples(st.floats(-10, 10), st.floats(-3, 3)), min_size=2, max_size=30)


@given(points, st.floats(0.01, 1.0))
def test_a_curve_rises_everywhere_at_least_so_fast(points: list[tuple[float, float]], least_slope: float) -> None:
    curve = MonotoneCurve.fit([x for x, _ in points], [y for _, y in points], least_slope=least_slope)
    at = np.linspace(-15, 15, 200)
    values = np.array([curve(x) for x in at])
    assert (np.diff(values) >= least_slope * np.diff(at) * (1 - 1e-3) - 1e-6).all()


def test_a_rising_line_is_kept() -> None:
    curve = MonotoneCurve.fit([0, 1, 2], [0, 1, 3], least_slope=0.1)
    assert [curve(x) for x in (0, 0.5, 1, 2)] == pytest.approx([0, 0.5, 1, 3])
    assert curve.residual_std == pytest.approx(0.0, abs=1e-9)
    assert MonotoneCurve.from_json({**_as_json(curve)}) == curve


def _as_json(curve: MonotoneCurve) -> dict[str, object]:
    return {name: getattr(curve, name) for name in ("x", "y", "below", "above", "residual_std")}


def test_violators_are_pooled() -> None:
    curve = MonotoneCurve.fit([0, 1, 2, 3], [0, 2, 1, 3], least_slope=0.01)
    assert curve(1.5) == pytest.approx(1.5, abs=0.01)
    assert curve.residual_std > 0


def test_with_few_models_nothing_is_read_into_prices() -> None:
    two = [Candidate("a", "a", "u", input_usd_per_mtok=1.0), Candidate("b", "b", "u", input_usd_per_mtok=9.0)]
    curves = SkillCurves.fit(two, [0.0, 2.0], 1.0)
    assert curves.by_price is None
    assert curves.guess(two[1]).skill == 1.0


def blobs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    which = np.arange(300) % 3
    vectors = np.eye(8)[which] + 0.1 * rng.standard_normal((300, 8))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), which


def test_clusters_are_found_and_prompts_assigned() -> None:
    vectors, which = blobs()
    cluster = find_clusters(vectors, 3, seed=0)
    assert all(len(set(cluster[which == index])) == 1 for index in range(3))
    np.testing.assert_array_equal(cluster, find_clusters(vectors, 3, seed=0))
    memberships = Clusters.of_members(vectors, cluster, 3).memberships(vectors)
    np.testing.assert_allclose(memberships.sum(axis=1), 1.0)
    np.testing.assert_array_equal(memberships[:, :3].argmax(axis=1), cluster)
    assert np.median(memberships[:, 3]) == 0.0


def test_what_is_far_from_all_centres_belongs_to_none() -> None:
    vectors, _ = blobs()
    clusters = Clusters.of_members(vectors, find_clusters(vectors, 3, seed=0), 3)
    strange = np.eye(8, dtype=np.float32)[7:]
    assert clusters.memberships(strange)[0, 3] > 0.9
