"""What every router must do: one list of checks, as scikit-learn has for its estimators.

A new router is tested by being given to `check_router`'s list:

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_router(check):
        check(lambda: MyRouter(seed=0))

Each check takes a factory of unfitted routers with a fixed seed, and asserts. The world they are asked about has four
regions of prompts and three models: `cheap` is good in the first region only, `strong` everywhere, `odd` where `cheap`
is not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, RouterError
from atoll.routers.base import Estimates, Router
from atoll.routers.decision import decide
from atoll.routers.registry import load_router, router_class
from atoll.routers.table import OutcomeTable
from atoll.types import Candidate, Outcome, Preference

RouterFactory = Callable[[], Router]
Check = Callable[[RouterFactory], None]

SPACE: Final = "checks-16"
DIMENSION: Final = 16
N_PROMPTS: Final = 240
N_REGIONS: Final = 4
CHEAP: Final = Candidate("cheap", "cheap", "u", input_usd_per_mtok=0.1, output_usd_per_mtok=0.4)
STRONG: Final = Candidate("strong", "strong", "u", input_usd_per_mtok=2.0, output_usd_per_mtok=10.0)
ODD: Final = Candidate("odd", "odd", "u", input_usd_per_mtok=0.5, output_usd_per_mtok=1.0)
POOL: Final = (CHEAP, STRONG, ODD)
QUALITY: Final = np.array([[0.9, 0.9, 0.1], [0.2, 0.9, 0.7], [0.2, 0.9, 0.7], [0.2, 0.9, 0.7]])
"""By region and candidate."""
OUTPUT_TOKENS: Final = np.array([[100, 200, 50], [300, 400, 50], [100, 200, 50], [100, 200, 50]])


def regions(n_prompts: int = N_PROMPTS, seed: int = 1) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Unit vectors of shape (n_prompts, DIMENSION) around four directions, and which."""
    rng = np.random.default_rng(seed)
    region = np.arange(n_prompts) % N_REGIONS
    vectors = np.eye(DIMENSION)[region] + 0.12 * rng.standard_normal((n_prompts, DIMENSION))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32), region


def world(seed: int = 1, known_share: float = 1.0) -> tuple[list[Outcome], dict[str, npt.NDArray[np.float32]]]:
    """Outcomes (correct or not) and vectors; `known_share` of the cells are looked at."""
    vectors, region = regions(seed=seed)
    rng = np.random.default_rng(seed + 100)
    outcomes = []
    for row in range(len(vectors)):
        for column, candidate in enumerate(POOL):
            quality = float(rng.random() < QUALITY[region[row], column])
            tokens = int(OUTPUT_TOKENS[region[row], column] + rng.integers(-5, 6))
            if rng.random() < known_share:
                outcomes.append(Outcome(f"p{row}", candidate.name, quality, 100, tokens))
    return outcomes, {f"p{row}": vector for row, vector in enumerate(vectors)}


def fitted(make: RouterFactory, known_share: float = 1.0) -> Router:
    outcomes, vectors = world(known_share=known_share)
    return make().fit(outcomes, vectors, POOL, space=SPACE)


def probe() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    vectors, _ = regions(40, seed=9)
    return vectors, np.full(len(vectors), 100, dtype=np.int64)


def assert_same(one: Estimates, other: Estimates) -> None:
    for field in ("quality", "quality_std", "output_tokens", "cost_usd"):
        np.testing.assert_allclose(getattr(one, field), getattr(other, field), rtol=1e-6, atol=1e-9, err_msg=field)


def check_fit_returns_self_and_sets_what_was_learned(make: RouterFactory) -> None:
    outcomes, vectors = world()
    router = make()
    assert router.fit(outcomes, vectors, POOL, space=SPACE) is router
    assert router.candidates_ == POOL
    assert router.space_ == SPACE
    assert router.spaces[0] == SPACE
    assert router.version
    assert router_class(router.name) is type(router)


def check_shapes_and_ranges(make: RouterFactory) -> None:
    router = fitted(make)
    vectors, prompt_tokens = probe()
    for n in (1, len(vectors)):
        estimates = router.estimate(vectors[:n], prompt_tokens[:n])
        for field in ("quality", "quality_std", "output_tokens", "cost_usd"):
            array = getattr(estimates, field)
            assert array.shape == (n, len(POOL)), field
            assert array.dtype == np.float64, field
            assert np.isfinite(array).all(), field
            assert (array >= 0).all(), field
        assert (estimates.quality <= 1).all()
    assert router.estimate(vectors[:0], prompt_tokens[:0]).quality.shape == (0, len(POOL))


