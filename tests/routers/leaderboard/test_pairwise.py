"""RouteLLM's metrics, falling curves among them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.routers.leaderboard.metrics import apgr, cpt, pgr, strong_share

WEAK, STRONG = 0.6, 0.8
points = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=10)


def test_pgr_by_hand() -> None:
    assert pgr(0.65, WEAK, STRONG) == pytest.approx(0.25)
    assert pgr(0.85, WEAK, STRONG) == pytest.approx(1.25)
    with pytest.raises(DataError, match="no gap"):
        pgr(0.5, 0.5, 0.5)


def test_a_coin_has_an_apgr_of_one_half_and_needs_as_many_calls_as_gap() -> None:
    share = np.linspace(0, 1, 11)
    quality = WEAK + share * (STRONG - WEAK)
    assert apgr(share, quality, WEAK, STRONG) == pytest.approx(0.5)
    assert cpt(share, quality, WEAK, STRONG, 0.5) == pytest.approx(0.5)
    assert cpt(share, quality, WEAK, STRONG, 0.8) == pytest.approx(0.8)


def test_all_weak_and_all_strong_belong_to_every_curve() -> None:
    # One point at a quarter of the calls recovers .75 of the gap. Triangles and trapezoids: .25 * .75 / 2 +
    # .75 * (.75 + 1) / 2 = .09375 + .65625.
    share, quality = np.array([0.25]), np.array([0.75])
    assert apgr(share, quality, WEAK, STRONG) == pytest.approx(0.75)
    assert cpt(share, quality, WEAK, STRONG, 0.5) == pytest.approx(0.25 * 0.5 / 0.75)
    assert cpt(share, quality, WEAK, STRONG, 1.0) == pytest.approx(1.0)
    assert cpt(share, quality, WEAK, STRONG, 1.5) == np.inf
    assert cpt(share, quality, WEAK, STRONG, 0.0) == 0.0


def test_where_a_curve_falls_the_first_crossing_counts() -> None:
    # PGR 0, 1, 0, 1 at shares 0, .2, .6, 1: half is first reached at .1. Interpolating shares over sorted PGR would say
    # otherwise. Area: .1 + .2 + .2 = .5.
    share, quality = np.array([0.6, 0.2]), np.array([0.6, 0.8])
    assert cpt(share, quality, WEAK, STRONG, 0.5) == pytest.approx(0.1)
    assert apgr(share, quality, WEAK, STRONG) == pytest.approx(0.5)


def test_batches_are_measured_row_by_row() -> None:
    share, quality = np.array([[0.25], [0.5]]), np.array([[0.75], [0.7]])
    assert apgr(share, quality, WEAK, STRONG).tolist() == pytest.approx([0.75, 0.5])
    assert cpt(share, quality, WEAK, STRONG, 0.5).tolist() == pytest.approx([1 / 6, 0.5])


def test_strong_share() -> None:
    assert strong_share(np.array([[1, 0, 1, 1], [0, 0, 0, 0]]), strong=1).tolist() == [0.75, 0.0]


@given(points, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_higher_target_never_takes_fewer_calls(curve: list[tuple[float, float]], one: float, two: float) -> None:
    share, quality = (np.array(values) for values in zip(*curve, strict=True))
    low, high = sorted((one, two))
    few, many = (float(cpt(share, quality, WEAK, STRONG, target)) for target in (low, high))
    assert 0.0 <= few <= many + 1e-9 <= 1.0 + 2e-9


@given(points)
def test_apgr_stays_within_what_the_points_recover(curve: list[tuple[float, float]]) -> None:
    share, quality = (np.array(values) for values in zip(*curve, strict=True))
    recovered = [0.0, 1.0, *pgr(quality, WEAK, STRONG)]
    assert min(recovered) - 1e-9 <= apgr(share, quality, WEAK, STRONG) <= max(recovered) + 1e-9


def test_what_is_no_share_is_refused() -> None:
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        apgr(np.array([50.0]), np.array([0.7]), WEAK, STRONG)
    with pytest.raises(DataError, match="one shape"):
        apgr(np.array([0.5]), np.array([0.7, 0.8]), WEAK, STRONG)
