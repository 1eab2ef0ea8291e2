"""Which sequences run in the next step, and with how many of their tokens.

A sequence is a list of token ids of which the first `computed` have their keys and values in a row. A step computes,
for each running sequence, some of the rest: the one new token of those that are generating, and parts of prompts up to
a limit, so that a long prompt never keeps the others waiting for more than a step. When memory runs out the youngest
sequence gives its row back and is computed again later, from its prompt and what it has generated; its reader notices
nothing but a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.local_backend.answer import Answer
from atoll.local_backend.batch import Span
from atoll.local_backend.engine import FinishReason
from atoll.local_backend.kv_slabs import KVSlabs, Row
from atoll.local_backend.sampling import Draw

_HEADROOM_TOKENS: Final = 64
"""How much answer a new sequence gets room for at once, so that short answers never move."""
_ALONE_FACTOR: Final = 2
"""How much more of prompts a step takes when nobody waits for a next token: larger parts are computed faster."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of one request, or one text to score or embed."""

    ids: list[int]
    prompt_tokens: int
    max_tokens: int
    on_event: Callable[[Any], None]
    """Called in the engine's thread with each event, and with an exception if the sequence fails."""
    choice: int = 0
    draw: Draw | None = None
    answer: Answer | None = None
    end_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    """For scoring: logits after every token are wanted, and so many of the most likely."""
    wants_hidden: bool = False
    """For embedding: hidden states after every token."""
    gathered: list[Any] = field(default_factory=list)
    row: Row | None = None
    finish_reason: FinishReason | None = None
    is_cancelled: bool = False
    """Set by any thread; obeyed before the next step."""

    @property
    def computed(self) -> int:
        return self.row.used_tokens if self.row is not None else 0

    @property
    def generated_tokens(self) -> int:
        return len(self.ids) - self.prompt_tokens

    @property
    def is_generating(self) -> bool:
        return self.draw is not None


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of a step."""

    sequence: Sequence
    span: Span

    @property
    def prompt_tokens(self) -> int:
        """How many of the span's tokens belong to the prompt. Before the step."""
        start, border = self.sequence.computed, self.sequence.prompt_tokens
        return max(min(start + len(self.span.token_ids), border) - start, 0)

    @property
    def is_last_part(self) -> bool:
        """Whether all the sequence's tokens are computed after this step."""
        return self.sequence.computed + len(self.span.token_ids) == len(self.sequence.ids)


class Scheduler:
    """Waiting and running sequences. Belongs to the engine's thread; only `waiting_count` is read by others."""

    def __init__(self, slabs: KVSlabs, *, max_running: int, max_prompt_tokens_per_step: int) -> None:
        self._slabs = slabs
        self._max_running = max_running
        self._max_prompt_tokens = max_prompt_tokens_per_step
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """Oldest first."""
        self.preempted = 0

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def plan(self) -> list[Work]:
        """The next step's work; empty only when idle. Rows have room for it."""
        self._admit()
        work: list[Work] = []
        prompt_tokens = self._max_prompt_tokens * (1 if self._is_anyone_generating() else _ALONE_FACTOR)
        for sequence in list(self._running):
            if sequence.row is None:  # preempted by an older one in this very loop
                continue
            count = len(sequence.ids) - sequence.computed
            if count > 1:
                count = min(count, prompt_tokens)
                prompt_tokens -= count
            if count and self._make_room(sequence, sequence.computed + count):
                work.append(Work(sequence, _span(sequence, count)))
        return [item for item in work if item.sequence.row is not None]

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over, wherever it stands: its row is free."""
        if sequence.row is not None:
            self._slabs.free(sequence.row)
            sequence.row = None
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def cancelled(self) -> list[Sequence]:
        return [sequence for sequence in self.all() if sequence.is_cancelled]

    def all(self) -> Iterable[Sequence]:
        return [*self._running, *self._waiting]

    def _is_anyone_generating(self) -> bool:
        return any(len(sequence.ids) - sequence.computed == 1 for sequence in self._running)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            row = self._slabs.allocate(self._first_room(sequence))
            if row is None:
                return
            sequence.row = row
            self._running.append(self._waiting.popleft())

    def _first_room(self, sequence: Sequence) -> int:
        rest = max(sequence.max_tokens - sequence.generated_tokens, 0)
        return len(sequence.ids) + min(rest, _HEADROOM_TOKENS)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grow the sequence's row, at the expense of the youngest; False if it was the youngest itself."""
        assert sequence.row is not None
        while not self._slabs.grow(sequence.row, tokens):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._slabs.free(sequence.row)
        sequence.row = None
        sequence.gathered.clear()
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self.preempted += 1


def _span(sequence: Sequence, count: int) -> Span:
    assert sequence.row is not None
    start = sequence.computed
    is_last = start + count == len(sequence.ids)
    return Span(
        sequence.row,
        sequence.ids[start : start + count],
        wants_every_logit=sequence.top_logprobs is not None,
        wants_last_logit=is_last and sequence.is_generating,
    )
