"""When a conversation changes its model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.routers.decision import decide
from atoll.routers.stickiness import Conversation, lost_cache_usd, stay_or_leave
from atoll.types import Candidate, Decision, Estimate, Preference

CHEAP = Candidate(
    "cheap", "cheap", "u", input_usd_per_mtok=0.2, cached_input_usd_per_mtok=0.02, output_usd_per_mtok=1.0
)
STRONG = Candidate(
    "strong", "strong", "u", input_usd_per_mtok=2.0, cached_input_usd_per_mtok=0.2, output_usd_per_mtok=10.0
)


def fresh(
    preference: float, *, cheap: float = 0.6, strong: float = 0.8, prompt_tokens: int = 1000, **options: object
) -> Decision:
    estimates = [
        Estimate(
            each.name,
            quality,
            0.0,
            300.0,
            (each.input_usd_per_mtok * prompt_tokens + each.output_usd_per_mtok * 300) / 1e6,
        )
        for each, quality in ((CHEAP, cheap), (STRONG, strong))
    ]
    return decide(estimates, Preference(preference), router="test", router_version="1", **options)  # type: ignore[arg-type]


def test_a_gain_over_the_margin_is_worth_leaving_for() -> None:
    decision = fresh(1.0)
    assert stay_or_leave(decision, Conversation(CHEAP, 1000)) is decision


def test_a_small_gain_is_not() -> None:
    stayed = stay_or_leave(fresh(1.0, cheap=0.79), Conversation(CHEAP, 1000))
    assert (stayed.candidate, stayed.alternatives, stayed.propensity) == ("cheap", ("strong",), 1.0)
    assert stayed.reason.startswith("cheap: this conversation stays with it")


def test_a_long_cached_conversation_is_not_read_anew_for_a_cheaper_model() -> None:
    """The cheaper model would save money on a new prompt, but not on one that is cached elsewhere."""
    decision = fresh(0.6, cheap=0.79, prompt_tokens=1000)
    assert decision.candidate == "cheap"
    assert stay_or_leave(decision, Conversation(STRONG, 0)).candidate == "cheap"
    stayed = stay_or_leave(decision, Conversation(STRONG, 100_000))
    assert stayed.candidate == "strong"
    assert "100000 cached tokens anew: $0.180000" in stayed.reason


def test_inside_a_tool_loop_nothing_moves() -> None:
    assert stay_or_leave(fresh(1.0), Conversation(CHEAP, 1000, is_in_tool_loop=True)).candidate == "cheap"


def test_who_is_no_longer_eligible_is_left_even_inside_a_tool_loop() -> None:
    decision = fresh(1.0, excluded={"cheap": "prompt too long"})
    assert stay_or_leave(decision, Conversation(CHEAP, 1000, is_in_tool_loop=True)) is decision


def test_who_is_no_longer_acceptable_is_left() -> None:
    decision = fresh(0.0, cheap=0.2)
    assert decision.candidate == "strong"
    assert stay_or_leave(decision, Conversation(CHEAP, 1000)) is decision


def test_without_a_cached_price_nothing_is_lost() -> None:
    assert lost_cache_usd(Conversation(Candidate("a", "a", "u", input_usd_per_mtok=5.0), 10_000)) == 0.0


@pytest.mark.parametrize("context_tokens", [0, 10, 100_000])
def test_at_preference_one_only_quality_moves_a_conversation(context_tokens: int) -> None:
    assert stay_or_leave(fresh(1.0), Conversation(CHEAP, context_tokens)).candidate == "strong"


@given(st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_the_longer_the_conversation_the_more_it_stays(
    preference: float, one: int, another: int, cheap: float, strong: float
) -> None:
    decision = fresh(preference, cheap=cheap, strong=strong)
    short, long = sorted((one, another))
    for current in (CHEAP, STRONG):
        if stay_or_leave(decision, Conversation(current, short)).candidate == current.name:
            assert stay_or_leave(decision, Conversation(current, long)).candidate == current.name
