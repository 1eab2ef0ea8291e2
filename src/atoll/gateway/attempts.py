"""Calling upstreams: the one place that tries again.

A request that named its candidate is sent once, and once more when the connection was lost before any byte of an
answer. A routed request goes along its ranked candidates until one answers or the bound is reached. Nothing of an
answer has gone to the client by then: for a stream, an attempt has succeeded when its first data event is here.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from atoll.config import Timeouts
from atoll.errors import RateLimited, RequestError, UpstreamFault, UpstreamMalformed, UpstreamUnreachable
from atoll.gateway import splice
from atoll.gateway.faults import Remedy, fault_of_answer, fault_of_event, most_useful, remedy_for
from atoll.gateway.health import Health
from atoll.gateway.meter import Extras, StreamMeter
from atoll.gateway.metrics import Metrics
from atoll.gateway.parse import EXTENSION_KEY, Endpoint, ParsedRequest
from atoll.gateway.redact import Redactor
from atoll.gateway.upstreams.base import Upstream, UpstreamRequest, UpstreamResponse
from atoll.gateway.usage import usage_from
from atoll.types import Candidate, Usage

_log = logging.getLogger(__name__)
_REMOVED: Final = frozenset({EXTENSION_KEY})
_LARGE_ANSWER_BYTES: Final = 1_000_000
"""Embeddings of many texts: parsing them would hold up every other request."""
_TAIL_BYTES: Final = 2000
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*\})')


@dataclass(slots=True)
class Answer:
    """An answer that has begun. `close` it in every case."""

    candidate: Candidate
    response: UpstreamResponse
    head_at: float = field(default_factory=time.monotonic)
    body: bytes = b""
    """Of a non-stream answer, whole; what it says of itself follows."""
    usage: Usage | None = None
    upstream_id: str | None = None
    meter: StreamMeter | None = None
    begun: bytes = b""
    """Of a stream: the events that are here already."""
    chunks: AsyncIterator[bytes] | None = None

    async def close(self) -> None:
        await self.response.close()


@dataclass(slots=True)
class Trail:
    """What the attempts of one request met; filled as they go, so that it tells the truth after a cancellation too."""

    attempts: int = 0
    last: Candidate | None = None
    faults: list[tuple[Candidate, RequestError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Route:
    """How one upstream is called."""

    upstream: Upstream
    timeouts: Timeouts
    gives_stream_usage: bool
    """Whether it understands `stream_options.include_usage`."""


class Caller:
    """Makes the attempts of all requests of a process."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        health: Health,
        metrics: Metrics,
        redactor: Redactor,
        *,
        max_attempts: int,
    ) -> None:
        self._routes = routes
        self._health = health
        self._metrics = metrics
        self._redactor = redactor
        self._max_attempts = max_attempts

    async def call(
        self,
        request: ParsedRequest,
        candidates: Sequence[Candidate],
        headers: Mapping[str, str],
        extras: Extras,
        trail: Trail,
    ) -> Answer:
        """An answer of the first of `candidates` (ranked) that gives one. Raises the most useful of their errors."""
        remaining = self._health.ordered(candidates) if len(candidates) > 1 else list(candidates)
        may_repeat = len(remaining) == 1
        while remaining and trail.attempts < self._max_attempts:
            candidate = remaining[0]
            try:
                self._refuse_closed(candidate)
                return await self._attempt(request, candidate, headers, extras, trail)
            except RequestError as fault:
                if may_repeat and isinstance(fault, UpstreamUnreachable) and trail.attempts == 1:
                    continue
                trail.faults.append((candidate, fault))
                remaining = _left_after(fault, candidate, remaining[1:])
        raise most_useful(trail.faults)

    def _refuse_closed(self, candidate: Candidate) -> None:
        closed_for_s = self._health.closed_for_s(candidate)
        if closed_for_s:
            raise RateLimited(
                f"The upstream {candidate.upstream!r} asked not to be called for {candidate.name!r} "
                f"for another {closed_for_s:.0f} s",
                retry_after_s=closed_for_s,
            )

    async def _attempt(
        self,
        request: ParsedRequest,
        candidate: Candidate,
        headers: Mapping[str, str],
        extras: Extras,
        trail: Trail,
    ) -> Answer:
        trail.attempts += 1
        trail.last = candidate
        try:
            answer = await self._send(request, candidate, headers, extras)
        except RequestError as fault:
            self._metrics.attempt(candidate, type(fault).code or f"status_{fault.http_status}")
            if remedy_for(fault) is Remedy.ANOTHER:
                self._health.failed(candidate, fault.retry_after_s)
            raise
        self._metrics.attempt(candidate, "ok")
        self._health.succeeded(candidate)
        return answer

    async def _send(
        self, request: ParsedRequest, candidate: Candidate, headers: Mapping[str, str], extras: Extras
    ) -> Answer:
        route = self._routes[candidate.upstream]
        attempt = UpstreamRequest(
            path=request.endpoint.value,
            body=body_for(request, candidate, gives_stream_usage=route.gives_stream_usage),
            is_streaming=request.is_streaming,
            timeouts=route.timeouts,
            headers=headers,
        )
        response = await self._open(route.upstream, attempt, candidate)
        try:
            if not 200 <= response.status < 300:
                body = await response.read()
                raise fault_of_answer(candidate, response.status, response.headers, body, self._redactor)
            if not request.is_streaming:
                return self._whole(candidate, response, await response.read())
            return await self._begin_stream(request, candidate, response, extras)
        except BaseException:
            await response.close()
            raise

    async def _open(self, upstream: Upstream, attempt: UpstreamRequest, candidate: Candidate) -> UpstreamResponse:
        """Send. A mistake inside an upstream's client must not keep the other candidates from answering."""
        try:
            return await upstream.send(attempt, candidate)
        except RequestError:
            raise
        except Exception as error:
            _log.exception("calling the upstream %r failed", upstream.name)
            raise UpstreamFault(
                f"The upstream {candidate.upstream!r} could not be called for {candidate.name!r} "
                f"({type(error).__name__}). The gateway's log has the details"
            ) from error

    def _whole(self, candidate: Candidate, response: UpstreamResponse, body: bytes) -> Answer:
        """A whole answer, read as far as the books need it."""
        data = summary_of(body)
        if data is None:
            raise UpstreamMalformed(
                f"The upstream {candidate.upstream!r} answered {response.status} for {candidate.name!r} without JSON: "
                + self._redactor.text(body[:400].decode("utf-8", "replace"), 200)
            )
        if data.get("error"):
            raise fault_of_event(candidate, data["error"], self._redactor)
        return Answer(
            candidate,
            response,
            body=body,
            usage=usage_from(data.get("usage")),
            upstream_id=data["id"] if isinstance(data.get("id"), str) else None,
        )

    async def _begin_stream(
        self, request: ParsedRequest, candidate: Candidate, response: UpstreamResponse, extras: Extras
    ) -> Answer:
        """Read on to the first data event: until then another candidate may still take over."""
        kind = response.headers.get("content-type", "")
        if kind and not kind.startswith("text/event-stream"):
            raise self._no_stream(candidate, kind, await response.read())
        meter = StreamMeter(candidate, wants_usage=request.wants_usage, extras=extras, redactor=self._redactor)
        chunks = response.chunks()
        begun = b""
        async for data in chunks:
            begun += meter.feed(data)
            if meter.fault is not None:
                raise meter.fault
            if meter.has_data:
                return Answer(candidate, response, meter=meter, begun=begun, chunks=chunks)
        raise UpstreamMalformed(
            f"The upstream {candidate.upstream!r} ended its stream for {candidate.name!r} without an event"
        )

    def _no_stream(self, candidate: Candidate, kind: str, body: bytes) -> RequestError:
        """What another kind of answer to a stream request means."""
        summary = summary_of(body)
        if summary is not None and summary.get("error"):
            return fault_of_event(candidate, summary["error"], self._redactor)
        return UpstreamMalformed(
            f"The upstream {candidate.upstream!r} was asked for a stream and answered {kind[:80]!r}: "
            + self._redactor.text(body[:400].decode("utf-8", "replace"), 200)
        )