def check_one_prompt_is_estimated_as_in_a_batch(make: RouterFactory) -> None:
    router = fitted(make)
    vectors, prompt_tokens = probe()
    batch = router.estimate(vectors, prompt_tokens)
    for row in range(5):
        for column, estimate in enumerate(router.estimate_one(vectors[row], int(prompt_tokens[row]))):
            assert estimate.candidate == POOL[column].name
            np.testing.assert_allclose(estimate.quality, batch.quality[row, column], rtol=1e-5)
            np.testing.assert_allclose(estimate.cost_usd, batch.cost_usd[row, column], rtol=1e-5)


def check_cost_is_price_times_tokens(make: RouterFactory) -> None:
    router = fitted(make)
    vectors, _ = probe()
    prompt_tokens = np.arange(len(vectors), dtype=np.int64) * 1000
    estimates = router.estimate(vectors, prompt_tokens)
    for column, candidate in enumerate(POOL):
        expected = (
            candidate.input_usd_per_mtok * prompt_tokens
            + candidate.output_usd_per_mtok * estimates.output_tokens[:, column]
        ) / 1e6
        np.testing.assert_allclose(estimates.cost_usd[:, column], expected)


def check_it_learns_who_is_good_where(make: RouterFactory) -> None:
    """Averages over a region come near the truth, for quality and for tokens."""
    router = fitted(make)
    vectors, region = regions(200, seed=9)
    estimates = router.estimate(vectors, np.full(len(vectors), 100, dtype=np.int64))
    np.testing.assert_allclose(estimates.quality.mean(axis=0), QUALITY.mean(axis=0), atol=0.15)
    if not router.is_contextual:
        return
    for index in range(N_REGIONS):
        mean = estimates.quality[region == index].mean(axis=0)
        np.testing.assert_allclose(mean, QUALITY[index], atol=0.2)
    assert estimates.output_tokens[region == 1, 0].mean() > 1.5 * estimates.output_tokens[region == 2, 0].mean()


def check_decisions_follow_the_preference(make: RouterFactory) -> None:
    """At 1 the strong model answers; lower, the cheap one where it is as good; cost and quality fall together."""
    router = fitted(make)
    if router.is_policy:
        return
    vectors, region = regions(80, seed=9)
    rows = [router.estimate_one(vector, 100) for vector in vectors]
    previous = np.inf, np.inf
    for quality_weight in (1.0, 0.75, 0.5, 0.25, 0.0):
        preference = Preference(quality_weight)
        chosen = [decide(row, preference, router=router.name, router_version=router.version).candidate for row in rows]
        picked = [next(each for each in row if each.candidate == name) for row, name in zip(rows, chosen, strict=True)]
        cost, quality = (sum(each.cost_usd for each in picked), sum(each.quality for each in picked))
        assert cost <= previous[0]
        assert quality <= previous[1] + 1e-9
        previous = cost, quality
        if quality_weight == 0.5 and router.is_contextual:
            assert sum(name == "cheap" for name, where in zip(chosen, region, strict=True) if where == 0) >= 15


def check_the_same_seed_gives_the_same_router(make: RouterFactory) -> None:
    one, other = fitted(make), fitted(make)
    assert one.version == other.version
    assert_same(one.estimate(*probe()), other.estimate(*probe()))


def check_save_and_load(make: RouterFactory) -> None:
    router = fitted(make)
    vectors, _ = probe()
    router.update([Outcome("new", "odd", 1.0, 100, 70)], {"new": vectors[0]})
    router.add_candidate(replace(CHEAP, name="late", model="late"))
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder) / "router", Path(folder) / "router.safetensors"):
            router.save(path)
            router.save(path)
            again = load_router(path)
            assert type(again) is type(router)
            assert again.version == router.version
            assert again.space_ == router.space_
            assert again.candidates_ == router.candidates_
            assert_same(router.estimate(*probe()), again.estimate(*probe()))
            more = [Outcome("more", "cheap", 0.0, 100, 90)]
            assert_same(
                load_router(path).update(more, {"more": vectors[1]}).estimate(*probe()),
                again.update(more, {"more": vectors[1]}).estimate(*probe()),
            )


