"""Intervals cover, pairs are paired, seeds repeat."""

import time
from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import DataError
from atoll.routers.leaderboard.bootstrap import (
    Replicas,
    SeedSweep,
    bootstrap,
    compare,
    confidence_interval,
    paired_bootstrap,
    peak_metric,
    qnc_metric,
)


def sweep(rng: np.random.Generator, n: int = 200, *, gain: float = 0.0, rows: np.ndarray | None = None) -> SeedSweep:
    """Three settings: quality rises with cost, and by `gain` everywhere."""
    difficulty = rng.uniform(size=n)
    quality = np.stack([(difficulty < level + gain) for level in (0.7, 0.5, 0.3)]).astype(float)
    cost_usd = np.stack([np.full(n, cost) for cost in (4.0, 2.0, 1.0)])
    return SeedSweep(quality, cost_usd, np.full(n, 4.0), difficulty < 0.7, rows)


def test_the_value_is_that_of_the_prompts_themselves() -> None:
    # Qualities .5 and 1 over two prompts, at cost 1 of 4: x from .25 to 1 at .75.
    one = SeedSweep(np.array([[0.5, 1.0]]), np.ones((1, 2)), np.full(2, 4.0))
    assert bootstrap([one]).value == pytest.approx(0.75 * 0.75)
    # Replicas hold the first prompt twice, the second twice, or both.
    assert set(bootstrap([one]).replicas.round(6)) == {0.375, 0.5625, 0.75}
    # Two seeds: the mean of the two.
    other = replace(one, quality=np.array([[0.5, 0.0]]))
    assert bootstrap([one, other]).value == pytest.approx((0.5625 + 0.1875) / 2)


def test_an_interval_has_the_width_that_theory_gives() -> None:
    # The peak of one setting is a mean of coins: standard error sqrt(.25 / 400) = .025, 1.96 of them each side.
    quality = np.repeat([[0.0, 1.0]], 200, axis=0).reshape(1, -1)
    one = SeedSweep(quality, np.ones_like(quality), np.ones(400))
    interval = confidence_interval(bootstrap([one], metric=peak_metric, n_replicas=5000))
    assert interval.value == 0.5
    assert interval.low == pytest.approx(0.5 - 0.049, abs=0.006)
    assert interval.high == pytest.approx(0.5 + 0.049, abs=0.006)


def test_pairing_sees_a_difference_that_two_intervals_would_hide() -> None:
    rng = np.random.default_rng(0)
    theirs = sweep(rng)
    # One prompt in twenty gets better, none worse.
    better = theirs.quality.copy()
    better[:, ::20] = 1.0
    ours = replace(theirs, quality=better)
    found = paired_bootstrap([ours], [theirs])
    assert found.is_better
    assert not found.is_worse
    assert found.p_value < 0.01
    apart = [confidence_interval(bootstrap([each])) for each in (ours, theirs)]
    assert apart[0].low < apart[1].high
    back = paired_bootstrap([theirs], [ours])
    assert back.is_worse
    assert back.difference == pytest.approx(-found.difference)


def test_a_router_does_not_differ_from_itself() -> None:
    one = sweep(np.random.default_rng(1))
    again = SeedSweep(one.quality[::-1], one.cost_usd[::-1], one.best_cost_usd, one.best_quality)
    found = paired_bootstrap([one], [again])
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_p_values_of_two_alike_routers_are_spread_evenly() -> None:
    p_values = []
    for trial in range(60):
        rng = np.random.default_rng(trial)
        p_values.append(paired_bootstrap([sweep(rng)], [sweep(rng)], n_replicas=200).p_value)
    # Of 60 under no difference, 3 fall below .05 on average; 10 or more would happen once in a thousand times.
    assert sum(p < 0.05 for p in p_values) < 10
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.15)


