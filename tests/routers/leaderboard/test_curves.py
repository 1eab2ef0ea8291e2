"""Curves and what is read off them, by hand and by properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.routers.leaderboard.metrics import (
    Curve,
    best_single,
    curve_of,
    nauc,
    operating_point,
    peak,
    qnc,
    single_models,
)

# Two prompts, three models: cheap, middling, best.
QUALITY = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
COST_USD = np.array([[1.0, 2.0, 8.0], [1.0, 4.0, 8.0]])

shares = st.floats(0.0, 1.0, allow_subnormal=False)
points = st.lists(st.tuples(st.floats(0.001, 10.0), shares), min_size=1, max_size=12)


def curve(*cost_and_quality: tuple[float, float]) -> Curve:
    cost, quality = zip(*cost_and_quality, strict=True)
    return Curve(np.array(cost), np.array(quality))


def test_a_curve_is_the_mean_over_prompts_of_what_each_setting_chose() -> None:
    # First setting: the best for both. Second: middling, then cheap: costs (2 + 1) / 2, both right.
    swept = curve_of(np.array([[2, 2], [1, 0]]), QUALITY, COST_USD)
    assert swept.cost_usd.tolist() == [8.0, 1.5]
    assert swept.quality.tolist() == [1.0, 1.0]


def test_single_models_are_column_means_and_the_best_is_found() -> None:
    singles = single_models(QUALITY, COST_USD)
    assert singles.cost_usd.tolist() == [1.0, 3.0, 8.0]
    assert singles.quality.tolist() == [0.5, 0.5, 1.0]
    assert best_single(QUALITY, COST_USD) == 2


def test_of_equally_good_single_models_the_cheapest_is_the_best() -> None:
    assert best_single(QUALITY[:, :2], COST_USD[:, :2]) == 0
    assert best_single(QUALITY[:, :2], COST_USD[:, 1::-1]) == 1
    assert best_single(QUALITY[:, :2], np.full((2, 2), np.nan)) == 0


def test_nauc_by_hand() -> None:
    # Best costs 4, so x = 0.25, 0.5, 1.5. Nothing left of 0.25; 0.4 from 0.25 to 0.5; 0.8 from 0.5 to 1; the last
    # point lies beyond 1: 0.25 * 0.4 + 0.5 * 0.8 = 0.5.
    assert nauc(curve((6.0, 0.9), (2.0, 0.8), (1.0, 0.4)), 4.0) == pytest.approx(0.5)


def test_nauc_keeps_the_best_so_far_where_a_curve_falls() -> None:
    # x = 0.25 at 0.8, x = 0.5 at 0.6: the worse, dearer point changes nothing. 0.75 * 0.8 = 0.6.
    assert nauc(curve((2.0, 0.6), (1.0, 0.8)), 4.0) == pytest.approx(0.6)


def test_nauc_of_the_best_single_model_alone_is_zero_and_of_a_free_one_its_quality() -> None:
    assert nauc(curve((4.0, 0.9)), 4.0) == 0.0
    assert nauc(curve((0.0, 0.9)), 4.0) == pytest.approx(0.9)


def test_a_batch_is_measured_row_by_row() -> None:
    rows = [curve((6.0, 0.9), (2.0, 0.8), (1.0, 0.4)), curve((3.0, 0.5), (1.0, 0.3), (2.0, 0.7))]
    batch = Curve(np.stack([row.cost_usd for row in rows]), np.stack([row.quality for row in rows]))
    best_cost, best_quality = np.array([4.0, 3.0]), np.array([0.8, 0.6])
    each = zip(rows, best_cost, best_quality, strict=True)
    expected = [(nauc(row, c), peak(row), qnc(row, q, c)) for row, c, q in each]
    together = nauc(batch, best_cost), peak(batch), qnc(batch, best_quality, best_cost)
    np.testing.assert_allclose(np.stack(together, axis=1), expected)


@given(points)
def test_nauc_lies_between_zero_and_the_peak(swept: list[tuple[float, float]]) -> None:
    area = nauc(curve(*swept), 1.0)
    assert 0.0 <= area <= peak(curve(*swept)) + 1e-12


@given(points, st.tuples(st.floats(0.001, 10.0), shares))
def test_another_setting_never_lowers_nauc(swept: list[tuple[float, float]], more: tuple[float, float]) -> None:
    assert nauc(curve(*swept, more), 2.0) >= nauc(curve(*swept), 2.0) - 1e-12


@given(points, st.randoms(use_true_random=False), st.floats(0.01, 100.0))
def test_nauc_and_qnc_depend_on_neither_order_nor_currency(swept: list[tuple[float, float]], random, rate) -> None:
    shuffled = [(cost * rate, quality) for cost, quality in random.sample(swept, len(swept))]
    assert nauc(curve(*shuffled), 2.0 * rate) == pytest.approx(float(nauc(curve(*swept), 2.0)))
    assert qnc(curve(*shuffled), 0.5, 2.0 * rate) == pytest.approx(float(qnc(curve(*swept), 0.5, 2.0)))


def test_qnc_is_the_cheapest_point_of_the_best_models_quality() -> None:
    swept = curve((6.0, 0.9), (2.0, 0.8), (1.0, 0.4))
    assert qnc(swept, 0.8, 4.0) == 0.5
    assert qnc(swept, 0.81, 4.0) == 1.5
    assert qnc(swept, 0.95, 4.0) == np.inf


def test_qnc_of_always_the_best_model_is_one_whatever_the_rounding() -> None:
    assert qnc(curve((4.0, 0.1 + 0.2 - 1e-16)), 0.1 + 0.2, 4.0) == 1.0


def test_the_operating_point_is_the_cheapest_that_reaches_the_target() -> None:
    validation = curve((6.0, 0.9), (2.0, 0.8), (3.0, 0.85), (1.0, 0.4))
    assert operating_point(validation, 0.8) == 1
    assert operating_point(validation, 0.82) == 2
    assert operating_point(validation, 0.99) == 0  # none does: the best there is


def test_of_equal_operating_points_the_cheaper_then_the_better_is_taken() -> None:
    assert operating_point(curve((3.0, 0.5), (2.0, 0.5)), 0.9) == 1
    assert operating_point(curve((2.0, 0.5), (2.0, 0.6)), 0.4) == 1


def test_without_costs_the_peak_is_known_and_areas_are_not() -> None:
    swept = Curve(np.array([np.nan, np.nan]), np.array([0.5, 0.7]))
    assert peak(swept) == 0.7
    assert operating_point(swept, 0.5) == 1
    assert np.isnan(nauc(swept, 1.0))
    assert np.isnan(qnc(swept, 0.5, 1.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Curve(np.ones(2), np.ones(3)), "one shape"),
        (lambda: Curve(np.ones(0), np.ones(0)), "L >= 1"),
        (lambda: nauc(curve((1.0, 1.0)), 0.0), "above zero"),
        (lambda: curve_of(np.array([[3, 0]]), QUALITY, COST_USD), "outside the table's 3 models"),
        (lambda: curve_of(np.array([[-1, 0]]), QUALITY, COST_USD), "outside the table's 3 models"),
        (lambda: curve_of(np.array([[0]]), QUALITY, COST_USD), "2 prompts"),
        (lambda: single_models(np.empty((0, 2)), np.empty((0, 2))), r"\(n, m\)"),
        (lambda: operating_point(Curve(np.ones((2, 2)), np.ones((2, 2))), 0.5), "one curve"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, message: str) -> None:
    with pytest.raises(DataError, match=message):
        wrong()