def check_it_loads_nothing_but_its_own_files(make: RouterFactory) -> None:
    router = fitted(make)
    with tempfile.TemporaryDirectory() as folder:
        precious = Path(folder) / "precious"
        precious.mkdir()
        (precious / "thesis.txt").write_text("years of work")
        for broken in (precious, precious / "thesis.txt", Path(folder) / "nothing"):
            _assert_raises(DataError, lambda broken=broken: type(router).load(broken))  # type: ignore[misc]
        _assert_raises(DataError, lambda: router.save(precious))
        assert (precious / "thesis.txt").read_text() == "years of work"


def check_a_new_candidate_leaves_the_others_alone(make: RouterFactory) -> None:
    router = fitted(make)
    before = router.estimate(*probe())
    late = replace(CHEAP, name="late", model="late", quality_prior=0.42)
    assert router.add_candidate(late) is router
    assert router.candidates_ == (*POOL, late)
    after = router.estimate(*probe())
    for field in ("quality", "quality_std", "output_tokens", "cost_usd"):
        others = getattr(after, field)[:, : len(POOL)]
        np.testing.assert_allclose(getattr(before, field), others, rtol=1e-5, err_msg=field)
    assert abs(after.quality[:, 3].mean() - 0.42) < 0.15
    _assert_raises(RouterError, lambda: router.add_candidate(late))


def check_a_new_candidate_can_come_with_outcomes(make: RouterFactory) -> None:
    outcomes, vectors = world()
    late = replace(CHEAP, name="late", model="late")
    as_late = [replace(outcome, candidate="late") for outcome in outcomes if outcome.candidate == "strong"]
    router = fitted(make).add_candidate(late, as_late, vectors)
    estimates = router.estimate(*probe())
    assert abs(estimates.quality[:, 3].mean() - estimates.quality[:, 1].mean()) < 0.15


def check_update_moves_towards_outcomes(make: RouterFactory) -> None:
    """Many bad answers of the strong model in one region: worse there, surer, and a new version."""
    router = fitted(make)
    vectors, region = regions(400, seed=20)
    there = np.flatnonzero(region == 2)[:60]
    at = vectors[there[:1]], np.array([100], dtype=np.int64)
    before, version = router.estimate(*at), router.version
    for row in there:
        outcome = Outcome(f"u{row}", "strong", 0.0, 100, 500, propensity=0.5)
        assert router.update([outcome], {f"u{row}": vectors[row]}) is router
    after = router.estimate(*at)
    assert after.quality[0, 1] < before.quality[0, 1] - 0.15
    assert after.output_tokens[0, 1] > before.output_tokens[0, 1]
    assert router.version != version


def check_update_with_nothing_changes_nothing(make: RouterFactory) -> None:
    router = fitted(make)
    before, version = router.estimate(*probe()), router.version
    router.update([], {})
    assert router.version == version
    assert_same(before, router.estimate(*probe()))


def check_unknown_quality_is_not_zero(make: RouterFactory) -> None:
    """An outcome with tokens but no quality says nothing about quality."""
    router = fitted(make)
    vectors, _ = probe()
    before = router.estimate(*probe())
    for row in range(len(vectors)):
        router.update([Outcome(f"u{row}", "strong", None, 100, 210)], {f"u{row}": vectors[row]})
    after = router.estimate(*probe())
    np.testing.assert_allclose(after.quality.mean(axis=0), before.quality.mean(axis=0), atol=0.1)


def check_sparse_outcomes(make: RouterFactory) -> None:
    """A third of the matrix is enough to find out who is good where."""
    router = fitted(make, known_share=0.33)
    vectors, region = regions(200, seed=9)
    estimates = router.estimate(vectors, np.full(len(vectors), 100, dtype=np.int64))
    np.testing.assert_allclose(estimates.quality.mean(axis=0), QUALITY.mean(axis=0), atol=0.2)
    if not router.is_contextual:
        return
    for index in range(N_REGIONS):
        np.testing.assert_allclose(estimates.quality[region == index].mean(axis=0), QUALITY[index], atol=0.3)


def check_a_candidate_without_outcomes(make: RouterFactory) -> None:
    outcomes, vectors = world()
    known = [outcome for outcome in outcomes if outcome.candidate != "odd"]
    estimates = make().fit(known, vectors, POOL, space=SPACE).estimate(*probe())
    assert np.isfinite(estimates.quality).all()
    assert (estimates.quality_std[:, 2] > estimates.quality_std[:, 1]).all()


