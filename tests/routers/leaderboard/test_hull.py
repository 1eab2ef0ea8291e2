"""Hulls, AIQ and the zero router."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.routers.leaderboard.metrics import Curve, aiq, hull, mixed, nauc, zero_router

points = st.lists(
    st.tuples(st.integers(1, 1000).map(lambda cost: cost / 100), st.integers(0, 100).map(lambda share: share / 100)),
    min_size=1,
    max_size=12,
)


def curve(*cost_and_quality: tuple[float, float]) -> Curve:
    cost, quality = zip(*cost_and_quality, strict=True)
    return Curve(np.array(cost), np.array(quality))


def corners(swept: Curve) -> list[tuple[float, float]]:
    found = hull(swept)
    return list(dict.fromkeys(zip(found.cost_usd.tolist(), found.quality.tolist(), strict=True)))


def test_a_hull_leaves_out_what_lies_below_a_line_or_falls() -> None:
    # (2, .3) is below the line from (1, .2) to (3, .8); (5, .7) is dearer and worse; (3, .1) is below (3, .8).
    assert corners(curve((5.0, 0.7), (3.0, 0.8), (2.0, 0.3), (1.0, 0.2), (3.0, 0.1))) == [(1.0, 0.2), (3.0, 0.8)]


def test_the_middle_of_three_points_in_one_line_is_no_corner() -> None:
    assert corners(curve((1.0, 0.25), (2.0, 0.5), (3.0, 0.75))) == [(1.0, 0.25), (3.0, 0.75)]


def test_of_equally_cheap_points_the_best_starts_the_hull() -> None:
    assert corners(curve((1.0, 0.5), (1.0, 0.2), (2.0, 0.6))) == [(1.0, 0.5), (2.0, 0.6)]


def test_aiq_by_hand() -> None:
    # Over [1, 5]: the line from .2 to .8 over [1, 3] is .5 * 2 = 1; flat .8 over [3, 5] is 1.6. 2.6 / 4 = .65.
    swept = curve((1.0, 0.2), (2.0, 0.3), (3.0, 0.8), (5.0, 0.7))
    assert aiq(swept, 1.0, 5.0) == pytest.approx(0.65)
    # Over [2, 3] alone the line rises from .5 to .8.
    assert aiq(swept, 2.0, 3.0) == pytest.approx(0.65)
    # Over [0, 4]: nothing left of 1, then 1 + .8. 1.8 / 4 = .45. Beyond every point it is flat.
    assert aiq(swept, 0.0, 4.0) == pytest.approx(0.45)
    assert aiq(swept, 8.0, 9.0) == pytest.approx(0.8)


def test_a_batch_of_hulls_is_the_hull_of_each() -> None:
    rng = np.random.default_rng(0)
    batch = Curve(rng.uniform(1, 10, (3, 4, 9)), rng.uniform(0, 1, (3, 4, 9)))
    together = hull(batch)
    assert together.cost_usd.shape == (3, 4, 9)
    for at in np.ndindex(3, 4):
        alone = hull(Curve(batch.cost_usd[at], batch.quality[at]))
        np.testing.assert_array_equal(together.cost_usd[at], alone.cost_usd)
        np.testing.assert_array_equal(together.quality[at], alone.quality)
        assert aiq(batch, 1.0, 9.0)[at] == pytest.approx(float(aiq(alone, 1.0, 9.0)))


@given(points)
def test_a_hull_is_above_every_point_concave_and_of_its_points(swept: list[tuple[float, float]]) -> None:
    found = corners(curve(*swept))
    assert set(found) <= set(swept)
    cost, quality = zip(*found, strict=True)
    heights = np.interp([point[0] for point in swept], cost, quality)
    assert (heights >= np.array([point[1] for point in swept]) - 1e-9).all()
    slopes = np.diff(quality) / np.diff(cost)
    assert (slopes > 0).all()
    assert (np.diff(slopes) < 1e-9).all()


@given(points)
def test_a_hull_of_a_hull_is_itself(swept: list[tuple[float, float]]) -> None:
    found = corners(curve(*swept))
    assert corners(curve(*found)) == found


@given(points, st.tuples(st.floats(1.0, 10.0), st.floats(0.0, 1.0, allow_subnormal=False)))
def test_another_point_never_lowers_aiq(swept: list[tuple[float, float]], more: tuple[float, float]) -> None:
    assert aiq(curve(*swept, more), 0.5, 8.0) >= aiq(curve(*swept), 0.5, 8.0) - 1e-9


def test_the_zero_router_is_the_hull_of_the_single_models() -> None:
    # Means: (1, .5), (2, .5), (4, 1.): the second is no better than the first, and dearer.
    quality = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    cost_usd = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 5.0]])
    zero = zero_router(quality, cost_usd)
    assert corners(zero) == [(1.0, 0.5), (4.0, 1.0)]
    # As coins it reaches the line: over x from .25 to 1 the mean height is .75. .75 * .75 = .5625.
    assert nauc(mixed(zero, 1000), 4.0) == pytest.approx(0.5625, abs=1e-3)
    assert aiq(zero, 0.0, 4.0) == pytest.approx(0.5625)
    # Without coins there are only its corners: .5 until x = 1.
    assert nauc(zero, 4.0) == pytest.approx(0.375)


def test_mixed_points_lie_on_the_lines() -> None:
    between = mixed(curve((1.0, 0.2), (3.0, 0.8)), 2)
    assert between.cost_usd.tolist() == [1.0, 2.0, 3.0]
    assert between.quality.tolist() == [0.2, 0.5, 0.8]
    assert len(mixed(curve((1.0, 0.2)))) == 1


def test_without_costs_there_is_no_aiq() -> None:
    assert np.isnan(aiq(Curve(np.array([np.nan, np.nan]), np.array([0.5, 0.7])), 0.0, 1.0))


@pytest.mark.parametrize("interval", [(1.0, 1.0), (2.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_an_empty_interval_is_refused(interval: tuple[float, float]) -> None:
    with pytest.raises(DataError, match="interval"):
        aiq(curve((1.0, 0.5)), *interval)
