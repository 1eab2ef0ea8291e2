"""What Prometheus sees. Labels hold names from the configuration and fixed words, never a client's text.

With several workers, `PROMETHEUS_MULTIPROC_DIR` names a folder through which they add up; `server.py` sets it before
any worker imports this.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from atoll.types import Candidate, Usage

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MULTIPROCESS_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"
_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NONE: Final = "none"


class Metrics:
    """The counters of one process. Children are kept: looking one up by its labels costs more than counting."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        place = ["endpoint", "candidate"]
        self._requests = Counter(
            "atoll_requests", "Requests by endpoint, candidate and status", [*place, "status"], registry=registry
        )
        self._latency = Histogram(
            "atoll_latency_seconds", "Until the end of the answer", place, buckets=_BUCKETS_S, registry=registry
        )
        self._ttft = Histogram(
            "atoll_ttft_seconds",
            "Until the first data event of a stream, or the answer's head",
            place,
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._tokens = Counter("atoll_tokens", "Tokens by candidate and kind", ["candidate", "kind"], registry=registry)
        self._cost = Counter("atoll_cost_usd", "US dollars by candidate", ["candidate"], registry=registry)
        self._attempts = Counter(
            "atoll_upstream_attempts",
            "Calls of upstreams by outcome: ok, or an error's code",
            ["upstream", "candidate", "outcome"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "atoll_router_fallbacks",
            "Requests that went to the default candidate, since routing failed",
            registry=registry,
        )
        self._feedback = Counter("atoll_feedback", "Scores received by candidate", ["candidate"], registry=registry)
        self._in_flight = Gauge(
            "atoll_in_flight", "Requests being served", registry=registry, multiprocess_mode="livesum"
        )
        self._ledger_queue = Gauge(
            "atoll_ledger_queue_depth", "Rows that wait to be written", registry=registry, multiprocess_mode="livesum"
        )
        self._loop_tasks = Gauge(
            "atoll_event_loop_tasks", "Tasks of the event loop", registry=registry, multiprocess_mode="livesum"
        )
        self._router = Gauge(
            "atoll_router",
            "1 for the router that decides, by name and version of its artefact",
            ["router", "version"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._router_labels: tuple[str, str] | None = None
        self._request_children: dict[tuple[str, str, int], tuple[Counter, Histogram, Histogram]] = {}
        self._attempt_children: dict[tuple[str, str, str], Counter] = {}
        self._candidate_children: dict[str, tuple[Counter, Counter, Counter, Counter]] = {}

    def begin(self) -> None:
        self._in_flight.inc()

    def end(self, endpoint: str, candidate: str | None, status: int, ttft_s: float | None, latency_s: float) -> None:
        """A request is over. `endpoint` and `candidate` are ours, never a client's words."""
        self._in_flight.dec()
        key = (endpoint, candidate or _NONE, status)
        children = self._request_children.get(key)
        if children is None:
            children = self._request_children[key] = (
                self._requests.labels(key[0], key[1], str(status)),
                self._latency.labels(key[0], key[1]),
                self._ttft.labels(key[0], key[1]),
            )
        requests, latency, ttft = children
        requests.inc()
        latency.observe(latency_s)
        if ttft_s is not None:
            ttft.observe(ttft_s)

    def spent(self, candidate: str, usage: Usage, cost_usd: float) -> None:
        children = self._candidate_children.get(candidate)
        if children is None:
            children = self._candidate_children[candidate] = (
                self._tokens.labels(candidate, "prompt"),
                self._tokens.labels(candidate, "cached"),
                self._tokens.labels(candidate, "completion"),
                self._cost.labels(candidate),
            )
        prompt, cached, completion, cost = children
        prompt.inc(usage.prompt_tokens)
        if usage.cached_tokens:
            cached.inc(usage.cached_tokens)
        completion.inc(usage.completion_tokens)
        if cost_usd > 0:
            cost.inc(cost_usd)

    def attempt(self, candidate: Candidate, outcome: str) -> None:
        key = (candidate.upstream, candidate.name, outcome)
        child = self._attempt_children.get(key)
        if child is None:
            child = self._attempt_children[key] = self._attempts.labels(*key)
        child.inc()

    def router_fallback(self) -> None:
        self._fallbacks.inc()

    def feedback(self, candidate: str) -> None:
        self._feedback.labels(candidate).inc()

    def router(self, name: str, version: str) -> None:
        if self._router_labels is not None and self._router_labels != (name, version):
            self._router.labels(*self._router_labels).set(0)
        self._router_labels = (name, version)
        self._router.labels(name, version).set(1)

    def exposition(self, ledger_queue_depth: int) -> bytes:
        """Everything in Prometheus's text format; with several workers, of all of them."""
        self._ledger_queue.set(ledger_queue_depth)
        self._loop_tasks.set(len(asyncio.all_tasks()))
        if MULTIPROCESS_DIR not in os.environ:
            return generate_latest(self._registry)
        _forget_the_dead(Path(os.environ[MULTIPROCESS_DIR]))
        joined = CollectorRegistry()
        multiprocess.MultiProcessCollector(joined)  # type: ignore[no-untyped-call]
        return generate_latest(joined)


def _forget_the_dead(folder: Path) -> None:
    """A worker that was killed still shows what it had in flight, unless its gauges go with it."""
    for path in folder.glob("gauge_live*_*.db"):
        pid = int(path.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