def check_outcomes_without_tokens(make: RouterFactory) -> None:
    outcomes, vectors = world()
    bare = [replace(outcome, completion_tokens=None, prompt_tokens=None) for outcome in outcomes]
    estimates = make().fit(bare, vectors, POOL, space=SPACE).estimate(*probe())
    assert (estimates.output_tokens > 0).all()
    assert np.isfinite(estimates.cost_usd).all()


def check_far_from_everything_the_means_are_told(make: RouterFactory) -> None:
    router = fitted(make)
    strange = np.zeros((1, DIMENSION), dtype=np.float32)
    strange[0, DIMENSION - 1] = 1.0
    estimates = router.estimate(strange, np.array([100], dtype=np.int64))
    np.testing.assert_allclose(estimates.quality[0], QUALITY.mean(axis=0), atol=0.2)
    assert (estimates.quality_std[0] >= router.estimate(*probe()).quality_std.min(axis=0)).all()


def check_the_pool_can_be_replaced(make: RouterFactory) -> None:
    """Other order, other prices, one gone, one new; knowledge of the one gone is kept."""
    router = fitted(make)
    before = router.estimate(*probe())
    dear = replace(STRONG, name="openai/strong", model="strong", input_usd_per_mtok=100.0, output_usd_per_mtok=100.0)
    late = replace(CHEAP, name="late", model="late")
    assert router.set_candidates([late, dear]) is router
    assert router.candidates_ == (late, dear)
    after = router.estimate(*probe())
    np.testing.assert_allclose(after.quality[:, 1], before.quality[:, 1])
    np.testing.assert_allclose(after.cost_usd[:, 1], (100 * 100 + 100 * before.output_tokens[:, 1]) / 1e6)
    assert_same(before, router.set_candidates(POOL).estimate(*probe()))
    _assert_raises(RouterError, lambda: router.set_candidates([]))
    _assert_raises(RouterError, lambda: router.set_candidates([CHEAP, CHEAP]))


def check_one_model_at_two_efforts_learns_apart(make: RouterFactory) -> None:
    router = fitted(make)
    efforts = [replace(STRONG, name=f"strong-{effort}", effort=effort) for effort in ("low", "high")]
    router.set_candidates(efforts)
    vectors, _ = regions(120, seed=20)
    before = router.estimate(*probe())
    for row, vector in enumerate(vectors):
        router.update([Outcome(f"u{row}", "strong-low", 0.0)], {f"u{row}": vector})
    fallen = before.quality - router.estimate(*probe()).quality
    assert fallen[:, 0].mean() > fallen[:, 1].mean() + 0.1


def check_scores_rank_by_quality_at_one_and_by_cost_at_zero(make: RouterFactory) -> None:
    router = fitted(make)
    if router.is_policy:
        return
    vectors, prompt_tokens = probe()
    estimates = router.estimate(vectors, prompt_tokens)
    best = router.score(vectors, prompt_tokens, 1.0).argmax(axis=1)
    cheapest = router.score(vectors, prompt_tokens, 0.0).argmax(axis=1)
    np.testing.assert_array_equal(best, estimates.quality.argmax(axis=1))
    np.testing.assert_array_equal(cheapest, estimates.cost_usd.argmin(axis=1))


def check_a_policy_follows_the_prompt_and_the_preference(make: RouterFactory) -> None:
    """At 1 it picks who is good there, better than chance; at 0 it is no dearer; one prompt is scored as in a batch."""
    router = fitted(make)
    vectors, region = regions(200, seed=9)
    prompt_tokens = np.full(len(vectors), 100, dtype=np.int64)
    best, frugal = (router.score(vectors, prompt_tokens, preference) for preference in (1.0, 0.0))
    assert best.shape == frugal.shape == (len(vectors), len(POOL))
    assert np.isfinite(best).all()
    assert np.isfinite(frugal).all()
    for row in range(5):
        np.testing.assert_allclose(router.score_one(vectors[row], 100, 1.0), best[row], rtol=1e-4, atol=1e-6)
    cost = router.estimate(vectors, prompt_tokens).cost_usd
    each = np.arange(len(vectors))
    assert cost[each, frugal.argmax(axis=1)].mean() <= cost[each, best.argmax(axis=1)].mean() + 1e-12
    if router.is_contextual:
        assert QUALITY[region, best.argmax(axis=1)].mean() > QUALITY[region].mean() + 0.1


