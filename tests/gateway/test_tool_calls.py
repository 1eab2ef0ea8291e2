from __future__ import annotations

from typing import Any

import pytest

from atoll.gateway.tool_calls import ToolCallRepair


def _play(*chunks: list[dict[str, Any]]) -> tuple[list[list[int]], bool]:
    repair = ToolCallRepair()
    changed = [repair.repair({}, calls) for calls in chunks]
    return [[call["index"] for call in calls] for calls in chunks], any(changed)


def _call(call_id: str | None = None, index: int | None = None) -> dict[str, Any]:
    call: dict[str, Any] = {"function": {"arguments": "{}"}}
    if call_id is not None:
        call["id"] = call_id
    if index is not None:
        call["index"] = index
    return call


def test_right_indexes_are_left_alone() -> None:
    indexes, is_changed = _play([_call("a", 0)], [_call(None, 0)], [_call("b", 1)], [_call(None, 1), _call(None, 0)])
    assert indexes == [[0], [0], [1], [1, 0]]
    assert not is_changed


def test_two_calls_that_both_say_zero_are_told_apart() -> None:
    indexes, is_changed = _play([_call("a", 0)], [_call(None, 0)], [_call("b", 0)], [_call(None, 0)])
    assert indexes == [[0], [0], [1], [1]]
    assert is_changed


def test_missing_indexes_are_counted() -> None:
    indexes, _ = _play([_call("a")], [_call()], [_call("b")], [_call()], [_call("c"), _call("d")])
    assert indexes == [[0], [0], [1], [1], [2, 3]]


def test_an_id_repeated_in_every_piece_is_one_call() -> None:
    indexes, is_changed = _play([_call("a", 0)], [_call("a", 0)], [_call("b", 1)], [_call("b", 1)])
    assert indexes == [[0], [0], [1], [1]]
    assert not is_changed


@pytest.mark.parametrize(("reason", "expected"), [("stop", "tool_calls"), ("length", "length"), (None, None)])
def test_an_answer_that_called_tools_does_not_just_stop(reason: str | None, expected: str | None) -> None:
    repair = ToolCallRepair()
    repair.repair({}, [_call("a", 0)])
    choice = {"finish_reason": reason}
    repair.repair_finish(choice)
    assert choice == {"finish_reason": expected}


def test_an_answer_without_tools_may_stop() -> None:
    choice = {"finish_reason": "stop"}
    assert not ToolCallRepair().repair_finish(choice)
    assert choice == {"finish_reason": "stop"}
