"""Every router against the one list of checks."""

from __future__ import annotations

import pytest

from atoll.routers.checks import CHECKS, Check
from atoll.routers.registry import ROUTERS, make_router


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", ROUTERS)
def test_router(name: str, check: Check) -> None:
    check(lambda: make_router(name, seed=3))