def check_a_policy_scores_every_pool(make: RouterFactory) -> None:
    router = fitted(make).add_candidate(replace(CHEAP, name="late", model="late"))
    assert router.score(*probe(), 0.5).shape == (40, 4)
    assert np.isfinite(router.score(*probe(), 0.5)).all()
    router.set_candidates([STRONG])
    assert router.score(*probe(), 0.5).shape == (40, 1)


def check_one_model_and_one_prompt_are_enough(make: RouterFactory) -> None:
    outcomes, vectors = world()
    alone = [outcome for outcome in outcomes if outcome.candidate == "cheap"]
    router = make().fit(alone, vectors, [CHEAP], space=SPACE)
    assert router.estimate(*probe()).quality.shape == (40, 1)
    assert np.isfinite(router.score(*probe(), 0.5)).all()
    once = [outcome for outcome in outcomes if outcome.prompt == "p0"]
    estimates = make().fit(once, vectors, POOL, space=SPACE).estimate(*probe())
    assert np.isfinite(estimates.quality).all()
    assert np.isfinite(estimates.cost_usd).all()
    single = make().fit(once[:1], vectors, POOL, space=SPACE)
    assert np.isfinite(single.score(*probe(), 0.5)).all()


def check_a_damaged_file_is_told(make: RouterFactory) -> None:
    router = fitted(make)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "router.safetensors"
        router.save(path)
        whole = path.read_bytes()
        other_version = whole.replace(b'\\"format\\": 1', b'\\"format\\": 9')
        assert other_version != whole
        for broken in (whole[: len(whole) // 2], whole[:20], b"", other_version):
            path.write_bytes(broken)
            _assert_raises(DataError, lambda: type(router).load(path))


def check_outcomes_that_make_no_sense_are_refused(make: RouterFactory) -> None:
    outcomes, vectors = world()
    for quality in (-0.1, 1.1, float("nan"), float("inf")):
        wrong = [*outcomes, Outcome("p0", "cheap", quality)]
        _assert_raises(DataError, lambda wrong=wrong: make().fit(wrong, vectors, POOL, space=SPACE))  # type: ignore[misc]


def check_prompts_that_all_are_the_same(make: RouterFactory) -> None:
    """No direction to learn from: the means are told."""
    outcomes, vectors = world()
    same = dict.fromkeys(vectors, vectors["p0"])
    router = make().fit(outcomes, same, POOL, space=SPACE)
    estimates = router.estimate(vectors["p0"][None], np.array([100], dtype=np.int64))
    np.testing.assert_allclose(estimates.quality[0], QUALITY.mean(axis=0), atol=0.2)


def check_another_space_is_refused(make: RouterFactory) -> None:
    router = fitted(make)
    vectors, prompt_tokens = probe()
    router.estimate(vectors, prompt_tokens, space=SPACE)
    _assert_raises(RouterError, lambda: router.estimate(vectors, prompt_tokens, space="elsewhere-16"))
    _assert_raises(RouterError, lambda: router.estimate(vectors[:, :8], prompt_tokens))
    _assert_raises(RouterError, lambda: router.update([Outcome("p", "cheap", 1.0)], {"p": vectors[0, :8]}))


def check_unknown_candidates_and_prompts_are_refused(make: RouterFactory) -> None:
    outcomes, vectors = world()
    router = fitted(make)
    _assert_raises(RouterError, lambda: router.update([Outcome("p0", "nobody", 1.0)], vectors))
    _assert_raises(DataError, lambda: router.update([Outcome("nowhere", "cheap", 1.0)], vectors))
    _assert_raises(DataError, lambda: router.update([Outcome("p0", "cheap", 1.5)], vectors))
    _assert_raises(DataError, lambda: make().fit([], {}, POOL, space=SPACE))
    _assert_raises(RouterError, lambda: make().fit(outcomes, vectors, POOL[:2], space=SPACE))


def check_a_table_is_as_good_as_outcomes(make: RouterFactory) -> None:
    outcomes, vectors = world()
    table = OutcomeTable.from_outcomes(outcomes, vectors, [candidate.name for candidate in POOL])
    one = make().fit_table(table, POOL, space=SPACE)
    assert_same(one.estimate(*probe()), fitted(make).estimate(*probe()))


def _assert_raises(kind: type[Exception], act: Callable[[], object]) -> None:
    """As `pytest.raises`, which is not there where Atoll is only installed."""
    message = None
    try:
        act()
    except kind as error:
        message = str(error)
    assert message, f"{kind.__name__} was not raised, or says nothing"


CHECKS: Final[tuple[Check, ...]] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_") and callable(value)
)
"""All of them."""
