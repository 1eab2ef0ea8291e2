"""The end of every request: what it used and cost, its ledger row, the counters, and whom its session is with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from atoll.config import LedgerSettings
from atoll.errors import ClientClosed
from atoll.gateway.call import Call
from atoll.gateway.ledger.row import LedgerRow
from atoll.gateway.metrics import Metrics
from atoll.gateway.routing import Plan, decision_body
from atoll.gateway.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Books:
    """Keeps the books of a process."""

    settings: LedgerSettings
    metrics: Metrics
    sessions: Sessions
    record: Callable[[LedgerRow], None]
    """Takes a finished row; never blocks."""

    def close(self, call: Call) -> None:
        """Settle and record a request that is over, whichever way."""
        self._settle(call)
        row, candidate = call.row, call.trail.last
        row.latency_s = call.exchange.elapsed_s()
        row.attempts = call.trail.attempts
        if candidate is not None:
            row.served_model, row.upstream = candidate.name, candidate.upstream
        self._write_request(call)
        if call.plan is not None:
            row.reason = call.reason
            self._write_decision(row, call.plan)
        self._write_answer(call)
        self._write_usage(call)
        self.metrics.end(
            call.endpoint.value, candidate.name if candidate else None, row.status, row.ttft_s, row.latency_s
        )
        self.record(row)

    def _settle(self, call: Call) -> None:
        """What was used: told by the upstream or estimated, delivered in whole or in part."""
        answer = call.answer
        if answer is not None and answer.meter is not None:
            call.usage = answer.meter.usage()
        elif answer is None and call.trail.last is not None and call.row.status == ClientClosed.status:
            # It left while an upstream was at work, which has read the prompt at least.
            call.usage = call.estimated_usage()

    def _write_request(self, call: Call) -> None:
        row, request = call.row, call.request
        if request is None:
            return
        row.requested_model, row.is_streaming = request.model, request.is_streaming
        row.session = request.extensions.session
        if request.is_auto:
            row.preference = request.extensions.preference.quality_weight
        if self.settings.store_content:
            row.prompt_json = request.body.decode("utf-8", "replace")[: self.settings.max_content_chars]

    def _write_decision(self, row: LedgerRow, plan: Plan) -> None:
        choice = plan.choice
        if choice is None:
            return
        decision = choice.decision
        row.router, row.router_version = decision.router, decision.router_version
        row.propensity = decision.propensity
        row.decision_json = orjson.dumps(decision_body(plan)).decode()
        if choice.embedding is not None:
            row.embedding, row.embedding_space = choice.embedding.tobytes(), choice.embedding_space
        if decision.is_fallback:
            self.metrics.router_fallback()

    def _write_answer(self, call: Call) -> None:
        row, answer = call.row, call.answer
        if answer is None:
            return
        meter = answer.meter
        begun_at = answer.head_at if meter is None else meter.first_data_at
        row.ttft_s = begun_at - call.exchange.started_at if begun_at is not None else None
        row.upstream_id = answer.upstream_id if meter is None else meter.upstream_id
        if self.settings.store_content:
            text = "".join(meter.text_parts) if meter is not None else answer.body.decode("utf-8", "replace")
            row.answer_text = text[: self.settings.max_content_chars]

    def _write_usage(self, call: Call) -> None:
        row, usage, candidate = call.row, call.usage, call.trail.last
        if usage is None:
            return
        row.prompt_tokens, row.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        row.completion_tokens, row.reasoning_tokens = usage.completion_tokens, usage.reasoning_tokens
        row.is_usage_estimated = usage.is_estimated
        row.cost_usd = candidate.cost_usd(usage) if candidate is not None else 0.0
        if row.served_model is not None:
            self.metrics.spent(row.served_model, usage, row.cost_usd)
        if row.session is not None and candidate is not None and row.status == 200:
            self.sessions.note(row.key_id, row.session, candidate.name, usage.total_tokens)
