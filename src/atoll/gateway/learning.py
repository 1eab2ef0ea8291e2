"""Learning beside the requests: one thread teaches the router and, when told to, opens the artefact anew.

Feedback is in the ledger before it comes here, so nothing is lost when the queue is full or the process ends: the next
start learns it. What waits is taught in one `update` per space. A router that replaces another is first taught what
the ledger holds, then takes its place by one assignment; requests under way keep the one that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import AtollError, DataError
from atoll.gateway.chooser import LearnedChooser
from atoll.gateway.feedback import lessons
from atoll.gateway.ledger.row import LedgerRecord
from atoll.routers.base import Router
from atoll.types import Outcome

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 50_000
"""Outcomes. More than a start recalls."""
DRAIN_S: Final = 5.0
"""How long what waits at the end may take."""
_TRIES: Final = 4
_TRY_AGAIN_S: Final = 0.1

Stamp = tuple[int, ...]
Vectors = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class _Lesson:
    outcome: Outcome
    vector: npt.NDArray[np.float32]
    space: str


class BackgroundLearner:
    """The learner of a process. `reopen` makes the configured router anew from `artefact`, None for one that ships.

    `opened_stamp` is the artefact's stamp from before the chooser's router was read.
    """

    def __init__(
        self,
        chooser: LearnedChooser,
        *,
        reopen: Callable[[], Router],
        artefact: Path | None,
        reload_s: float | None = None,
        past_feedback: Callable[[], Sequence[LedgerRecord]] | None = None,
        opened_stamp: Stamp | None = None,
    ) -> None:
        self._chooser = chooser
        self._reopen = reopen
        self._artefact = artefact
        self._reload_s = reload_s
        self._past_feedback = past_feedback
        self._changed = threading.Condition()
        self._waiting: list[_Lesson] = []
        self._wants_reload = False
        self._is_ending = False
        self._error: str | None = None
        self._loaded = chooser.router.name, chooser.router.version
        self._seen = opened_stamp if opened_stamp is not None else artefact_stamp(artefact)
        self._thread = threading.Thread(target=self._run, name="atoll-learner", daemon=True)
        self._watching: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> tuple[str, str]:
        """Name and version of the router as it was opened: feedback changes the version of what decides."""
        return self._loaded

    def status(self) -> dict[str, Any]:
        """Which router decides, and what was wrong with the one that should have replaced it."""
        router = self._chooser.router
        return {"name": router.name, "version": router.version, "error": self._error}

    async def start(self) -> None:
        self._thread.start()
        if self._reload_s is not None and self._artefact is not None:
            self._watching = asyncio.create_task(self._watch(self._reload_s), name="atoll-router-watch")

    async def close(self) -> None:
        """Teach what waits, for at most `DRAIN_S`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, DRAIN_S)

    def learn(self, outcomes: Sequence[Outcome], embeddings: Vectors, space: str) -> int:
        """Take outcomes for the thread to teach; returns at once how many it will. None when too many wait."""
        known = self._chooser.known(outcomes, space)
        with self._changed:
            if self._is_ending or len(self._waiting) + len(known) > MAX_WAITING:
                _log.warning("the router learns more slowly than feedback comes; it learns %d at a start", len(known))
                return 0
            self._waiting += [_Lesson(outcome, embeddings[outcome.prompt], space) for outcome in known]
            self._changed.notify()
        return len(known)

    def reload(self) -> None:
        """Open the artefact anew, soon; the old router stays when the new one is broken."""
        with self._changed:
            self._wants_reload = True
            self._changed.notify()

    def reload_if_changed(self) -> None:
        """`reload`, if the artefact is another than was read."""
        if artefact_stamp(self._artefact) not in (None, self._seen):
            self.reload()

    async def _watch(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            self.reload_if_changed()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._wants_reload or self._is_ending)
                wants_reload, self._wants_reload = self._wants_reload, False
                lessons_, self._waiting = self._waiting, []
                if not lessons_ and not wants_reload:
                    return
            self._teach(self._chooser.router, lessons_)
            if wants_reload:
                self._replace()

    def _replace(self) -> None:
        try:
            router = self._opened()
            recalled = self._recall(router)
        except Exception as error:
            self._error = f"{error}" if isinstance(error, AtollError) else repr(error)
            _log.warning("the router stays as it is, the new one cannot be used: %s", self._error)
            return
        with self._changed:
            # In the ledger before it was queued here: it is taught already.
            self._waiting = [lesson for lesson in self._waiting if lesson.outcome.prompt not in recalled]
        self._chooser.router = router
        self._error = None
        _log.warning("the router is now %s %s", *self._loaded)

    def _opened(self) -> Router:
        """Read again when the files changed meanwhile: a folder is two files."""
        for _ in range(_TRIES - 1):
            before = artefact_stamp(self._artefact)
            try:
                router = self._reopen()
            except AtollError:
                if before is not None and before == artefact_stamp(self._artefact):
                    self._seen = before
                    raise
            else:
                if before == artefact_stamp(self._artefact):
                    self._seen = before
                    self._loaded = router.name, router.version
                    return router
            time.sleep(_TRY_AGAIN_S)
        if artefact_stamp(self._artefact) is None:
            raise DataError(f"there is no router at {str(self._artefact)!r}")
        raise DataError(f"{str(self._artefact)!r} changes while it is read")

    def _recall(self, router: Router) -> set[str]:
        records = self._past_feedback() if self._past_feedback is not None else []
        for outcomes, vectors, space in lessons(records):
            self._teach(router, [_Lesson(each, vectors[each.prompt], space) for each in outcomes])
        return {record.request_id for record in records}

    def _teach(self, router: Router, waiting: Sequence[_Lesson]) -> None:
        names = {candidate.name for candidate in router.candidates_}
        for space in dict.fromkeys(lesson.space for lesson in waiting):
            told = [one for one in waiting if one.space == space and one.outcome.candidate in names]
            if not told or space not in router.spaces:
                continue
            try:
                vectors = {lesson.outcome.prompt: lesson.vector for lesson in told}
                router.update([lesson.outcome for lesson in told], vectors, space=space)
            except Exception:
                _log.warning("the router could not learn from feedback on %d requests", len(told), exc_info=True)


def artefact_stamp(artefact: Path | None) -> Stamp | None:
    """Changes when the artefact does; None where there is none."""
    if artefact is None:
        return ()
    try:
        files = sorted(artefact.iterdir()) if artefact.is_dir() else [artefact]
        return tuple(part for file in files for part in (file.stat().st_mtime_ns, file.stat().st_size))
    except OSError:
        return None
