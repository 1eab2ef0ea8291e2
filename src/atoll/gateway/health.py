"""Which candidates have failed lately, and when they may be tried again.

Two kinds of pause. An upstream that names a time (`Retry-After`) is not called before it. One that merely failed is
tried last for a while, and so is still called when nothing better is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from atoll.types import Candidate

MAX_PAUSE_S: Final = 600.0
"""An upstream that asks for longer gets one probe after this time: plans and quotas change."""

_Place = tuple[str, str]


class Health:
    """Pauses by upstream and model: two efforts of one model share its limits.

    In process; times are monotonic seconds.
    """

    def __init__(self, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._closed_until: dict[_Place, float] = {}
        self._cooling_until: dict[_Place, float] = {}

    def failed(self, candidate: Candidate, retry_after_s: float | None = None) -> None:
        """Pause a candidate: for as long as its upstream said, or for the usual while."""
        now = self._clock()
        place = (candidate.upstream, candidate.model)
        if retry_after_s is not None:
            self._closed_until[place] = now + min(retry_after_s, MAX_PAUSE_S)
        self._cooling_until[place] = now + max(self._cooldown_s, min(retry_after_s or 0.0, MAX_PAUSE_S))

    def succeeded(self, candidate: Candidate) -> None:
        if self._cooling_until:
            place = (candidate.upstream, candidate.model)
            self._closed_until.pop(place, None)
            self._cooling_until.pop(place, None)

    def closed_for_s(self, candidate: Candidate) -> float:
        """Seconds until the upstream lets this candidate be called again; 0 when it may be called now."""
        until = self._closed_until.get((candidate.upstream, candidate.model), 0.0)
        return max(0.0, until - self._clock()) if until else 0.0

    def ordered(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The same candidates, those in a pause last, the soonest to end it first."""
        ranked = list(candidates)
        if not self._cooling_until:
            return ranked
        now = self._clock()
        return sorted(ranked, key=lambda one: self._pause_s(one, now))

    def pauses_s(self, candidates: Iterable[Candidate]) -> dict[str, float]:
        """Seconds of pause left, by name, for those that are in one."""
        now = self._clock()
        pauses = {candidate.name: self._pause_s(candidate, now) for candidate in candidates}
        return {name: pause for name, pause in pauses.items() if pause > 0}

    def _pause_s(self, candidate: Candidate, now: float) -> float:
        return max(0.0, self._cooling_until.get((candidate.upstream, candidate.model), 0.0) - now)
