"""What of a request is embedded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.routers.embedding.routing_text import MAX_TURN_CHARS, routing_text

QUESTION = "Why is the sky blue?"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def text_part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}

SHAPES: dict[str, Any] = {
    "chat": {"messages": [user(QUESTION)]},
    "chat with a system prompt": {"messages": [{"role": "system", "content": "Be brief."}, user(QUESTION)]},
    "chat with a developer prompt": {"messages": [{"role": "developer", "content": "Be brief."}, user(QUESTION)]},
    "content array": {"messages": [user([text_part(QUESTION)])]},
    "content array of strings": {"messages": [user([QUESTION])]},
    "one part without an array": {"messages": [user(text_part(QUESTION))]},
    "text and image": {"messages": [user([IMAGE, text_part(QUESTION), {"type": "input_audio", "input_audio": {}}])]},
    "image alone, after the question": {"messages": [user(QUESTION), user([IMAGE])]},
    "agent loop": {
        "messages": [
            user(QUESTION),
            assistant(None, tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "c1", "content": [text_part("rainy")]},
        ]
    },
    "anthropic agent loop": {
        "system": "You are an agent.",
        "messages": [
            user([text_part(QUESTION)]),
            assistant([{"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}]),
            user([{"type": "tool_result", "tool_use_id": "t", "content": [text_part("rainy")]}]),
        ],
    },
    "prefilled answer": {"messages": [user(QUESTION), assistant("Because")]},
    "completion": {"prompt": QUESTION},
    "completions": {"prompt": ["Another", QUESTION]},
    "embeddings": {"input": QUESTION},
    "responses, plain": {"input": QUESTION, "instructions": "Be brief."},
    "responses, items": {
        "input": [
            {"type": "message", "role": "user", "content": [text_part(QUESTION, "input_text")]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ]
    },
    "empty messages, then prompt": {"messages": [], "prompt": QUESTION},
    "garbage among messages": {"messages": [user(QUESTION), None, 7, "x", [], {"role": ["user"], "content": {}}, {}]},
    "system prompt alone": {"messages": [{"role": "system", "content": QUESTION}]},
    "unknown role alone": {"messages": [{"role": "narrator", "content": QUESTION}]},
    "no role": {"messages": [{"content": QUESTION}]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_finds_the_question(name: str) -> None:
    assert routing_text(SHAPES[name]) == QUESTION


WORDLESS: dict[str, Any] = {
    "nothing": {},
    "no messages": {"messages": []},
    "null content": {"messages": [user(None)]},
    "blank": {"messages": [user("  \n ")]},
    "image alone": {"messages": [user([IMAGE])]},
    "number": {"messages": [user(5)]},
    "messages are no list": {"messages": "5"},
    "token ids": {"prompt": [1, 2, 3]},
    "lists of token ids": {"prompt": [[1, 2], [3]]},
    "tool results alone": {"messages": [{"role": "tool", "content": "sunny"}]},
    "text that is no text": {"messages": [user([{"type": "text", "text": {"a": 1}}, {"type": {}, "text": "x"}])]},
    "a list": [1],
    "null": None,
}


@pytest.mark.parametrize("name", WORDLESS)
def test_is_empty_without_words(name: str) -> None:
    expected = "5" if name == "messages are no list" else ""
    assert routing_text(WORDLESS[name]) == expected


def test_a_short_turn_comes_with_what_was_said_before() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            user("Here is a parser for dates."),
            assistant("It fails on leap years.", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "c1", "content": "TRACEBACK"},
            user("commit it"),
        ]
    }
    assert routing_text(body) == "Here is a parser for dates.\nIt fails on leap years.\ncommit it"


def test_context_never_crowds_out_the_turn() -> None:
    earlier = [user(f"subject {number} " + "filler " * 400) for number in range(30)]
    text = routing_text({"messages": [*earlier, user("commit it")]})
    assert text.startswith("subject 29")
    assert text.endswith("\ncommit it")
    assert len(text.split()) < 128


def test_a_long_turn_stands_alone() -> None:
    turn = "word " * 200
    assert routing_text({"messages": [user("earlier"), user(turn)]}) == turn.strip()


def test_a_huge_turn_keeps_both_ends() -> None:
    text = routing_text({"messages": [user("begin " + "x" * 5_000_000 + " finish")]})
    assert text.startswith("begin ")
    assert text.endswith(" finish")
    assert len(text) <= MAX_TURN_CHARS + 1


def test_the_question_of_a_very_long_agent_loop_is_found() -> None:
    loop = [assistant(None, tool_calls=[CALL]), {"role": "tool", "tool_call_id": "c1", "content": "x" * 500}] * 2000
    assert routing_text({"messages": [user(QUESTION), *loop]}) == QUESTION


def test_many_parts_keep_both_ends() -> None:
    text = routing_text({"messages": [user([text_part(f"part{number}") for number in range(100_000)])]})
    assert text.startswith("part0\n")
    assert text.endswith("part99999")
    assert len(text) < 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
messages = st.lists(
    st.one_of(
        json_values,
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | json_values},
            optional={
                "content": json_values
                | st.lists(
                    st.fixed_dictionaries(
                        {
                            "type": st.sampled_from(["text", "image_url", "input_text"]) | json_values,
                            "text": json_values,
                        }
                    )
                    | json_values,
                    max_size=3,
                ),
                "tool_calls": json_values,
            },
        ),
    ),
    max_size=5,
)
bodies = json_values | st.fixed_dictionaries(
    {}, optional={"messages": messages | json_values, "prompt": json_values, "input": messages | json_values}
)


@settings(max_examples=500)
@given(body=bodies)
def test_any_json_has_a_text(body: Any) -> None:
    text = routing_text(body)
    assert isinstance(text, str)
    assert text == text.strip() or "\n" in text
    assert len(text) < 2 * MAX_TURN_CHARS
