from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.gateway.retry_after import retry_after_s

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:15 GMT"}, 10.0),
        ({"retry-after": "Fri, 02 Jan 2026 03:04:00 GMT"}, 0.0),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"x-ratelimit-reset-requests": "6m0s"}, 360.0),
        ({"x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-reset-requests": "1h2m3s"}, 3723.0),
        ({"x-ratelimit-reset": "1767323055"}, 10.0),
        ({"x-ratelimit-reset": "1767323055000"}, 10.0),
        ({"anthropic-ratelimit-requests-reset": "2026-01-02T03:04:25Z"}, 20.0),
        ({}, None),
        ({"x-ratelimit-limit-requests": "5"}, None),
    ],
)
def test_every_way_of_saying_it(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, NOW) == (None if seconds is None else pytest.approx(seconds))


def test_the_limit_that_is_exhausted_counts() -> None:
    headers = {
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "3s",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "60s",
    }
    assert retry_after_s(headers, NOW) == 3.0


@given(st.text(max_size=30))
def test_nonsense_is_never_an_error(value: str) -> None:
    seconds = retry_after_s({"retry-after": value, "x-ratelimit-reset": value}, NOW)
    assert seconds is None or seconds >= 0
