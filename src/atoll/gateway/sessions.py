"""Which candidate a conversation is with.

A model that has read a conversation once bills its beginning as cached input; leaving it costs that, and in the
middle of a tool loop it costs the thread as well. In process: with several workers a session may be known to one of
them only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Session:
    candidate: str
    prompt_tokens: int
    """Length of the conversation that the candidate has read so far."""
    seen_at: float


class Sessions:
    """Bounded, and forgets what was not heard of for `ttl_s`. Keys are (API key label, the client's name for it)."""

    def __init__(self, ttl_s: float, max_sessions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._sessions: OrderedDict[tuple[str | None, str], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key_id: str | None, session: str | None) -> Session | None:
        if session is None:
            return None
        found = self._sessions.get((key_id, session))
        if found is None or self._clock() - found.seen_at > self._ttl_s:
            return None
        return found

    def note(self, key_id: str | None, session: str, candidate: str, prompt_tokens: int) -> None:
        """Remember who answered; the longest unheard of is forgotten when there are too many."""
        key = (key_id, session)
        now = self._clock()
        self._sessions[key] = Session(candidate, prompt_tokens, now)
        self._sessions.move_to_end(key)
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= self._max_sessions and now - oldest.seen_at <= self._ttl_s:
                break
            self._sessions.popitem(last=False)
