from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import LimitSettings
from atoll.errors import PayloadTooLarge, RequestError
from atoll.gateway.parse import Endpoint, ParsedRequest, is_deeper_than, parse_request, unknown_model

LIMITS = LimitSettings(max_body_bytes=10_000, max_json_depth=8)
MESSAGES = [{"role": "user", "content": "Hello"}]


def parse(body: Any, endpoint: Endpoint = Endpoint.CHAT, **headers: str) -> ParsedRequest:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return parse_request(endpoint, raw, named, LIMITS, 0.5)


def refused(body: Any, endpoint: Endpoint = Endpoint.CHAT, **headers: str) -> RequestError:
    with pytest.raises(RequestError) as raised:
        parse(body, endpoint, **headers)
    return raised.value


def chat(**members: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **members}


def test_unknown_members_are_kept_as_they_came() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":null}], "x_vendor" : 1.0}'
    request = parse(body)
    assert request.body == body
    assert request.data["x_vendor"] == 1.0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b'{"model":"m",}', "line 1, column 1"),
        (b'{"model":"\xff\xfe"}', "not UTF-8: byte 0xff at position 10"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"model": NaN}', "not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_told_where_it_fails(body: bytes, says: str) -> None:
    error = refused(body)
    assert (error.http_status, error.error_code) == (400, "invalid_json")
    assert says in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES}, "model"),
        (chat(model=1), "model"),
        (chat(model=""), "model"),
        (chat(model="m" * 1000), "model"),
        (chat(messages=None), "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages="hello"), "messages"),
        (chat(messages=["hello"]), "messages[0]"),
        (chat(messages=[{"content": "x"}]), "messages[0].role"),
        (chat(messages=[*MESSAGES, {"role": "user", "content": 7}]), "messages[1].content"),
        (chat(messages=[{"role": "user", "content": ["x"]}]), "messages[0].content"),
        (chat(stream="yes"), "stream"),
        (chat(stream=1), "stream"),
        (chat(stream=True, stream_options=[]), "stream_options"),
        (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (chat(max_tokens="many"), "max_tokens"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_completion_tokens=True), "max_completion_tokens"),
        (chat(tools={"a": 1}), "tools"),
        (chat(response_format="json"), "response_format"),
        (chat(atoll=[]), "atoll"),
        (chat(atoll={"prefernce": 1}), "atoll.prefernce"),
        (chat(atoll={"preference": 1.5}), "atoll.preference"),
        (chat(atoll={"preference": True}), "atoll.preference"),
        (chat(atoll={"max_cost_usd": -1}), "atoll.max_cost_usd"),
        (chat(atoll={"session": ""}), "atoll.session"),
        (chat(atoll={"session": 5}), "atoll.session"),
        (chat(atoll={"explain": "yes"}), "atoll.explain"),
    ],
)
def test_a_wrong_parameter_is_named(body: dict[str, Any], param: str) -> None:
    error = refused(body)
    assert (error.http_status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "endpoint", "param"),
    [
        ({"model": "m"}, Endpoint.COMPLETIONS, "prompt"),
        ({"model": "m", "prompt": []}, Endpoint.COMPLETIONS, "prompt"),
        ({"model": "m", "prompt": {"a": 1}}, Endpoint.COMPLETIONS, "prompt"),
        ({"model": "m", "input": None}, Endpoint.EMBEDDINGS, "input"),
        ({"model": "m", "input": [None]}, Endpoint.EMBEDDINGS, "input"),
        ({}, Endpoint.ROUTE, "prompt"),
    ],
)
def test_other_endpoints_name_their_own_parameters(body: dict[str, Any], endpoint: Endpoint, param: str) -> None:
    assert refused(body, endpoint).param == param


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}, {"role": "tool", "tool_call_id": "1", "content": "ok"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "developer", "content": ""}],
    ],
)
def test_turns_without_content_are_accepted_as_they_are(messages: list[dict[str, Any]]) -> None:
    assert parse(chat(messages=messages)).data["messages"] == messages


@pytest.mark.parametrize(
    "name",
    ["api_base", "base_url", "api_key", "API_BASE", "Base_Url", "custom_llm_provider", "extra_headers", "extra_body"],
)
def test_a_client_cannot_choose_the_upstream(name: str) -> None:
    error = refused(chat(**{name: "http://127.0.0.1:9/"}))
    assert (error.http_status, error.error_code, error.param) == (400, "not_permitted_parameter", name)


def test_extensions_come_from_the_body_before_headers() -> None:
    request = parse(
        chat(atoll={"preference": 0.25, "explain": True}),
        x_atoll_preference="0.75",
        x_atoll_session="talk",
        x_atoll_max_cost_usd="0.01",
    )
    extensions = request.extensions
    assert extensions.preference.quality_weight == 0.25
    assert extensions.preference.max_cost_usd == 0.01
    assert (extensions.session, extensions.explain) == ("talk", True)


@pytest.mark.parametrize("value", ["much", "nan", "inf", "-0.1", "", "1e999"])
def test_a_preference_header_that_is_no_such_number_is_refused(value: str) -> None:
    assert refused(chat(), x_atoll_preference=value).param == "atoll.preference"


def test_a_body_over_the_limit_is_413() -> None:
    with pytest.raises(PayloadTooLarge):
        parse(chat(x="y" * 10_001))


def test_a_deep_body_is_refused_and_brackets_in_strings_do_not_count() -> None:
    deep: Any = "end"
    for _ in range(9):
        deep = [deep]
    assert refused(chat(x=deep)).error_code == "json_too_deep"
    assert parse(chat(x="[[[[[[[[[[{{{{{{{{{{" + '\\"[[[[' + "\\")).model == "m"


JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text(alphabet='[]{}"\\:,a\u00e9\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='[{"\\', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@given(value=JSON, max_depth=st.integers(0, 5))
def test_depth_is_measured_without_parsing(value: Any, max_depth: int) -> None:
    assert is_deeper_than(orjson.dumps(value), max_depth) == (_depth(value) > max_depth)


def _status(body: Any) -> int:
    try:
        parse(body)
    except RequestError as error:
        return error.http_status if error.message else 0
    return 200


@given(body=st.binary(max_size=200))
def test_any_bytes_give_an_answer_or_our_error(body: bytes) -> None:
    assert _status(body) in (200, 400)


@given(data=st.dictionaries(st.sampled_from(["model", "messages", "stream", "tools", "atoll", "max_tokens"]), JSON))
def test_any_object_gives_an_answer_or_our_error(data: dict[str, Any]) -> None:
    assert _status(data) in (200, 400)


def test_an_unknown_model_is_told_what_there_is() -> None:
    error = unknown_model("gpt-4p", ["gpt-4o", "claude"])
    assert error.http_status == 404
    assert "Did you mean 'gpt-4o'?" in error.message
    assert "auto, gpt-4o, claude" in error.message
