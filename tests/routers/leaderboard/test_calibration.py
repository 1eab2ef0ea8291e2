"""Calibration of predicted quality, fit of predicted lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.routers.leaderboard.metrics import brier, ece, ece_per_model, reliability, token_r2

shares = st.floats(0.0, 1.0)
pairs = st.lists(st.tuples(shares, shares), min_size=1, max_size=40)


def test_ece_by_hand() -> None:
    # Two bins. Lower: predicted .1 and .3 (mean .2), actual 0 and 1 (mean .5): off by .3, half of the cells.
    # Upper: predicted .8 and .8, actual 1 and 1: off by .2. .5 * .3 + .5 * .2 = .25.
    predicted, actual = np.array([0.1, 0.3, 0.8, 0.8]), np.array([0.0, 1.0, 1.0, 1.0])
    assert ece(predicted, actual, n_bins=2) == pytest.approx(0.25)
    diagram = reliability(predicted, actual, n_bins=2)
    assert diagram.predicted.tolist() == pytest.approx([0.2, 0.8])
    assert diagram.actual.tolist() == pytest.approx([0.5, 1.0])
    assert diagram.count.tolist() == [2, 2]


def test_empty_bins_are_left_out_and_one_belongs_to_the_last() -> None:
    diagram = reliability(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert diagram.predicted.tolist() == [0.0, 1.0]
    assert diagram.ece == 0.0


def test_brier_by_hand() -> None:
    # (.5 - 1)² = .25 and (.2 - 0)² = .04: mean .145.
    assert brier(np.array([0.5, 0.2]), np.array([1.0, 0.0])) == pytest.approx(0.145)


def test_errors_of_opposite_sign_cancel_over_all_cells_but_not_per_model() -> None:
    predicted, actual = np.full((10, 2), 0.5), np.tile([0.0, 1.0], (10, 1))
    assert ece(predicted, actual) == pytest.approx(0.0)
    assert ece_per_model(predicted, actual).tolist() == pytest.approx([0.5, 0.5])


@given(pairs)
def test_calibration_lies_in_its_bounds(cells: list[tuple[float, float]]) -> None:
    predicted, actual = (np.array(values) for values in zip(*cells, strict=True))
    assert 0.0 <= ece(predicted, actual) <= 1.0
    assert abs(predicted.mean() - actual.mean()) - 1e-9 <= ece(predicted, actual)
    # The Brier score is never below the squared error of any bin's mean.
    assert ece(predicted, actual) ** 2 <= brier(predicted, actual) + 1e-9


@given(pairs, st.randoms(use_true_random=False))
def test_calibration_does_not_depend_on_order(cells: list[tuple[float, float]], random) -> None:
    predicted, actual = (np.array(values) for values in zip(*cells, strict=True))
    shuffled = [np.array(values) for values in zip(*random.sample(cells, len(cells)), strict=True)]
    assert ece(*shuffled) == pytest.approx(ece(predicted, actual))


def test_unknown_cells_are_left_out() -> None:
    predicted, actual = np.array([0.5, 0.9, np.nan]), np.array([1.0, np.nan, 0.0])
    assert brier(predicted, actual) == pytest.approx(0.25)
    assert ece(predicted, actual) == pytest.approx(0.5)
    nothing = np.array([np.nan])
    assert np.isnan([brier(nothing, nothing), ece(nothing, nothing)]).all()


def test_token_r2_by_hand() -> None:
    # First model: actual 100, 200, 300 (spread 20,000), off by 10 each: 1 - 300 / 20,000 = .985.
    # Second: predicted its mean: 0. Third: always as long: does not count. Mean .4925.
    actual = np.array([[100.0, 10.0, 7.0], [200.0, 30.0, 7.0], [300.0, 20.0, 7.0]])
    predicted = np.array([[110.0, 20.0, 9.0], [190.0, 20.0, 9.0], [310.0, 20.0, 9.0]])
    assert token_r2(predicted, actual) == pytest.approx(0.4925)


def test_token_r2_leaves_unknown_lengths_out() -> None:
    actual = np.array([[100.0], [200.0], [np.nan]])
    assert token_r2(np.array([[100.0], [200.0], [5.0]]), actual) == 1.0
    assert np.isnan(token_r2(actual, np.full((3, 1), np.nan)))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(DataError, match=r"must lie in \[0, 1\]"):
        ece(np.array([1.2]), np.array([1.0]))
    with pytest.raises(DataError, match="do not match"):
        brier(np.array([1.0]), np.array([1.0, 0.0]))
    with pytest.raises(DataError, match="too few"):
        ece(np.array([1.0]), np.array([1.0]), n_bins=0)
    with pytest.raises(DataError, match="one shape"):
        token_r2(np.ones(3), np.ones(3))
