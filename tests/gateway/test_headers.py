from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import RateLimited
from atoll.gateway import headers


def test_credentials_and_hop_by_hop_headers_stay_behind() -> None:
    sent = {
        b"authorization": b"Bearer x",
        b"cookie": b"a=b",
        b"x-api-key": b"k",
        b"host": b"localhost",
        b"connection": b"keep-alive",
        b"content-length": b"5",
        b"x-portkey-custom-host": b"http://evil",
        b"x-forwarded-host": b"evil",
        b"traceparent": b"00-abc",
    }
    assert headers.to_upstream(sent) == {"traceparent": "00-abc"}


def test_an_upstreams_cookies_and_encoding_stay_behind() -> None:
    given = {"set-cookie": "a=b", "content-encoding": "gzip", "transfer-encoding": "chunked", "x-ratelimit-limit": "5"}
    assert headers.to_client(given) == [(b"x-ratelimit-limit", b"5")]


@given(st.text(max_size=400))
def test_no_text_can_break_a_header(text: str) -> None:
    for _, value in headers.of_decision(text, text, text, 1):
        assert all(0x20 <= byte < 0x7F for byte in value)
        assert len(value) <= 300


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (6.1, b"7"), (60.0, b"60")])
def test_retry_after_is_whole_seconds_never_too_early(seconds: float, shown: bytes) -> None:
    assert (b"retry-after", shown) in headers.of_error(RateLimited("slow down", retry_after_s=seconds))


@pytest.mark.parametrize(
    ("cost_usd", "shown"), [(0.0, b"0"), (0.0000475, b"0.0000475"), (1.5, b"1.5"), (20.0, b"20"), (1e-12, b"0")]
)
def test_costs_are_plain_decimals(cost_usd: float, shown: bytes) -> None:
    assert headers.cost(cost_usd)[1] == shown
