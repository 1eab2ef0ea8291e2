from __future__ import annotations

from atoll.gateway.health import MAX_PAUSE_S, Health
from atoll.types import Candidate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


A, B, C = (Candidate(name, name, "up") for name in "abc")


def _names(candidates: list[Candidate]) -> str:
    return "".join(candidate.name for candidate in candidates)


def test_a_failed_candidate_is_tried_last_for_a_while() -> None:
    clock = Clock()
    health = Health(5.0, clock)
    health.failed(A)
    assert _names(health.ordered([A, B, C])) == "bca"
    assert health.closed_for_s(A) == 0.0
    clock.now += 5.1
    assert _names(health.ordered([A, B, C])) == "abc"


def test_of_several_in_a_pause_the_soonest_to_end_comes_first() -> None:
    clock = Clock()
    health = Health(5.0, clock)
    health.failed(A, retry_after_s=30.0)
    health.failed(B)
    assert _names(health.ordered([A, B, C])) == "cba"
    assert health.pauses_s([A, B, C]) == {"a": 30.0, "b": 5.0}


def test_a_time_that_the_upstream_named_closes_it() -> None:
    clock = Clock()
    health = Health(5.0, clock)
    health.failed(A, retry_after_s=7.0)
    clock.now += 3.0
    assert health.closed_for_s(A) == 4.0
    clock.now += 4.5
    assert health.closed_for_s(A) == 0.0


def test_nobody_is_closed_for_days() -> None:
    health = Health(5.0, Clock())
    health.failed(A, retry_after_s=86_400.0)
    assert health.closed_for_s(A) == MAX_PAUSE_S


def test_a_success_ends_the_pause() -> None:
    health = Health(5.0, Clock())
    health.failed(A, retry_after_s=60.0)
    health.succeeded(A)
    assert health.closed_for_s(A) == 0.0
    assert _names(health.ordered([A, B])) == "ab"


def test_two_efforts_of_one_model_share_a_pause() -> None:
    low, high = Candidate("low", "m", "up", effort="low"), Candidate("high", "m", "up", effort="high")
    health = Health(5.0, Clock())
    health.failed(low, retry_after_s=60.0)
    assert health.closed_for_s(high) == 60.0
