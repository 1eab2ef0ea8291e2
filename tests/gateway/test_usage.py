"""Token counts, whatever the provider's convention."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.gateway.usage import usage_from
from atoll.types import Candidate, Usage

EXAMPLES = {
    "openai": (
        {
            "prompt_tokens": 2006,
            "completion_tokens": 300,
            "prompt_tokens_details": {"cached_tokens": 1920},
            "completion_tokens_details": {"reasoning_tokens": 100},
        },
        Usage(2006, 1920, 300, 100),
    ),
    "openai without details": ({"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}, Usage(7, 0, 2)),
    "openai responses": (
        {"input_tokens": 50, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 40}},
        Usage(50, 40, 9),
    ),
    "anthropic": (
        {
            "input_tokens": 21,
            "cache_creation_input_tokens": 188,
            "cache_read_input_tokens": 1000,
            "output_tokens": 393,
        },
        Usage(1209, 1000, 393),
    ),
    "deepseek": (
        {"prompt_tokens": 100, "completion_tokens": 5, "prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36},
        Usage(100, 64, 5),
    ),
    "gemini's OpenAI endpoint": (
        {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 430},
        Usage(10, 0, 420, 400),
    ),
    "xai": (
        {
            "prompt_tokens": 32,
            "completion_tokens": 9,
            "total_tokens": 135,
            "completion_tokens_details": {"reasoning_tokens": 94},
        },
        Usage(32, 0, 103, 94),
    ),
    "embeddings": ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8)),
    "nulls": ({"prompt_tokens": 8, "completion_tokens": None, "prompt_tokens_details": None}, Usage(8)),
    "more cached than prompt": (
        {"prompt_tokens": 8, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 90}},
        Usage(8, 8, 1),
    ),
}


@pytest.mark.parametrize(("given_usage", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_each_convention_is_read(given_usage: dict[str, Any], expected: Usage) -> None:
    assert usage_from(given_usage) == expected


@pytest.mark.parametrize("nothing", [None, {}, [], "5", {"tokens": 5}])
def test_what_counts_nothing_is_none(nothing: Any) -> None:
    assert usage_from(nothing) is None


def test_cached_tokens_are_billed_at_the_cached_price_once() -> None:
    candidate = Candidate("m", "m", "u", input_usd_per_mtok=3, cached_input_usd_per_mtok=0.3, output_usd_per_mtok=15)
    usage = usage_from(EXAMPLES["openai"][0])
    assert usage is not None
    assert candidate.cost_usd(usage) == pytest.approx((86 * 3 + 1920 * 0.3 + 300 * 15) / 1e6)


NAMES = [
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "prompt_tokens_details",
    "cache_read_input_tokens",
    "prompt_cache_hit_tokens",
    "completion_tokens_details",
    "reasoning_tokens",
]
odd = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)


@given(st.dictionaries(st.sampled_from(NAMES), odd | st.dictionaries(st.sampled_from(NAMES), odd, max_size=3)))
def test_odd_values_never_crash_and_never_cost_less_than_nothing(usage: dict[str, Any]) -> None:
    found = usage_from(usage)
    if found is not None:
        assert 0 <= found.cached_tokens <= found.prompt_tokens
        assert 0 <= found.reasoning_tokens <= found.completion_tokens
        assert Candidate("m", "m", "u", input_usd_per_mtok=1, output_usd_per_mtok=1).cost_usd(found) >= 0
