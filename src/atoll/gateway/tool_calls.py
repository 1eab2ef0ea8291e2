"""Tool calls of a stream that a client can put together, whatever the upstream numbered.

Clients glue argument pieces together by `index`. Some upstreams leave it out or begin at 0 in every chunk; some say
`stop` at the end of an answer that called tools, and agents then drop the calls. What is right already is not touched.
"""

from __future__ import annotations

from typing import Any


class ToolCallRepair:
    """Gives the tool calls of one choice stable indexes 0, 1, … over the whole stream."""

    def __init__(self) -> None:
        self._index_by_id: dict[str, int] = {}
        self._current = -1
        self._latest_by_given: dict[int, int] = {}

    def repair(self, choice: dict[str, Any], calls: list[Any]) -> bool:
        """Put right the tool calls of one chunk, in place; whether anything was changed."""
        is_changed = False
        for call in calls:
            if isinstance(call, dict):
                given = call.get("index")
                index = self._index(call.get("id"), given if isinstance(given, int) else None)
                if given != index:
                    call["index"] = index
                    is_changed = True
        return self.repair_finish(choice) or is_changed

    def repair_finish(self, choice: dict[str, Any]) -> bool:
        """An answer that called tools ends with `tool_calls`."""
        if self._current < 0 or choice.get("finish_reason") != "stop":
            return False
        choice["finish_reason"] = "tool_calls"
        return True

    def _index(self, call_id: Any, given: int | None) -> int:
        if isinstance(call_id, str) and call_id:
            index = self._index_by_id.get(call_id)
            if index is None:
                index = self._new_index(given)
                self._index_by_id[call_id] = index
        elif given is None:
            index = max(self._current, 0)
        elif given in self._latest_by_given:
            index = self._latest_by_given[given]
        else:
            index = self._new_index(given)
        self._current = index
        if given is not None:
            self._latest_by_given[given] = index
        return index

    def _new_index(self, given: int | None) -> int:
        taken = set(self._index_by_id.values()) | set(self._latest_by_given.values())
        if given is not None and given not in taken:
            return given
        return max(taken, default=-1) + 1
