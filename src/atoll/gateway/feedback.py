"""How good an answer was: joined to its ledger row, and taught to the router that chose."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import numpy as np
import numpy.typing as npt

from atoll.errors import NotFound, Unavailable
from atoll.gateway.ledger.row import LedgerRow
from atoll.gateway.metrics import Metrics
from atoll.types import Outcome

_log = logging.getLogger(__name__)


class Ledger(Protocol):
    """What the gateway needs of the ledger."""

    async def start(self) -> None: ...

    @property
    def queue_depth(self) -> int: ...

    def record(self, row: LedgerRow) -> None:
        """Take a finished row; returns at once."""

    async def add_feedback(self, request_id: str, score: float, comment: str | None) -> LedgerRow | None:
        """Join a score to a request, the last one counts; None when there is no such request."""

    async def close(self) -> None:
        """Write what is still queued."""


class Learner(Protocol):
    def learn(self, outcome: Outcome, embedding: npt.NDArray[np.float32], space: str) -> bool:
        """Teach the router one outcome; False where nothing can be learned from it. May raise, and take a while."""


class FeedbackDesk:
    def __init__(self, ledger: Ledger | None, learner: Learner | None, metrics: Metrics) -> None:
        self._ledger = ledger
        self._learner = learner
        self._metrics = metrics

    async def give(self, request_id: str, score: float, comment: str | None) -> bool:
        """Keep a score; whether a router learned from it.

        Raises NotFound for a request that the ledger does not have.
        """
        if self._ledger is None:
            raise Unavailable("Feedback needs the ledger, which is off (ledger.enabled)", code="ledger_off")
        row = await self._ledger.add_feedback(request_id, score, comment)
        if row is None:
            raise NotFound(f"There is no request {request_id[:80]!r} in the ledger", param="request_id")
        if row.served_model is not None:
            self._metrics.feedback(row.served_model)
        return await self._teach(row, score)

    async def _teach(self, row: LedgerRow, score: float) -> bool:
        """Only what the router saw can teach it: a request that named its candidate has no vector."""
        if self._learner is None or row.embedding is None or row.embedding_space is None or row.served_model is None:
            return False
        vector = np.frombuffer(row.embedding, dtype=np.float32)
        outcome = Outcome(
            prompt=row.request_id,
            candidate=row.served_model,
            quality=score,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            cost_usd=row.cost_usd,
            latency_s=row.latency_s,
            propensity=row.propensity,
        )
        try:
            return await asyncio.to_thread(self._learner.learn, outcome, vector, row.embedding_space)
        except Exception:
            _log.warning("the router could not learn from feedback on %s", row.request_id, exc_info=True)
            return False
