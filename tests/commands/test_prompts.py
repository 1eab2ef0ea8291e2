from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.commands.prompts import body_of, read_prompts
from atoll.errors import DataError


def test_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Hello\n\n  Why? \n")
    assert read_prompts(path) == [body_of("Hello"), body_of("Why?")]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    path.write_text(
        '"Hello"\n{"prompt": "Why?", "id": 3}\n\n{"messages": [{"role": "user", "content": "Hi"}], "tools": []}\n'
    )
    assert read_prompts(path) == [body_of("Hello"), body_of("Why?"), {"messages": messages, "tools": []}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.txt", b"caf\xe9", "not UTF-8 at byte 3"),
        ("a.jsonl", b'"x"\n{oops\n', ":2: not JSON"),
        ("a.jsonl", b'"x"\n"y"\n{"text": "x"}\n', ":3: no prompt in"),
        ("a.jsonl", b"[1]", ":1: no prompt in"),
    ],
)
def test_what_holds_no_prompts(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from(["a.txt", "a.jsonl"]))
def test_any_file_gives_prompts_or_says_what_is_wrong(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    try:
        assert all(body["messages"] is not None for body in read_prompts(path))
    except DataError as error:
        assert name in str(error)  # noqa: PT017
