from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.commands.output import one_line, seconds, table, terminal_safe, usd


@given(st.text(st.characters(exclude_categories=())))
def test_a_terminal_gets_nothing_that_it_would_obey(text: str) -> None:
    shown = terminal_safe(text)
    assert len(shown) == len(text)
    assert not any(ord(c) < 32 and c not in "\t\n" for c in shown)
    shown.encode()


@given(st.text(), st.integers(1, 40))
def test_one_line_is_one_bounded_line(text: str, max_chars: int) -> None:
    shown = one_line(text, max_chars)
    assert len(shown) <= max_chars
    assert "\n" not in shown


def test_columns_are_aligned() -> None:
    assert table(["name", ">cost"], [["a", "$1"], ["long name", "$10.50"]]) == [
        "name         cost",
        "a              $1",
        "long name  $10.50",
    ]


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (None, "-"),
        (0.0, "$0"),
        (12.3456, "$12.35"),
        (0.012345, "$0.0123"),
        (0.00012, "$0.00012"),
        (1.5e-7, "$1.50e-07"),
    ],
)
def test_amounts(amount: float | None, shown: str) -> None:
    assert usd(amount) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (0.0123, "12 ms"), (2.345, "2.3 s")])
def test_times(value: float | None, shown: str) -> None:
    assert seconds(value) == shown
