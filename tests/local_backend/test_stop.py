from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.local_backend.stop import StopMatcher

texts = st.text(alphabet="ab#👋", max_size=40)
stops = st.lists(st.text(alphabet="ab#👋", min_size=1, max_size=5), max_size=4)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the answer ends: before the stop string that is complete first (the longest, if several are)."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(complete)
    return None


@given(texts, stops, st.lists(st.integers(0, 6), max_size=12))
def test_gives_out_exactly_what_stands_before_the_first_stop_string(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    given_out, is_stopped = "", False
    for piece in cut(text, sizes):
        part, is_stopped = matcher.push(piece)
        given_out += part
        if is_stopped:
            break
    if not is_stopped:
        given_out += matcher.flush()
    border = first_stop(text, stops)
    assert is_stopped == (border is not None)
    assert given_out == (text if border is None else text[:border])


@given(texts, stops)
def test_never_gives_out_what_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = ""
    for character in text:
        part, is_stopped = matcher.push(character)
        given_out += part
        if is_stopped:
            break
        beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
        assert not any(given_out.endswith(beginning) for beginning in beginnings if len(matcher.held) == 0)
        assert all(len(matcher.held) < len(stop) or not matcher.held.startswith(stop) for stop in stops)


def test_holds_back_no_more_than_it_must() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == ("a ", False)
    assert matcher.held == "ST"
    assert matcher.push("A") == ("STA", False)
    assert matcher.push("STOP!") == ("", True)


def test_empty_stop_strings_are_none() -> None:
    matcher = StopMatcher(["", ""])
    assert matcher.push("text") == ("text", False)


def test_a_long_stop_string_costs_no_more_than_its_characters() -> None:
    """Quadratic matching would take minutes here."""
    matcher = StopMatcher(["a" * 50_000 + "b"])
    for _ in range(1000):
        matcher.push("a" * 200)
    assert matcher.push("ab")[1]
