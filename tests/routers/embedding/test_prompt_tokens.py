"""Token estimates without tokenising."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.routers.embedding.prompt_tokens import (
    TOKENS_PER_MEDIA_PART,
    estimate_prompt_tokens,
    estimate_text_tokens,
)

# Counts by cl100k_base.
KNOWN = {
    "prose": ("The committee will meet on Thursday afternoon to discuss the proposal for a new library building.", 17),
    "question": ("What are the names of some famous actors that started their careers on Broadway?", 15),
    "chinese": ("什么是机器学习？请用简单的话解释一下。", 20),
}


@pytest.mark.parametrize("name", KNOWN)
def test_is_near_the_truth(name: str) -> None:
    text, tokens = KNOWN[name]
    assert 0.6 * tokens <= estimate_text_tokens(text) <= 1.5 * tokens


def test_a_sampled_text_is_estimated_like_its_parts() -> None:
    part = "The quick brown fox jumps over 13 lazy dogs; 敏捷的狐狸. "
    assert estimate_text_tokens(part * 20_000) == pytest.approx(20_000 * estimate_text_tokens(part), rel=0.05)


def body(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


PARAGRAPH = "This paragraph is here to be counted, and it is counted wherever it stands. " * 4
BARE = estimate_prompt_tokens(body({"role": "user", "content": "Hello"}))


@pytest.mark.parametrize(
    "longer",
    [
        body({"role": "system", "content": PARAGRAPH}, {"role": "user", "content": "Hello"}),
        body({"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": PARAGRAPH}]}),
        body(
            {"role": "user", "content": "Hello"}, tools=[{"type": "function", "function": {"description": PARAGRAPH}}]
        ),
        body({"role": "user", "content": "Hello"}, {"role": "tool", "content": PARAGRAPH}),
        body(
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": PARAGRAPH}}]},
        ),
        body({"role": "user", "content": "Hello"}, system=[{"type": "text", "text": PARAGRAPH}]),
        {"input": [{"role": "user", "content": "Hello"}], "instructions": PARAGRAPH},
        {"prompt": PARAGRAPH + "Hello"},
    ],
)
def test_everything_that_a_model_reads_counts(longer: dict[str, Any]) -> None:
    assert estimate_prompt_tokens(longer) - BARE == pytest.approx(estimate_text_tokens(PARAGRAPH), abs=15)


def test_an_image_counts_as_a_constant_whatever_its_size() -> None:
    def with_image(data: str) -> int:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return estimate_prompt_tokens(body({"role": "user", "content": [{"type": "text", "text": "Hello"}, image]}))

    assert with_image("A") == with_image("A" * 4_000_000) == BARE + TOKENS_PER_MEDIA_PART


def test_a_property_called_image_is_no_image() -> None:
    schema = {"type": "object", "properties": {"image": {"type": "string"}, "file": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert estimate_prompt_tokens(body({"role": "user", "content": "Hello"}, tools=tools)) < BARE + 100


def test_token_ids_are_counted() -> None:
    assert estimate_prompt_tokens({"prompt": list(range(500))}) == 500
    assert estimate_prompt_tokens({"prompt": [7] * 50_000}) == pytest.approx(50_000, rel=0.02)


def test_a_long_talk_is_counted_from_a_sample() -> None:
    message = {"role": "user", "content": "How do I sort a list of tuples by the second element?"}
    one = estimate_prompt_tokens(body(message))
    assert estimate_prompt_tokens(body(*[message] * 30_000)) == pytest.approx(30_000 * one, rel=0.05)


def test_work_is_bounded_for_a_wide_tree() -> None:
    tree = [[["x"] * 100] * 100] * 100
    assert estimate_prompt_tokens({"messages": tree}) > 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(
    body=json_values
    | st.dictionaries(st.sampled_from(["messages", "tools", "input", "prompt", "system", "text"]), json_values)
)
def test_any_json_has_an_estimate(body: Any) -> None:
    assert estimate_prompt_tokens(body) >= 1
