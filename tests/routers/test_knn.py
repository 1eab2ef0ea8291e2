"""What is the kNN router's own, beside the checks that all routers pass."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import DataError, RouterError
from atoll.routers import knn
from atoll.routers.additive import adjusted_means
from atoll.routers.checks import DIMENSION, POOL, SPACE, fitted, regions, world
from atoll.routers.kernel import Kernel
from atoll.routers.kernel_cv import cross_validate, picks
from atoll.routers.knn import KNNRouter
from atoll.routers.nearest import EXACT_UP_TO, NearestPrompts
from atoll.routers.table import OutcomeTable
from atoll.types import Outcome


def unit(rows: int, seed: int, dimension: int = DIMENSION) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(knn).failed == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"k": 0}, "k=0 is not allowed; give a whole number from 1 to 100000 or None"),
        ({"k": 2.5}, "k=2.5"),
        ({"recent_capacity": 0}, "recent_capacity=0"),
        ({"seed": True}, "seed=True"),
    ],
)
def test_parameters_out_of_range(parameters: dict[str, float], message: str) -> None:
    outcomes, vectors = world()
    with pytest.raises(RouterError, match=message):
        KNNRouter(**parameters).fit(outcomes, vectors, POOL, space=SPACE)  # type: ignore[arg-type]


def test_cross_validation_finds_the_size_of_the_regions() -> None:
    """Sixty prompts share a region: too few neighbours are noise, many more are of other regions."""
    router = fitted(KNNRouter)
    assert isinstance(router, KNNRouter)
    assert 20 <= router.kernel_.k <= 80
    assert router.validation_ is not None
    assert router.validation_.squared_error < 0.75 * router.validation_.squared_error_of_means


def test_copies_of_a_prompt_are_not_its_neighbours() -> None:
    """Every prompt comes twice with the same random outcome: k = 1 would look perfect."""
    vectors = np.repeat(unit(100, 0), 2, axis=0)
    quality = np.repeat(np.random.default_rng(1).integers(0, 2, (100, 1)), 2, axis=0).astype(np.float32)
    table = OutcomeTable(vectors, quality, np.full_like(quality, np.nan))
    means = quality.mean(axis=0, dtype=np.float64)
    found = cross_validate(table, means, NearestPrompts(vectors, 10), rows=np.arange(200))
    assert found.squared_error > 0.9 * found.squared_error_of_means


def test_picks_compare_with_single_models_and_chance() -> None:
    router = fitted(KNNRouter)
    assert isinstance(router, KNNRouter)
    assert router.validation_ is not None
    outcomes, vectors = world()
    table = OutcomeTable.from_outcomes(outcomes, vectors, [candidate.name for candidate in POOL])
    found = picks(router.validation_, table, router.quality_means_)
    assert found.random < found.best_single < found.oracle
    assert abs(found.router - 0.9) < 0.05


def test_memory_of_updates_is_bounded_and_the_oldest_is_forgotten() -> None:
    outcomes, vectors = world()
    router = KNNRouter(recent_capacity=50).fit(outcomes, vectors, POOL, space=SPACE)
    new, _ = regions(200, seed=30)
    for row, vector in enumerate(new):
        router.update([Outcome(f"u{row}", "cheap", 1.0)], {f"u{row}": vector})
    assert router.summary()["prompts"] == 240 + 50
    assert router._nearest.recent() == pytest.approx(new[150:])


def test_a_slot_that_is_used_again_forgets_all_candidates() -> None:
    outcomes, vectors = world()
    router = KNNRouter(k=1, recent_capacity=1).fit(outcomes, vectors, POOL, space=SPACE)
    strange = np.zeros(DIMENSION, dtype=np.float32)
    strange[-1] = 1.0
    router.update([Outcome("a", "odd", 0.0, completion_tokens=9000)], {"a": strange})
    before = router.estimate_one(strange, 10)
    router.update([Outcome("b", "cheap", 1.0)], {"b": strange})
    assert router.estimate_one(strange, 10)[2].output_tokens < before[2].output_tokens
    assert router.estimate_one(strange, 10)[0].quality > before[0].quality


def test_a_large_index_finds_nearly_the_same_neighbours_and_is_restored_exactly(tmp_path: Path) -> None:
    n = EXACT_UP_TO + 1000
    centres = unit(60, 3, 32)
    vectors = centres[np.arange(n) % 60] + 0.1 * np.random.default_rng(4).standard_normal((n, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = NearestPrompts(vectors, 10)
    assert index.centroids is not None
    similarity, rows = index.search(vectors[:50], 20)
    exact = np.argsort(-(vectors[:50] @ vectors.T), axis=1)[:, :20]
    shared = np.mean([len(set(a) & set(b)) for a, b in zip(rows.tolist(), exact.tolist(), strict=True)])
    assert shared > 18
    assert (np.diff(similarity, axis=1) <= 0).all()
    np.testing.assert_allclose(index.fixed(), vectors)
    again = NearestPrompts(index.fixed(), 10, centroids=index.centroids)
    np.testing.assert_array_equal(again.search(vectors[:50], 20)[1], rows)


def test_recent_prompts_are_found_beside_the_fixed_ones() -> None:
    index = NearestPrompts(unit(30, 5), 4)
    new = unit(6, 6)
    assert index.add(new).tolist() == [30, 31, 32, 33, 30, 31]
    similarity, rows = index.search(new[5:6], 3)
    assert rows[0, 0] == 31
    assert similarity[0, 0] == pytest.approx(1.0)


def test_weights_fall_with_distance_and_all_of_them_far_away() -> None:
    kernel = Kernel(k=3, bandwidth=0.1, prior_strength=1.0, near_similarity=0.5)
    near = kernel.weights(np.array([0.8, 0.7, 0.6], dtype=np.float32))
    assert near == pytest.approx([1.0, np.exp(-1), np.exp(-2)], rel=1e-5)
    far = kernel.weights(np.array([0.3, 0.2, 0.1], dtype=np.float32))
    assert far == pytest.approx(near * np.exp(-2), rel=1e-5)


def test_means_of_candidates_that_were_asked_different_prompts_are_comparable() -> None:
    """`b` is better, but was asked the hard prompts; the raw means say the opposite."""
    rng = np.random.default_rng(0)
    difficulty = np.repeat([0.3, -0.3], 100)
    values = 0.5 + difficulty[:, None] + np.array([0.0, 0.1, 0.0])
    known = np.ones_like(values)
    known[100:, 0] = rng.random(100) < 0.05
    known[:100, 1] = rng.random(100) < 0.05
    raw = (known * values).sum(axis=0) / known.sum(axis=0)
    assert raw[0] > raw[1]
    adjusted = adjusted_means(values, known)
    assert adjusted[1] > adjusted[0]
    np.testing.assert_allclose(adjusted_means(values, np.ones_like(values)), values.mean(axis=0))
    assert np.isnan(adjusted_means(values, known * [1, 1, 0])[2])


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    router = fitted(KNNRouter)
    router.save(tmp_path / "router")
    text = (tmp_path / "router" / "router.json").read_text()
    (tmp_path / "router" / "router.json").write_text(text.replace('"kernel"', '"colonel"'))
    with pytest.raises(DataError, match=r"is damaged .*kernel.*Make it anew: atoll fit knn"):
        KNNRouter.load(tmp_path / "router")
    (tmp_path / "router" / "router.json").write_text(text.replace('"knn"', '"oracle"'))
    with pytest.raises(DataError, match="is a 'oracle' router, not 'knn'"):
        KNNRouter.load(tmp_path / "router")
