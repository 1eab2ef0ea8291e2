from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.gateway.splice import append, splice

KEYS = ["model", "atoll", "stream_options", "messages", "a", 'q"uote', "back\\slash", "model ", "é", ""]
TEXTS = st.text(max_size=12) | st.sampled_from(['"model"', '\\"model\\":"x"', '{"model":1}', ",", "}", "]", "\\", '"'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | TEXTS, inner, max_size=3),
    max_leaves=8,
)
SPACES = st.sampled_from(["", " ", "\n\t ", "  "])


def _spelt(text: str, is_escaped: bool) -> str:
    """A JSON string of `text`, its ASCII letters written as escapes where asked for."""
    if not is_escaped:
        return json.dumps(text)
    return '"' + "".join(f"\\u{ord(char):04x}" if char.isascii() else json.dumps(char)[1:-1] for char in text) + '"'


@st.composite
def documents(draw: st.DrawFn) -> list[tuple[str, str, Any]]:
    """Members of an object as (text before the value, text of the value, value), keys repeated and escaped at will."""
    members = draw(
        st.lists(st.tuples(st.sampled_from(KEYS), VALUES, st.booleans(), SPACES, SPACES, SPACES), max_size=7)
    )
    written = []
    for key, value, is_escaped, before, between, after in members:
        text = json.dumps(value, ensure_ascii=draw(st.booleans()))
        written.append((key, f"{before}{_spelt(key, is_escaped)}{between}:{between}", text, after, value))
    return [(key, head, text + after, value) for key, head, text, after, value in written]  # type: ignore[misc]


@given(
    members=documents(),
    values=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    remove=st.frozensets(st.sampled_from(KEYS), max_size=2),
    outer=SPACES,
)
def test_the_result_parses_to_what_was_asked_for_and_the_rest_keeps_its_bytes(members, values, remove, outer) -> None:
    remove = remove - values.keys()
    body = (outer + "{" + ",".join(head + text for _, head, text, _ in members) + "}" + outer).encode()
    parsed = orjson.loads(body)

    changed = splice(body, parsed, values, remove)

    expected = {key: value for key, value in parsed.items() if key not in remove} | values
    assert orjson.loads(changed) == expected
    untouched = [(head + text).encode() for key, head, text, _ in members if key not in values and key not in remove]
    position = 0
    for span in untouched:
        position = changed.index(span, position) + len(span)


@given(members=documents(), key=st.sampled_from(["model", "atoll"]))
def test_every_occurrence_of_a_key_is_replaced_however_it_is_spelt(members, key) -> None:
    body = ("{" + ",".join(head + text for _, head, text, _ in members) + "}").encode()
    changed = splice(body, orjson.loads(body), {key: "served"})
    found = [value for name, value in json.loads(changed, object_pairs_hook=list) if name == key]
    assert found == ["served"] * max(1, sum(name == key for name, *_ in members))


def test_nothing_to_do_gives_the_very_same_bytes() -> None:
    body = b' {"model" : "m"}\n'
    assert splice(body, {"model": "m"}, {}, frozenset({"atoll"})) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"mod\\u0065l":"a","x":1}', b'{"mod\\u0065l":"served","x":1}'),
        (b'{"model":"a","model":"b"}', b'{"model":"served","model":"served"}'),
        (b'{"x":"\\"model\\":\\"a\\"","model" : "b" }', b'{"x":"\\"model\\":\\"a\\"","model" : "served" }'),
        (b'{"x":{"model":"inner"},"model":"b"}', b'{"x":{"model":"inner"},"model":"served"}'),
        (b'{"x":["model"],"model":"b"}', b'{"x":["model"],"model":"served"}'),
        (b'{"a\\"model":1,"model":"b"}', b'{"a\\"model":1,"model":"served"}'),
    ],
)
def test_a_model_is_found_where_it_stands(body: bytes, expected: bytes) -> None:
    assert splice(body, orjson.loads(body), {"model": "served"}) == expected


@pytest.mark.parametrize("position", ["first", "middle", "last", "only"])
def test_a_removed_member_takes_one_comma_with_it(position: str) -> None:
    member, others = '"atoll": {"session": "}"}', ['"a": 1', '"b": [",", 2]']
    members = {"first": [member, *others], "middle": [others[0], member, others[1]], "last": [*others, member]}
    body = ("{" + ", ".join(members.get(position, [member])) + "}").encode()
    changed = splice(body, orjson.loads(body), {}, frozenset({"atoll"}))
    assert orjson.loads(changed) == ({"a": 1, "b": [",", 2]} if position != "only" else {})


@given(value=st.dictionaries(TEXTS, VALUES, max_size=3), spaces=SPACES)
def test_append_puts_a_last_member(value: dict[str, Any], spaces: str) -> None:
    value.pop("atoll", None)
    body = orjson.dumps(value)[:-1] + spaces.encode() + b"}" + spaces.encode()
    appended = append(body, "atoll", {"cost_usd": 0.5})
    assert orjson.loads(appended) == value | {"atoll": {"cost_usd": 0.5}}
    assert appended.startswith(orjson.dumps(value)[:-1])
