"""How good an answer was: joined to its ledger row, and taught to the router that chose.

What a router has learned is not kept in a file of its own: the ledger has it all, and a gateway that starts learns from
the feedback that is there, whatever router it has now. With several workers, one that is told teaches its own router at
once; the others know with the next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from atoll.errors import NotFound, Unavailable
from atoll.gateway.ledger.row import LedgerRecord, LedgerRow
from atoll.gateway.metrics import Metrics
from atoll.types import Outcome

_log = logging.getLogger(__name__)

MAX_RECALLED: Final = 20_000
"""The latest so many scores are learned from at a start."""


class Ledger(Protocol):
    """What the gateway needs of the ledger."""

    async def start(self) -> None: ...

    @property
    def queue_depth(self) -> int: ...

    def record(self, row: LedgerRow) -> None:
        """Take a finished row; returns at once."""

    async def add_feedback(self, request_id: str, score: float, comment: str | None) -> LedgerRecord | None:
        """Join a score to a request, the last one counts; None when there is no such request."""

    async def close(self) -> None:
        """Write what is still queued."""


class Learner(Protocol):
    def learn(self, outcomes: Sequence[Outcome], embeddings: Mapping[str, npt.NDArray[np.float32]], space: str) -> int:
        """Teach the router; how many outcomes it could learn from. May raise, and take a while."""


class FeedbackDesk:
    def __init__(self, ledger: Ledger | None, learner: Learner | None, metrics: Metrics) -> None:
        self._ledger = ledger
        self._learner = learner
        self._metrics = metrics

    async def give(self, request_id: str, score: float, comment: str | None) -> bool:
        """Keep a score; whether a router learned from it. Raises NotFound for a request that is not in the ledger."""
        if self._ledger is None:
            raise Unavailable("Feedback needs the ledger, which is off (ledger.enabled)", code="ledger_off")
        record = await self._ledger.add_feedback(request_id, score, comment)
        if record is None:
            raise NotFound(f"There is no request {request_id[:80]!r} in the ledger", param="request_id")
        if record.served_model is not None:
            self._metrics.feedback(record.served_model)
        return await asyncio.to_thread(self.teach, [record]) > 0

    def teach(self, records: Sequence[LedgerRecord]) -> int:
        """Teach the router what `records` tell; how many it learned from. Never raises.

        Only what the router saw can teach it: a request that named its candidate has no vector.
        """
        if self._learner is None:
            return 0
        learned = 0
        for outcomes, vectors, space in lessons(records):
            try:
                learned += self._learner.learn(outcomes, vectors, space)
            except Exception:
                _log.warning("the router could not learn from feedback on %d requests", len(outcomes), exc_info=True)
        return learned


def lessons(
    records: Sequence[LedgerRecord],
) -> Iterator[tuple[list[Outcome], dict[str, npt.NDArray[np.float32]], str]]:
    """What `records` can teach, by space of their vectors: outcomes, vectors by request, space."""
    for space in dict.fromkeys(record.embedding_space for record in records):
        telling = [record for record in records if record.embedding_space == space and record.embedding is not None]
        if space is not None and telling:
            yield list(map(_outcome, telling)), _vectors(telling), space


def _outcome(record: LedgerRecord) -> Outcome:
    return Outcome(
        prompt=record.request_id,
        candidate=record.served_model or "",
        quality=record.feedback_score,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cost_usd=record.cost_usd,
        latency_s=record.latency_s,
        propensity=record.propensity,
    )


def _vectors(records: Sequence[LedgerRecord]) -> dict[str, npt.NDArray[np.float32]]:
    return {record.request_id: np.frombuffer(record.embedding or b"", dtype=np.float32) for record in records}
