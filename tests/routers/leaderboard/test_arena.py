"""RouterArena's metrics, its published scores among them; relative metrics and payback."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.routers.leaderboard.metrics import (
    arena_score,
    category_rates,
    difficulty_gap,
    flip_rate,
    gain_at_best,
    gap_at_oracle,
    opt_acc,
    opt_cost,
    opt_sel,
    rci,
    robustness,
    sa_bep,
    sa_cr,
    utility_flip,
)

# Four prompts, three models: cheap, middling, dear. Nobody gets the last prompt right.
QUALITY = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.5, 0.0]])
COST_USD = np.tile([1.0, 2.0, 4.0], (4, 1))


@pytest.mark.parametrize(
    ("accuracy_percent", "usd_per_1k", "published"),
    [
        (79.69, 0.27, 77.63),
        (78.14, 0.27, 76.28),
        (79.76, 0.70, 76.21),
        (78.59, 0.48, 75.85),
        (78.14, 0.40, 75.75),
        (76.32, 0.94, 72.82),
        (73.96, 10.02, 64.32),
        (67.21, 2.06, 63.87),
        (61.62, 4.83, 57.56),
        (32.01, 0.07, 33.75),
    ],
)
def test_ten_published_rows_of_the_arena(accuracy_percent: float, usd_per_1k: float, published: float) -> None:
    assert 100.0 * arena_score(accuracy_percent / 100.0, usd_per_1k) == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize(
    ("accuracy_percent", "usd_per_1k", "published"),
    [(76.40, 0.18, 75.27), (75.84, 0.22, 74.55), (74.72, 0.13, 74.13), (71.23, 0.06, 71.60), (66.88, 0.15, 66.89)],
)
def test_cheap_rows_of_the_arena_match_within_the_cent_that_their_cost_is_rounded_to(
    accuracy_percent: float, usd_per_1k: float, published: float
) -> None:
    dearer, cheaper = (100.0 * arena_score(accuracy_percent / 100.0, usd_per_1k + by) for by in (0.005, -0.005))
    assert dearer - 0.01 <= published <= cheaper + 0.01


@given(st.floats(0.0, 1.0), st.floats(0.001, 500.0), st.floats(1.0, 3.0))
def test_arena_scores_lie_in_their_bounds_and_fall_with_cost(accuracy: float, usd: float, times: float) -> None:
    score = arena_score(accuracy, usd)
    assert 0.0 <= score <= 1.0
    assert arena_score(accuracy, usd * times) <= score + 1e-12
    assert arena_score(min(1.0, accuracy * times), usd) >= score - 1e-12


def test_an_arena_score_at_its_ends() -> None:
    assert arena_score(1.0, 0.0) == 1.0
    assert arena_score(0.9, 1000.0) == 0.0
    assert arena_score(0.0, 1000.0) == 0.0
    with pytest.raises(DataError, match=r"give 0\.72"):
        arena_score(72.0, 1.0)


def test_optimality_by_hand() -> None:
    chosen = np.array([0, 2, 0, 1])
    # Three prompts can be solved. First: cheapest right. Second: right, but the middling would do. Third: wrong.
    assert opt_sel(chosen, QUALITY, COST_USD) == pytest.approx(1 / 3)
    # Right twice: needed 1 + 2 of the 1 + 4 spent. The cheap wrong third pick saves nothing.
    assert opt_cost(chosen, QUALITY, COST_USD) == pytest.approx(3 / 5)
    # Two of the oracle's three; the half-right last prompt is not in the set.
    assert opt_acc(chosen, QUALITY, COST_USD) == pytest.approx(2 / 3)


def test_the_oracle_is_optimal() -> None:
    oracle = np.array([0, 1, 2, 0])
    for metric in (opt_sel, opt_cost, opt_acc):
        assert metric(oracle, QUALITY, COST_USD) == 1.0


def test_optimality_of_a_batch_is_that_of_each() -> None:
    batch = np.array([[0, 2, 0, 1], [0, 1, 2, 0]])
    assert opt_sel(batch, QUALITY, COST_USD).tolist() == pytest.approx([1 / 3, 1.0])
    assert opt_cost(batch, QUALITY, COST_USD).tolist() == pytest.approx([3 / 5, 1.0])


def test_of_equally_cheap_right_models_either_is_optimal() -> None:
    quality, cost_usd = np.array([[1.0, 1.0]]), np.array([[2.0, 2.0]])
    assert opt_sel(np.array([1]), quality, cost_usd) == 1.0


def test_where_nobody_is_right_nothing_is_optimal() -> None:
    quality, cost_usd, chosen = np.zeros((1, 2)), np.ones((1, 2)), np.array([0])
    assert np.isnan([metric(chosen, quality, cost_usd) for metric in (opt_sel, opt_cost, opt_acc)]).all()
    # Half right is right enough where one says so.
    assert opt_sel(np.array([1]), np.array([[0.0, 0.6]]), cost_usd, correct_from=0.5) == 1.0


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_optimality_lies_in_its_bounds(chosen: list[int]) -> None:
    for metric in (opt_sel, opt_cost, opt_acc):
        value = float(metric(np.array(chosen), QUALITY, COST_USD))
        assert np.isnan(value) or 0.0 <= value <= 1.0


def test_robustness_counts_flips_and_utility_flip_those_that_matter() -> None:
    before, after = np.array([0, 1, 2, 0]), np.array([2, 1, 1, 0])
    # First and third prompt flip; on the first all models are equally good.
    assert robustness(before, after) == 0.5
    assert flip_rate(before, after) == 0.5
    assert utility_flip(before, after, QUALITY) == 0.25
    assert utility_flip(before, after, QUALITY, tolerance=1.0) == 0.0
    with pytest.raises(DataError, match="twice"):
        robustness(before, after[:2])


def test_gap_and_gain_by_hand() -> None:
    # The router: 1 + 1 + 0 + .5 = 2.5; the oracle 3.5; the best single model (dear) 3; middling 2.5.
    chosen = np.array([0, 1, 0, 1])
    assert gap_at_oracle(chosen, QUALITY) == pytest.approx(1 - 2.5 / 3.5)
    assert gain_at_best(chosen, QUALITY) == pytest.approx(2.5 / 3 - 1)
    assert gain_at_best(chosen, QUALITY, best=1) == pytest.approx(0.0)


def test_collapse_by_hand() -> None:
    # Always dear: right by necessity on the third prompt only. On the others a cheaper model is as good, or better.
    assert rci(np.full(4, 2), QUALITY, COST_USD) == 0.75
    # The oracle, cheapest among equals.
    assert rci(np.array([0, 1, 2, 1]), QUALITY, COST_USD) == 0.0
    # A worse cheap pick is no sound choice either.
    assert rci(np.array([0, 0, 2, 1]), QUALITY, COST_USD) == 0.25


def test_labels_pay_back() -> None:
    # 10 USD of labels, a query saves .03 - .01 = .02: 500 queries. Over 1,000: (10 + 10) / 30.
    assert sa_bep(10.0, 0.03, 0.01) == pytest.approx(500, abs=1)
    assert sa_bep(10.0, 4.0, 1.0) == 4.0  # 3.33 rounded up
    assert sa_cr(10.0, 0.03, 0.01, 1000) == pytest.approx(2 / 3)
    assert sa_bep(10.0, 0.01, 0.01) == np.inf
    assert sa_bep(10.0, 0.01, np.inf) == np.inf
    with pytest.raises(DataError, match="zero or more"):
        sa_bep(-1.0, 0.01, 0.01)


def test_rates_by_category() -> None:
    rates = category_rates(["maths", "code", "maths", "code", "maths"], np.array([True, False, True, True, False]))
    assert rates == {"maths": pytest.approx(2 / 3), "code": 0.5}
    assert list(rates) == ["maths", "code"]
    with pytest.raises(DataError, match="one flag"):
        category_rates(["maths"], np.array([True, False]))


def test_a_router_that_sees_the_topic_alone_has_no_difficulty_gap() -> None:
    is_easy = np.array([True, True, False, False])
    assert difficulty_gap(is_easy, np.array([True, True, True, True])) == 0.0
    assert difficulty_gap(is_easy, np.array([False, False, True, True])) == 1.0
    assert difficulty_gap(is_easy, np.array([False, True, True, True])) == 0.5
    with pytest.raises(DataError, match="easy and hard"):
        difficulty_gap(np.array([True]), np.array([True]))