def summary_of(body: bytes) -> dict[str, Any] | None:
    """What a whole answer says of itself; None where it is no JSON object. Of a huge one only the usage is read."""
    if len(body) > _LARGE_ANSWER_BYTES:
        found = _USAGE.findall(body[-_TAIL_BYTES:]) if body.startswith(b"{") and body.rstrip().endswith(b"}") else None
        return None if found is None else {"usage": orjson.loads(found[-1])} if found else {}
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return data if isinstance(data, dict) else None


def body_for(request: ParsedRequest, candidate: Candidate, *, gives_stream_usage: bool) -> bytes:
    """The client's bytes as `candidate` must see them."""
    # The model is set even where it is equal: a second occurrence of the key may name another.
    values: dict[str, object] = {"model": candidate.model}
    remove = _REMOVED
    if candidate.effort is not None and request.endpoint is Endpoint.CHAT:
        values["reasoning_effort"] = candidate.effort
    if request.is_streaming:
        options = request.data.get("stream_options")
        if gives_stream_usage and not request.wants_usage:
            values["stream_options"] = {**(options or {}), "include_usage": True}
        elif not gives_stream_usage and options is not None:
            remove = _REMOVED | {"stream_options"}
    return splice.splice(request.body, request.data, values, remove)


def _left_after(fault: RequestError, failed: Candidate, remaining: list[Candidate]) -> list[Candidate]:
    """Who may still be tried."""
    remedy = remedy_for(fault)
    if remedy is Remedy.ANOTHER:
        return remaining
    if remedy is Remedy.MORE_CONTEXT:
        held = failed.context_tokens or 0
        return [one for one in remaining if one.context_tokens is None or one.context_tokens > held]
    return []
