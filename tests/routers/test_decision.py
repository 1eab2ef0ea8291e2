"""Choosing among estimates."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import RouterError
from atoll.routers.decision import ACCEPTABLE_SHARE, decide
from atoll.routers.eligibility import Exclusion, NoneEligible, Reason, Requirements, exclude
from atoll.types import Candidate, Decision, Estimate, Preference


def estimate(name: str, quality: float, cost_usd: float, std: float = 0.0) -> Estimate:
    return Estimate(name, quality, std, 300.0, cost_usd)


def choose(estimates: list[Estimate], preference: float = 0.5, **options: object) -> Decision:
    cap = options.pop("max_cost_usd", None)
    return decide(estimates, Preference(preference, cap), router="test", router_version="1", **options)  # type: ignore[arg-type]


POOL = [
    estimate("nano", 0.55, 0.0001),
    estimate("mini", 0.70, 0.0005),
    estimate("large", 0.80, 0.005),
    estimate("huge", 0.84, 0.03),
]

qualities = st.integers(0, 100).map(lambda percent: percent / 100)
costs = st.one_of(st.just(0.0), st.integers(0, 60).map(lambda tenths: 1e-6 * 10 ** (tenths / 10)))
pools = st.lists(st.tuples(qualities, costs, qualities), min_size=1, max_size=12).map(
    lambda rows: [estimate(f"m{index}", *row) for index, row in enumerate(rows)]
)
preferences = st.integers(0, 100).map(lambda percent: percent / 100)


def by_name(estimates: list[Estimate], name: str) -> Estimate:
    return next(each for each in estimates if each.candidate == name)


@given(pools, preferences, preferences)
def test_cost_and_quality_never_rise_as_the_preference_falls(pool: list[Estimate], one: float, another: float) -> None:
    low, high = (by_name(pool, choose(pool, each).candidate) for each in sorted((one, another)))
    assert low.cost_usd <= high.cost_usd
    assert low.quality <= high.quality


@given(pools, preferences, st.data())
def test_only_the_eligible_are_ranked_and_each_once(
    pool: list[Estimate], preference: float, data: st.DataObject
) -> None:
    names = [each.candidate for each in pool]
    excluded = data.draw(st.sets(st.sampled_from(names)))
    cap = data.draw(st.one_of(st.none(), costs))
    allowed = {
        each.candidate for each in pool if each.candidate not in excluded and (cap is None or each.cost_usd <= cap)
    }
    options = {"excluded": dict.fromkeys(excluded, "not today"), "max_cost_usd": cap}
    if not allowed:
        with pytest.raises(NoneEligible):
            choose(pool, preference, **options)
        return
    decision = choose(pool, preference, **options)
    ranked = (decision.candidate, *decision.alternatives)
    assert len(ranked) == len(allowed)
    assert set(ranked) == allowed


@given(pools, preferences)
def test_the_choice_is_acceptable(pool: list[Estimate], preference: float) -> None:
    best = max(each.quality for each in pool)
    assert by_name(pool, choose(pool, preference).candidate).quality >= ACCEPTABLE_SHARE * best


@given(pools, preferences, st.integers(1, 100).map(lambda percent: percent / 100))
def test_propensities_are_exact(pool: list[Estimate], preference: float, exploration: float) -> None:
    """Every candidate that can come out has one propensity, and they sum to one."""

    class Scripted(random.Random):
        """Explores, and draws the candidate at `position`; or does not explore."""

        def __init__(self, position: int | None) -> None:
            super().__init__()
            self.position = position

        def random(self) -> float:
            return 1.0 if self.position is None else 0.0

        def choice(self, seq: list[int]) -> int:  # type: ignore[override]
            assert self.position is not None
            return seq[self.position]

    outcomes = {}
    for position in [None, *range(len(pool))]:
        decision = choose(pool, preference, exploration=exploration, rng=Scripted(position))
        assert outcomes.setdefault(decision.candidate, decision.propensity) == decision.propensity
        assert sorted((decision.candidate, *decision.alternatives)) == sorted(each.candidate for each in pool)
    assert set(outcomes) == {each.candidate for each in pool}
    assert sum(outcomes.values()) == pytest.approx(1.0)


def test_exploration_happens_as_often_as_asked() -> None:
    rng = random.Random(7)
    decisions = [choose(POOL, 1.0, exploration=0.2, rng=rng) for _ in range(4000)]
    explored = [each for each in decisions if each.candidate != "huge"]
    assert len(explored) / len(decisions) == pytest.approx(0.2 * 3 / 4, abs=0.02)
    assert all(each.propensity == pytest.approx(0.05) for each in explored)
    assert "keeps learning" in explored[0].reason


def test_without_exploration_the_propensity_is_one() -> None:
    assert choose(POOL).propensity == 1.0


def test_the_whole_dial_is_used() -> None:
    chosen = [choose(POOL, preference / 20).candidate for preference in range(21)]
    assert chosen[0] == "nano"
    assert chosen[-1] == "huge"
    assert set(chosen) == {"nano", "mini", "large", "huge"}


def test_a_tie_within_the_uncertainty_goes_to_the_cheaper() -> None:
    unsure = [estimate("gpt-4o", 0.74, 0.01, std=0.1), estimate("gpt-4o-mini", 0.73, 0.0006, std=0.1)]
    decision = choose(unsure, 1.0)
    assert decision.candidate == "gpt-4o-mini"
    assert decision.reason == (
        "gpt-4o-mini: estimated quality 0.73 is within the uncertainty of the best (0.74 gpt-4o) at 6 % of its cost"
    )
    sure = [replace(each, quality_std=0.001) for each in unsure]
    assert choose(sure, 1.0).candidate == "gpt-4o"


def test_equal_costs_go_to_the_better() -> None:
    assert choose([estimate("a", 0.5, 0.0), estimate("b", 0.6, 0.0)], 0.0).candidate == "b"


def test_cheap_and_hopeless_is_not_acceptable() -> None:
    pool = [estimate("tiny", 0.2, 0.0), *POOL]
    decision = choose(pool, 0.0)
    assert decision.candidate == "nano"
    assert decision.alternatives[-1] == "tiny"


def test_when_all_are_hopeless_the_cheapest_does() -> None:
    assert choose([estimate("tiny", 0.06, 0.0), estimate("large", 0.1, 0.1)], 0.0).candidate == "tiny"


def test_excluding_a_candidate_does_not_change_how_others_compare() -> None:
    for preference in (0.1, 0.3, 0.5, 0.7, 0.9):
        free = choose(POOL, preference)
        if free.candidate != "huge":
            assert choose(POOL, preference, excluded={"huge": "down"}).candidate == free.candidate


def test_the_hard_cap_names_every_price_when_nothing_fits() -> None:
    with pytest.raises(NoneEligible, match=r"nano: costs about \$0\.000100, at most \$0\.000010") as caught:
        choose(POOL, max_cost_usd=0.00001)
    assert caught.value.reasons == {Reason.COST}
    assert [each.candidate for each in caught.value.exclusions] == ["nano", "mini", "large", "huge"]


def test_none_eligible_keeps_the_typed_reasons() -> None:
    excluded = {each.candidate: Exclusion(each.candidate, Reason.CONTEXT, "too small") for each in POOL[:3]}
    with pytest.raises(NoneEligible) as caught:
        choose(POOL, excluded=excluded, max_cost_usd=0.01)
    assert caught.value.reasons == {Reason.CONTEXT, Reason.COST}


def test_scores_of_a_policy_router_take_the_place_of_the_utility() -> None:
    decision = choose(POOL, 0.5, scores=[0.1, 0.2, 0.9, 0.3])
    assert (decision.candidate, decision.alternatives) == ("large", ("huge", "mini", "nano"))
    assert tuple(decision.scores) == (0.1, 0.2, 0.9, 0.3)
    assert decision.reason == "large: estimated quality 0.80, ranked first of 4 candidates by the router's policy"


@given(pools, preferences, st.data())
def test_there_is_a_reason_for_every_choice(pool: list[Estimate], preference: float, data: st.DataObject) -> None:
    """Free candidates, equal ones and policies included."""
    scores = data.draw(st.one_of(st.none(), st.lists(st.floats(-1, 1), min_size=len(pool), max_size=len(pool))))
    decision = choose(pool, preference, scores=scores)
    assert decision.reason.startswith(f"{decision.candidate}: ")


@pytest.mark.parametrize("preference", [-0.1, 1.1, float("nan")])
def test_a_preference_out_of_range_is_an_error(preference: float) -> None:
    with pytest.raises(RouterError, match=r"0 \(cheapest\) to 1"):
        choose(POOL, preference)


@pytest.mark.parametrize("cap", [-1.0, float("nan")])
def test_a_cap_that_makes_no_sense_is_an_error(cap: float) -> None:
    with pytest.raises(RouterError, match="max_cost_usd"):
        choose(POOL, max_cost_usd=cap)


@pytest.mark.parametrize("broken", [estimate("x", float("nan"), 0.1), estimate("x", 0.5, float("nan"))])
def test_an_estimate_that_is_no_number_is_an_error(broken: Estimate) -> None:
    with pytest.raises(RouterError, match="makes no sense"):
        choose([*POOL, broken])


@pytest.mark.parametrize(
    ("preference", "excluded", "reason"),
    [
        (1.0, {}, "huge: best estimated quality (0.84) of 4 candidates"),
        (
            0.0,
            {},
            "nano: estimated quality 0.55; the best has 0.84 (huge), but nothing acceptable is cheaper",
        ),
        (
            0.6,
            {},
            "mini: estimated quality 0.70 against 0.84 of huge, at 2 % of its cost: the better trade at preference 0.6",
        ),
        (
            0.0,
            {"mini": "", "large": "", "huge": ""},
            "nano: the only candidate that can answer this request",
        ),
    ],
)
def test_reasons_are_written_for_people(preference: float, excluded: dict[str, str], reason: str) -> None:
    assert choose(POOL, preference, excluded=excluded).reason == reason


def candidate(**facts: object) -> Candidate:
    return Candidate(name="m", model="m", upstream="u", **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "requirements", "reason", "detail"),
    [
        (
            {"context_tokens": 8192},
            Requirements(prompt_tokens=8000, max_output_tokens=1000),
            Reason.CONTEXT,
            "holds 8192 tokens, about 9000 are needed",
        ),
        (
            {"context_tokens": 100},
            Requirements(prompt_tokens=100),
            Reason.CONTEXT,
            "holds 100 tokens, about 101 are needed",
        ),
        (
            {"max_output_tokens": 4096},
            Requirements(max_output_tokens=5000),
            Reason.OUTPUT,
            "writes at most 4096 tokens, 5000 are asked for",
        ),
        (
            {"capabilities": frozenset({"tools"})},
            Requirements(capabilities=frozenset({"tools", "vision", "json_schema"})),
            Reason.CAPABILITY,
            "cannot do json_schema, vision",
        ),
        ({}, Requirements(allowed_models=frozenset({"other"})), Reason.KEY, "the key may not use it"),
        ({}, Requirements(is_private=True), Reason.PRIVACY, "private data must not be sent there"),
    ],
)
def test_exclusions_say_why(facts: dict[str, object], requirements: Requirements, reason: Reason, detail: str) -> None:
    assert exclude([candidate(**facts)], requirements) == {"m": Exclusion("m", reason, detail)}
    assert str(exclude([candidate(**facts)], requirements)["m"]) == detail


@pytest.mark.parametrize(
    ("facts", "requirements"),
    [
        ({}, Requirements(prompt_tokens=10**9, max_output_tokens=10**9)),
        ({"context_tokens": 100}, Requirements(prompt_tokens=99)),
        ({"capabilities": frozenset({"tools", "vision"})}, Requirements(capabilities=frozenset({"tools"}))),
        ({"sees_private_data": True}, Requirements(is_private=True, allowed_models=frozenset({"m"}))),
    ],
)
def test_who_fits_is_not_excluded(facts: dict[str, object], requirements: Requirements) -> None:
    assert exclude([candidate(**facts)], requirements) == {}
