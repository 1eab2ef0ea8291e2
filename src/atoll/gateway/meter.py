"""What is learned from a stream while its bytes pass by.

Events go to the client as the upstream sent them, byte for byte, each as soon as it is whole. Four things are
different: the usage chunk that only the gateway asked for stays here; the one that the client asked for gets Atoll's
member; a chunk of our own comes before `[DONE]` where something is still owed; and tool calls are repaired
(`tool_calls.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from atoll.errors import RequestError, UpstreamMalformed
from atoll.gateway import splice
from atoll.gateway.faults import fault_of_event
from atoll.gateway.parse import EXTENSION_KEY
from atoll.gateway.redact import Redactor
from atoll.gateway.sse import EventSplitter
from atoll.gateway.tool_calls import ToolCallRepair
from atoll.gateway.usage import usage_from
from atoll.types import Candidate, Usage

_DONE: Final = b"data: [DONE]\n\n"
_TEXT_KEYS: Final = ("content", "reasoning_content", "reasoning", "refusal")
_CHARS_PER_TOKEN: Final = 4
_MAX_EVENT_BYTES: Final = 16_000_000


@dataclass(frozen=True, slots=True)
class Extras:
    """What Atoll adds to the end of a stream."""

    member: Callable[[Candidate, Usage], dict[str, Any]]
    """Atoll's member of the last chunk: model, cost, and the decision where it was asked for."""
    estimate: Callable[[], Usage]
    """Usage of the prompt alone, for where no upstream tells."""
    explain: bool = False
    keeps_text: bool = False
    """Whether the answer's text is wanted for the ledger."""


class StreamMeter:
    """Takes an upstream's bytes, gives the client's, and keeps the books. One instance for one attempt."""

    def __init__(self, candidate: Candidate, *, wants_usage: bool, extras: Extras, redactor: Redactor) -> None:
        self.has_data = False
        self.first_data_at: float | None = None
        """`time.monotonic()` of the first data event; comments do not count."""
        self.is_done = False
        """Whether `[DONE]` has come."""
        self.fault: RequestError | None = None
        """Set by an `error` event, or one that is not JSON; nothing after it is read."""
        self.upstream_id: str | None = None
        self.text_parts: list[str] = []
        self._candidate = candidate
        self._wants_usage = wants_usage
        self._extras = extras
        self._redactor = redactor
        self._splitter = EventSplitter(_MAX_EVENT_BYTES)
        self._usage: Usage | None = None
        self._has_finish_reason = False
        self._owes_chunk = wants_usage or extras.explain
        self._output_chars = 0
        self._repairs: dict[int, ToolCallRepair] = {}
        self._last_chunk: dict[str, Any] = {}

    def feed(self, data: bytes) -> bytes:
        """The client's bytes for these of the upstream: of the events before a `fault`, where one comes up.

        Raises UpstreamMalformed for an event that is too large.
        """
        return b"".join([self._event(event) for event in self._splitter.feed(data)])

    def finish(self) -> bytes:
        """What is left for the client when the upstream has ended its body.

        Raises UpstreamMalformed when it did so too early.
        """
        rest = self._splitter.rest()
        last = self._event(rest.rstrip() + b"\n\n") if rest.strip() else b""
        if self.is_done or self.fault is not None:
            return last
        if not self._has_finish_reason:
            raise UpstreamMalformed(
                f"The upstream {self._candidate.upstream!r} ended its stream for {self._candidate.name!r} in the middle"
            )
        return b"".join((last, self._owed(), _DONE))

    def usage(self) -> Usage:
        """What the upstream said, else an estimate of what was delivered so far."""
        if self._usage is not None:
            return self._usage
        return replace(self._extras.estimate(), completion_tokens=-(-self._output_chars // _CHARS_PER_TOKEN))

    def _event(self, event: bytes) -> bytes:
        if self.fault is not None or self.is_done:
            return b""
        payload = data_of(event)
        if payload is None:
            return event
        if payload == b"[DONE]":
            self.is_done = True
            return self._owed() + event
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.fault = UpstreamMalformed(
                f"The upstream {self._candidate.upstream!r} sent an event for {self._candidate.name!r} that is not JSON"
            )
            return b""
        if not isinstance(chunk, dict):
            return event
        if chunk.get("error"):
            self.fault = fault_of_event(self._candidate, chunk["error"], self._redactor)
            return b""
        return self._chunk(event, payload, chunk)

    def _chunk(self, event: bytes, payload: bytes, chunk: dict[str, Any]) -> bytes:
        if not self.has_data:
            self.has_data = True
            self.first_data_at = time.monotonic()
            self.upstream_id = chunk["id"] if isinstance(chunk.get("id"), str) else None
        self._last_chunk = chunk
        choices = chunk.get("choices")
        is_changed = False
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict):
                    is_changed |= self._choice(choice)
        usage = usage_from(chunk.get("usage"))
        if usage is not None:
            self._usage = usage
            if not choices:
                return self._usage_chunk(payload)
        return b"data: " + orjson.dumps(chunk) + b"\n\n" if is_changed else event

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Count what a choice brings; whether its tool calls had to be repaired."""
        delta = choice.get("delta")
        is_changed = False
        if isinstance(delta, dict):
            for key in _TEXT_KEYS:
                text = delta.get(key)
                if text:
                    self._count(text)
            calls = delta.get("tool_calls")
            if isinstance(calls, list) and calls:
                is_changed = self._tool_calls(choice, calls)
        elif choice.get("text"):
            self._count(choice["text"])
        if choice.get("finish_reason"):
            self._has_finish_reason = True
            if self._repairs:
                repair = self._repairs.get(choice.get("index") or 0)
                is_changed |= repair is not None and repair.repair_finish(choice)
        return is_changed

    def _tool_calls(self, choice: dict[str, Any], calls: list[Any]) -> bool:
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                self._output_chars += len(function.get("name") or "") + len(function.get("arguments") or "")
        return self._repairs.setdefault(choice.get("index") or 0, ToolCallRepair()).repair(choice, calls)

    def _count(self, text: Any) -> None:
        if isinstance(text, str):
            self._output_chars += len(text)
            if self._extras.keeps_text:
                self.text_parts.append(text)

    def _usage_chunk(self, payload: bytes) -> bytes:
        if not self._wants_usage:
            return b""
        self._owes_chunk = False
        return b"".join((b"data: ", splice.append(payload, EXTENSION_KEY, self._extension()), b"\n\n"))

    def _owed(self) -> bytes:
        """A last chunk of our own, where the client asked for something that no chunk of the upstream could carry."""
        if not self._owes_chunk:
            return b""
        self._owes_chunk = False
        last = self._last_chunk
        chunk: dict[str, Any] = {key: last[key] for key in ("id", "object", "created", "model") if key in last}
        chunk["choices"] = []
        if self._wants_usage:
            chunk["usage"] = openai_usage(self.usage())
        chunk[EXTENSION_KEY] = self._extension()
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _extension(self) -> dict[str, Any]:
        return self._extras.member(self._candidate, self.usage())


def data_of(event: bytes) -> bytes | None:
    """The data of a server-sent event, its lines joined; None where it has none (a comment, say)."""
    if event.startswith(b"data:"):
        data = event[5:].strip()
        if b"\n" not in data and b"\r" not in data:
            return data
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Usage in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
