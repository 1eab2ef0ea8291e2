"""Every router against the one list of checks."""

from __future__ import annotations

import threading

import pytest

from atoll.routers.checks import CHECKS, Check, fitted, probe, regions
from atoll.routers.registry import ROUTERS, make_router
from atoll.types import Outcome


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", ROUTERS)
def test_router(name: str, check: Check) -> None:
    check(lambda: make_router(name, seed=3))


@pytest.mark.parametrize("name", ROUTERS)
def test_updates_in_a_thread_break_no_estimate(name: str) -> None:
    router = fitted(lambda: make_router(name))
    vectors, _ = regions(300, seed=40)
    failures: list[BaseException] = []

    def learn() -> None:
        try:
            for row, vector in enumerate(vectors):
                router.update([Outcome(f"u{row}", "cheap", 1.0)], {f"u{row}": vector})
        except BaseException as error:
            failures.append(error)

    learner = threading.Thread(target=learn)
    learner.start()
    while learner.is_alive():
        estimates = router.estimate(*probe())
        assert ((estimates.quality >= 0) & (estimates.quality <= 1)).all()
    learner.join()
    assert failures == []