def test_one_prompt_in_many_seeds_counts_once() -> None:
    one = sweep(np.random.default_rng(2), rows=np.arange(200))
    alone = confidence_interval(bootstrap([one]))
    five_times = confidence_interval(bootstrap([one] * 5))
    # Five looks at the same prompts tell no more than one; five fresh test parts do.
    assert five_times.high - five_times.low == pytest.approx(alone.high - alone.low, rel=0.1)
    apart = confidence_interval(bootstrap([replace(one, prompt_rows=np.arange(200) + 200 * at) for at in range(5)]))
    assert apart.high - apart.low < 0.75 * (alone.high - alone.low)


def test_seeds_are_drawn_too() -> None:
    # Within a seed all prompts are alike, so all that varies is which seeds are drawn.
    seeds = [SeedSweep(np.full((1, 9), level), np.ones((1, 9)), np.ones(9)) for level in (0.2, 0.4, 0.9)]
    interval = confidence_interval(bootstrap(seeds, metric=peak_metric))
    assert interval.value == pytest.approx(0.5)
    assert interval.low < 0.25
    assert interval.high > 0.8


def test_replicas_repeat_for_a_seed_and_change_with_it() -> None:
    one = sweep(np.random.default_rng(3))
    assert np.array_equal(bootstrap([one], seed=5).replicas, bootstrap([one], seed=5).replicas)
    assert not np.array_equal(bootstrap([one], seed=5).replicas, bootstrap([one], seed=6).replicas)


def test_a_quality_never_reached_is_infinitely_dear_and_compares() -> None:
    one = sweep(np.random.default_rng(4))
    poor = replace(one, quality=np.zeros_like(one.quality))
    found = paired_bootstrap([one], [poor], metric=qnc_metric)
    assert found.difference == -np.inf
    assert found.high == -np.inf
    assert paired_bootstrap([poor], [poor], metric=qnc_metric).p_value == 1.0
    assert confidence_interval(bootstrap([poor, one], metric=qnc_metric)).value == np.inf


def test_unknown_costs_give_unknown_intervals() -> None:
    one = sweep(np.random.default_rng(5))
    unknown = replace(one, cost_usd=np.full_like(one.cost_usd, np.nan))
    interval = confidence_interval(bootstrap([unknown]))
    assert np.isnan([interval.value, interval.low, interval.high]).all()
    assert np.isnan(paired_bootstrap([unknown], [one]).p_value)
    assert bootstrap([unknown], metric=peak_metric).value == bootstrap([one], metric=peak_metric).value


def test_a_thousand_replicas_of_three_thousand_prompts_take_well_under_a_second() -> None:
    one = sweep(np.random.default_rng(6), n=3000)
    many = SeedSweep(
        np.repeat(one.quality, 10, axis=0), np.repeat(one.cost_usd, 10, axis=0), one.best_cost_usd, one.best_quality
    )
    start = time.process_time()
    bootstrap([many], n_replicas=1000)
    assert time.process_time() - start < 1.0


def test_what_cannot_be_paired_is_refused() -> None:
    one = sweep(np.random.default_rng(7), rows=np.arange(200))
    with pytest.raises(DataError, match="different prompts"):
        paired_bootstrap([one], [replace(one, prompt_rows=np.arange(200) + 1)])
    with pytest.raises(DataError, match="cannot be paired"):
        paired_bootstrap([one], [one, one])
    with pytest.raises(DataError, match="not pairs"):
        compare(Replicas(0.0, np.zeros(3)), Replicas(0.0, np.zeros(4)))
    with pytest.raises(DataError, match="two replicas"):
        bootstrap([])
    with pytest.raises(DataError, match=r"\(L, n\)"):
        SeedSweep(np.ones((2, 3)), np.ones((2, 4)), np.ones(3))
    with pytest.raises(DataError, match="best_cost_usd"):
        SeedSweep(np.ones((2, 3)), np.ones((2, 3)), np.ones(4))
    with pytest.raises(DataError, match="level"):
        confidence_interval(bootstrap([one], n_replicas=10), level=95.0)
