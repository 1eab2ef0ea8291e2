from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import InvalidRequest
from atoll.local_backend.protocol import read_body, read_chat, read_completion

HELLO = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> Any:
    return read_chat({"messages": HELLO} | fields)


def test_the_defaults_are_openais() -> None:
    wanted = chat().wanted
    assert (wanted.max_tokens, wanted.choices, wanted.stop, wanted.top_logprobs) == (None, 1, (), None)
    assert (wanted.sampling.temperature, wanted.sampling.top_p, wanted.sampling.seed) == (1.0, 1.0, None)
    assert not wanted.is_streaming


def test_nulls_are_defaults_and_unknown_fields_are_ignored() -> None:
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "stream",
        "logit_bias",
        "seed",
        "response_format",
        "tools",
    ]
    assert chat(**dict.fromkeys(names), user="me", metadata={"a": 1}, made_up=[1]).wanted == chat().wanted


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).wanted.max_tokens == 7
    assert chat(max_tokens=5).wanted.max_tokens == 5


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", 2.5, r"2\.5 is not within \[0, 2\]"),
        ("temperature", "hot", "expected a number, found a string"),
        ("temperature", True, "expected a number, found a boolean"),
        ("top_p", -0.1, "not within"),
        ("n", 0, "not within"),
        ("n", 1.5, "expected an integer"),
        ("n", 129, "not within"),
        ("presence_penalty", 3, "not within"),
        ("frequency_penalty", -3, "not within"),
        ("max_tokens", 0, "0 is less than 1"),
        ("max_tokens", "many", "expected an integer"),
        ("max_completion_tokens", -1, "less than 1"),
        ("seed", 1 << 70, "not within"),
        ("stop", 5, "expected a string or an array"),
        ("stop", ["a", 5], "expected a string or an array"),
        ("stop", ["a"] * 5, "at most 4"),
        ("stream", "yes", "expected a boolean"),
        ("stream_options", {"include_usage": True}, "only allowed when 'stream' is true"),
        ("logit_bias", {"x": 1}, "token id"),
        ("logit_bias", {"5": 101}, r"\[-100, 100\]"),
        ("logit_bias", [1], "expected an object"),
        ("top_logprobs", 3, "needs 'logprobs'"),
        ("logprobs", 3, "expected a boolean"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "cannot be guaranteed"),
        ("response_format", {"type": "json_object"}, "cannot be guaranteed"),
        ("tool_choice", "required", "demands a tool call"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "demands a tool call"),
    ],
)
def test_a_wrong_value_is_told_with_its_name(field: str, value: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hi", "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([*HELLO, {"role": "wizard", "content": "Hi"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": "f()"}], "messages[0].tool_calls"),
    ],
)
def test_wrong_messages_are_told_with_their_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_images_are_refused_in_so_many_words() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match=r"reads text only.*vision") as caught:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}])
    assert caught.value.param == "messages[0].content[1]"


def test_contents_become_text() -> None:
    messages = [
        {"role": "system", "content": None},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]
    assert [message["content"] for message in chat(messages=messages).messages] == ["", "abc", "", ""]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("Hi", ["Hi"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_all_kinds_of_prompts(prompt: Any, prompts: Any) -> None:
    assert read_completion({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 5, [], {}, [["a"]], [1.5], [True], [[]], [1, "a", None]])
def test_wrong_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_completion({"prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"best_of": 3}, {"max_tokens": 0}, {"echo": True, "stream": True}, {"logprobs": 50}]
)
def test_what_text_completions_cannot_do_is_told(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read_completion({"prompt": "Hi"} | fields)


def test_harmless_spellings_of_it_are_not() -> None:
    asked = read_completion({"prompt": "Hi", "best_of": 2, "n": 2, "suffix": None, "echo": True, "max_tokens": 0})
    assert asked.echo
    assert asked.wanted.max_tokens == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"null"])
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_body(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CHAT_FIELDS = ["messages", "temperature", "n", "stop", "logit_bias", "stream", "stream_options", "response_format"]
MORE_FIELDS = ["prompt", "tool_choice", "logprobs", "top_logprobs", "max_tokens", "seed", "echo", "suffix", "best_of"]
names = st.sampled_from([*CHAT_FIELDS, *MORE_FIELDS])


@given(st.dictionaries(names, json_values), st.booleans())
@settings(deadline=None)
def test_no_body_ever_breaks_the_reader(body: dict[str, Any], has_messages: bool) -> None:
    """Every JSON object is read or refused."""
    for read, key in ((read_chat, "messages"), (read_completion, "prompt")):
        with contextlib.suppress(InvalidRequest):
            read(body | ({key: HELLO if key == "messages" else "Hi"} if has_messages else {}))
