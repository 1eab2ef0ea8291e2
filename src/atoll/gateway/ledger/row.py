"""One request, as the ledger keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LedgerRow:
    """Filled along the way of a request and recorded once, at its end.

    `request_id` is ours and unique; what an upstream calls its answer is only a column. Every text is bounded by the
    ledger when it is written, which also takes images and vectors out of content: hand it over whole. Content
    (`prompt_json`, `answer_text`) is kept only where `ledger.store_content` is on.
    """

    request_id: str
    started_at: float
    """Seconds since the epoch."""
    endpoint: str
    """The path: `/v1/chat/completions`."""
    key_id: str | None = None
    """Which API key was used (a short id, never the key or its hash)."""
    session: str | None = None
    requested_model: str | None = None
    served_model: str | None = None
    """The candidate that answered, or was tried last."""
    upstream: str | None = None
    upstream_id: str | None = None
    """The id in the upstream's answer: may be empty or repeated."""
    router: str | None = None
    router_version: str | None = None
    decision_json: str | None = None
    """All estimates, scores, propensity and the ranked order; None for requests that named a candidate."""
    propensity: float | None = None
    reason: str | None = None
    preference: float | None = None
    is_streaming: bool = False
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    is_usage_estimated: bool = False
    cost_usd: float | None = None
    ttft_s: float | None = None
    """From the request's arrival to the first data event (streams) or the answer's head."""
    latency_s: float | None = None
    status: int = 0
    """The HTTP status the client got; 499 when it left."""
    error_code: str | None = None
    error_message: str | None = None
    embedding: bytes | None = None
    """float32 vector that the router saw, so that feedback can teach it without the prompt, where there was one."""
    embedding_space: str | None = None
    prompt_json: str | None = None
    answer_text: str | None = None


@dataclass(slots=True)
class LedgerRecord(LedgerRow):
    """A row as it was written, with the feedback that has come for it since."""

    seq: int = 0
    """The order in which rows were written."""
    feedback_score: float | None = None
    feedback_comment: str | None = None
    feedback_at: float | None = None
    """Seconds since the epoch."""
