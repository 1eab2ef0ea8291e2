"""Cutting server-sent events from bytes, wherever the network cut them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UpstreamMalformed
from atoll.gateway.sse import EventSplitter

LINES = st.sampled_from([b"data: x", b"data: {}", b": ping", b"event: y", "data: 你好🙂é".encode(), b"id: 1"])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream with one kind of line end, as servers send."""
    end = draw(ENDS)
    events = draw(st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=5))
    text = b"".join(end.join(lines) + end + end for lines in events)
    return text + draw(st.sampled_from([b"", b"data: half", b"data: half" + end]))


def fed(data: bytes, cuts: list[int]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter(10_000)
    events: list[bytes] = []
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        events += splitter.feed(data[start:end])
    return events, splitter.rest()


@given(streams(), st.lists(st.integers(0, 10_000), max_size=12))
def test_no_byte_is_lost_or_changed(data: bytes, cuts: list[int]) -> None:
    events, rest = fed(data, cuts)
    assert b"".join(events) + rest == data


@given(streams(), st.lists(st.integers(0, 10_000), max_size=12))
def test_the_events_do_not_depend_on_where_the_bytes_were_cut(data: bytes, cuts: list[int]) -> None:
    # A CR at the very end of what is here may be half of a CRLF, so the last event of such a stream may wait in `rest`.
    assert fed(data, cuts) == fed(data, list(range(len(data))))


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=12))
def test_any_bytes_come_out_as_they_went_in(data: bytes, cuts: list[int]) -> None:
    events, rest = fed(data, cuts)
    assert b"".join(events) + rest == data
    assert all(event.endswith((b"\n", b"\r")) for event in events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_character_split_over_two_reads_stays_whole(end: bytes) -> None:
    event = "data: 你好🙂é".encode() + end + end
    events, rest = fed(event * 3, list(range(3 * len(event))))
    assert events == [event] * 3
    assert rest == b""


def test_several_events_in_one_read() -> None:
    assert EventSplitter(100).feed(b"data: a\n\ndata: b\n\n: c\n\n") == [b"data: a\n\n", b"data: b\n\n", b": c\n\n"]


def test_an_event_without_end_is_refused() -> None:
    splitter = EventSplitter(100)
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(UpstreamMalformed, match="100 bytes"):
        splitter.feed(b"xxxxx")
