"""What is CSCR's own: bands of cost and their loss, descriptors of any source, the lookup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.errors import DataError, RouterError
from atoll.routers.checks import CHEAP, POOL, QUALITY, SPACE, fitted, probe, regions, world
from atoll.routers.cost_bands import band_temperatures, bands_of, cost_banded_loss, scaled_costs
from atoll.routers.cscr import CSCRRouter, is_correct
from atoll.routers.descriptors import Descriptors, write_descriptors
from atoll.routers.registry import load_router


def loss_of(similarity: list[float], correct: list[bool], band: list[int], tau: list[float], gamma: float) -> float:
    m = len(similarity)
    costs = torch.linspace(0.0, 1.0, m)
    return float(
        cost_banded_loss(
            torch.tensor([similarity]),
            torch.tensor([correct]),
            torch.ones(1, m, dtype=torch.bool),
            costs,
            torch.tensor(band),
            torch.tensor(tau),
            gamma,
        )
    )


def test_plain_infonce_is_one_band_without_a_cost_term() -> None:
    expected = -np.log(np.exp(0.9 / 0.5) / (np.exp(0.9 / 0.5) + np.exp(0.1 / 0.5)))
    assert np.isclose(loss_of([0.9, 0.1], [True, False], [0, 0], [0.5], 0.0), expected)


def test_each_band_with_a_correct_model_counts_once_at_its_temperature() -> None:
    """Worked by hand: two bands, correct models in both, costs 0, 1/3, 2/3, 1 and gamma -0.2."""
    s, c = np.array([0.9, 0.1, 0.4, 0.2]), np.linspace(0, 1, 4)
    bands = []
    for positive, tau in ((0, 0.1), (2, 0.3)):
        bands.append(-np.log(np.exp(s[positive] / tau) / np.exp((s - 0.2 * c) / tau).sum()))
    got = loss_of(s.tolist(), [True, False, True, False], [0, 0, 1, 1], [0.1, 0.3], -0.2)
    assert np.isclose(got, np.mean(bands), rtol=1e-5)


def test_the_sign_decides_whether_dear_wrong_models_count_more() -> None:
    plus, zero, minus = (loss_of([0.5, 0.5], [True, False], [0, 0], [0.2], gamma) for gamma in (0.2, 0.0, -0.2))
    assert plus > zero > minus


def test_a_prompt_that_nobody_answers_teaches_nothing() -> None:
    assert loss_of([0.5, 0.5], [False, False], [0, 0], [0.2], 0.2) == 0.0


@pytest.mark.parametrize(("n_models", "n_bands"), [(1, 1), (3, 1), (4, 2), (8, 4), (28, 5)])
def test_bands_are_merged_until_each_holds_two_models(n_models: int, n_bands: int) -> None:
    band = bands_of(np.geomspace(0.01, 1.0, n_models), 5)
    assert len(np.unique(band)) == n_bands == band.max() + 1
    assert np.bincount(band).min() >= min(2, n_models)
    assert (np.diff(band) >= 0).all()


def test_models_of_one_cost_share_a_band_and_dear_bands_are_softer() -> None:
    costs = scaled_costs(np.array([1.0, 1.0, 1.0, 1.0, 3.0, 5.0]))
    band = bands_of(costs, 5)
    assert len(set(band[:4])) == 1
    assert (np.diff(band_temperatures(costs, band, 0.05, 0.25)) > 0).all()
    np.testing.assert_array_equal(scaled_costs(np.array([2.0, 2.0])), 0.0)


def test_correct_is_a_half_or_above_the_mean_of_soft_scores() -> None:
    np.testing.assert_array_equal(is_correct(np.array([[1, 0, np.nan]], dtype="f")), [[True, False, False]])
    np.testing.assert_array_equal(is_correct(np.array([[0.1, 0.2, 0.4]], dtype="f")), [[False, False, True]])


def file_of(path: Path, *more: str) -> Path:
    names = (*(each.name for each in POOL), *more)
    rng = np.random.default_rng(0)
    write_descriptors(path, Descriptors("perplexity", names, rng.standard_normal((len(names), 8))))
    return path


def test_descriptors_of_a_file_are_used_kept_and_known_for_later_models(tmp_path: Path) -> None:
    path = file_of(tmp_path / "d.safetensors", "late")
    router = fitted(lambda: CSCRRouter(descriptors=path))
    vectors, region = regions(100, seed=9)
    tokens = np.full(100, 100)
    best = router.score(vectors, tokens, 1.0).argmax(axis=1)
    assert QUALITY[region, best].mean() > QUALITY[region].mean() + 0.1
    outcomes, known = world()
    late = replace(CHEAP, name="late", model="late")
    router.add_candidate(late, [replace(each, candidate="late") for each in outcomes[:30]], known)
    before = router.score(vectors, tokens, 1.0)
    assert np.ptp(before[:, 3] - before[:, 0]) > 0
    router.save(tmp_path / "router")
    path.unlink()
    again = load_router(tmp_path / "router")
    np.testing.assert_allclose(again.score(vectors, tokens, 1.0), before)
    assert again.version == router.version


def test_a_file_without_one_of_the_models_is_told(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    write_descriptors(path, Descriptors("logit", ("cheap", "odd"), np.eye(2)))
    with pytest.raises(RouterError, match="strong"):
        fitted(lambda: CSCRRouter(descriptors=path))
    with pytest.raises(DataError, match="fingerprint"):
        fitted(lambda: CSCRRouter(descriptors=tmp_path / "nothing"))


def test_a_later_model_is_ranked_by_its_answers_near_the_probes() -> None:
    """It answers as `odd` does: where that is wrong it ranks low, without a new fit."""
    outcomes, vectors = world()
    late = replace(CHEAP, name="late", model="late")
    as_odd = [replace(each, candidate="late") for each in outcomes if each.candidate == "odd"]
    router = fitted(lambda: CSCRRouter(top_k=None))
    others = router.score(*probe(), 1.0)
    router.add_candidate(late, as_odd, vectors)
    similarity = router.score(*probe(), 1.0)
    np.testing.assert_allclose(similarity[:, :3], others, atol=1e-6)
    like = [np.corrcoef(similarity[:, 3], similarity[:, column])[0, 1] for column in range(3)]
    assert int(np.argmax(like)) == 2


def test_only_the_experts_that_were_looked_up_come_first() -> None:
    """Even where money is all, a far expert is behind the near ones."""
    router = fitted(lambda: CSCRRouter(top_k=1))
    every = fitted(lambda: CSCRRouter(top_k=None))
    nearest = every.score(*probe(), 1.0).argmax(axis=1)
    for preference in (0.0, 0.3, 1.0):
        np.testing.assert_array_equal(router.score(*probe(), preference).argmax(axis=1), nearest)
    cheapest = every.estimate(*probe()).cost_usd.argmin(axis=1)
    np.testing.assert_array_equal(every.score(*probe(), 0.0).argmax(axis=1), cheapest)


def test_no_sign_is_refused() -> None:
    outcomes, vectors = world()
    with pytest.raises(RouterError, match="negative_cost_sign"):
        CSCRRouter(negative_cost_sign=0).fit(outcomes, vectors, POOL, space=SPACE)
