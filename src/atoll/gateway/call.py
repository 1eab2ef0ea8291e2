"""One request along its way: what is known of it so far."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from atoll.gateway import headers
from atoll.gateway.attempts import Answer, Trail
from atoll.gateway.http.exchange import Exchange
from atoll.gateway.http.keepalive import KeepAlive
from atoll.gateway.ledger.row import LedgerRow
from atoll.gateway.parse import Endpoint, ParsedRequest
from atoll.gateway.routing import NAMED_REASON, Plan, decision_body
from atoll.routers.embedding.prompt_tokens import estimate_prompt_tokens
from atoll.types import Candidate, Usage


@dataclass(slots=True)
class Call:
    """Filled step by step by the pipeline; `books.py` writes it down at the end."""

    exchange: Exchange
    endpoint: Endpoint
    row: LedgerRow
    trail: Trail = field(default_factory=Trail)
    request: ParsedRequest | None = None
    plan: Plan | None = None
    answer: Answer | None = None
    usage: Usage | None = None
    keep_alive: KeepAlive | None = None

    @classmethod
    def begin(cls, exchange: Exchange, endpoint: Endpoint) -> Call:
        now = time.time()
        return cls(exchange, endpoint, LedgerRow(_new_id(now), now, exchange.path))

    def estimated_usage(self) -> Usage:
        """The prompt alone, for where no upstream told."""
        assert self.request is not None
        return Usage(estimate_prompt_tokens(self.request.data), is_estimated=True)

    def head(self, content_type: bytes | None = None) -> headers.Headers:
        """Atoll's headers, as far as they are known now."""
        head = [(headers.REQUEST_ID, self.row.request_id.encode())]
        if content_type is not None:
            head.append((b"content-type", content_type))
        if content_type == headers.EVENT_STREAM:
            head.append((b"cache-control", b"no-cache"))
        if self.plan is not None and self.trail.last is not None:
            head += headers.of_decision(self.trail.last.name, self.router, self.reason, self.trail.attempts)
        if self.answer is not None:
            head += headers.to_client(self.answer.response.headers)
        return head

    def extension(self, candidate: Candidate, usage: Usage) -> dict[str, Any]:
        """Atoll's member of an answer's body."""
        assert self.request is not None
        assert self.plan is not None
        member: dict[str, Any] = {
            "request_id": self.row.request_id,
            "model": candidate.name,
            "router": self.router,
            "reason": self.reason,
            "attempts": self.trail.attempts,
            "cost_usd": candidate.cost_usd(usage),
            "is_usage_estimated": usage.is_estimated,
        }
        if self.request.extensions.explain:
            member["decision"] = decision_body(self.plan)
        return member

    @property
    def router(self) -> str | None:
        """The router that chose, with its version; None for a request that named its candidate."""
        if self.plan is None or self.plan.choice is None:
            return None
        decision = self.plan.choice.decision
        return f"{decision.router}/{decision.router_version}"

    @property
    def reason(self) -> str:
        """Why this candidate answers; says so when it is not the one that was chosen first."""
        if self.plan is None or self.plan.choice is None:
            return NAMED_REASON
        decision = self.plan.choice.decision
        served = self.trail.last
        if served is None or served.name == decision.candidate:
            return decision.reason
        why = "failed" if self.trail.faults else "has failed lately"
        return f"{served.name}: {decision.candidate} was chosen and {why}. {decision.reason}"


def _new_id(now_s: float) -> str:
    """Ours, unique, and sorted by time, so that the ledger's index grows at its end."""
    return f"req_{int(now_s * 1000):012x}{os.urandom(8).hex()}"
