from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.commands.when import local_time, when


@pytest.mark.parametrize(("text", "ago_s"), [("30s", 30), ("5m", 300), ("2h", 7200), ("7d", 604_800), ("1w", 604_800)])
def test_ago(text: str, ago_s: int) -> None:
    assert when(text) == pytest.approx(time.time() - ago_s, abs=5)


def test_dates() -> None:
    assert when("2026-12-01T15:30:00+00:00") == datetime(2026, 12, 1, 15, 30, tzinfo=UTC).timestamp()
    assert local_time(when("2026-12-01T15:30:00")) == "2026-12-01 15:30:00"
    assert local_time(when("2026-12-01")) == "2026-12-01 00:00:00"


@given(st.text())
def test_anything_else_is_a_mistake_or_a_date(text: str) -> None:
    with contextlib.suppress(click.BadParameter):
        assert isinstance(when(text), float)


def test_what_is_no_time_is_quoted() -> None:
    with pytest.raises(click.BadParameter, match=r"'last week' is no time. Write 30m"):
        when("last week")
