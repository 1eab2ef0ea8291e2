"""Everything that a gateway process holds, built from the settings and closed in reverse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from atoll.config import OpenAIUpstream, Settings
from atoll.gateway.attempts import Caller, Route
from atoll.gateway.auth import HostCheck, KeyRing
from atoll.gateway.books import Books
from atoll.gateway.catalog import Catalog
from atoll.gateway.embeddings import EmbeddingsEndpoint, TextEmbedder
from atoll.gateway.feedback import FeedbackDesk, Learner, Ledger
from atoll.gateway.health import Health
from atoll.gateway.http.watchdog import Watchdog
from atoll.gateway.ledger.row import LedgerRecord, LedgerRow
from atoll.gateway.metrics import Metrics
from atoll.gateway.pipeline import Pipeline
from atoll.gateway.redact import Redactor, secrets_of
from atoll.gateway.routing import Chooser, RequestRouter
from atoll.gateway.sessions import Sessions
from atoll.gateway.upstreams.base import Upstream

_log = logging.getLogger(__name__)
_LAST_REQUESTS_S: Final = 3.0
"""How long requests that the server has cancelled may take to write their rows."""


class Service(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


class LiveRouter(Protocol):
    """A router that can be replaced while it decides."""

    @property
    def loaded(self) -> tuple[str, str]: ...

    def status(self) -> dict[str, Any]: ...

    def reload(self) -> None: ...

    def reload_if_changed(self) -> None: ...


@dataclass(slots=True)
class Parts:
    """What other modules bring: whoever answers, whoever chooses, whoever remembers.

    `closers` are closed last to first.
    """

    upstreams: Mapping[str, Upstream]
    chooser: Chooser
    embedders: Mapping[str, TextEmbedder] = field(default_factory=dict)
    ledger: Ledger | None = None
    learner: Learner | None = None
    live_router: LiveRouter | None = None
    services: Sequence[Service] = ()
    """What else has to be started and closed."""
    past_feedback: Callable[[], Sequence[LedgerRecord]] | None = None
    """What the router learns from at a start; blocking."""


class GatewayState:
    """One for a process. `start` opens, `close` closes what `start` opened, last first."""

    def __init__(self, settings: Settings, catalog: Catalog, parts: Parts) -> None:
        self.settings = settings
        self.catalog = catalog
        self.started_at = int(time.time())
        self._parts = parts
        self._stack = AsyncExitStack()
        self.keys = KeyRing([key.get_secret_value() for key in settings.server.api_keys])
        self.hosts = HostCheck(settings.server)
        self.redactor = Redactor(secrets_of(settings, catalog.upstreams.values()))
        self.metrics = Metrics()
        self.watchdog = Watchdog(settings.limits.client_stall_s)
        self.health = Health(settings.routing.cooldown_s)
        self.embeddings = EmbeddingsEndpoint(dict(parts.embedders))
        self.feedback = FeedbackDesk(parts.ledger, parts.learner, self.metrics)
        sessions = Sessions(settings.routing.session_ttl_s, settings.routing.max_sessions)
        self.pipeline = Pipeline(
            settings=settings,
            keys=self.keys,
            router=RequestRouter(catalog, parts.chooser, sessions),
            embeddings=self.embeddings,
            caller=Caller(
                _routes(catalog, parts.upstreams),
                self.health,
                self.metrics,
                self.redactor,
                max_attempts=settings.routing.max_attempts,
            ),
            books=Books(settings.ledger, self.metrics, sessions, self._record),
            metrics=self.metrics,
            watchdog=self.watchdog,
            redactor=self.redactor,
        )

    async def start(self) -> None:
        """Raises what a part raises that cannot start; what was started until then is closed."""
        async with AsyncExitStack() as stack:
            ledger: list[Service] = [self._parts.ledger] if self._parts.ledger is not None else []
            for part in [*ledger, *self._parts.upstreams.values(), *self._parts.services]:
                # Closed even when its start fails half-way.
                stack.push_async_callback(part.close)
                await part.start()
            if self._parts.past_feedback is not None:
                recalling = asyncio.create_task(self._recall(self._parts.past_feedback), name="atoll-recall")
                stack.push_async_callback(_end, recalling)
            self.watchdog.start()
            stack.push_async_callback(self.watchdog.stop)
            # Requests that the server cancelled at the end of its patience still write their rows.
            stack.push_async_callback(self.watchdog.until_idle, _LAST_REQUESTS_S)
            self._stack = stack.pop_all()

    async def close(self) -> None:
        await self._stack.aclose()

    async def upstreams_ready(self) -> dict[str, bool]:
        """By name: whether a request could be answered there now."""
        ready = await asyncio.gather(*(upstream.is_ready() for upstream in self._parts.upstreams.values()))
        return dict(zip(self._parts.upstreams, ready, strict=True))

    def router_status(self) -> dict[str, Any] | None:
        return self._parts.live_router.status() if self._parts.live_router is not None else None

    def reload_router(self) -> None:
        """Open the router's artefact anew, soon, without any request noticing."""
        if self._parts.live_router is not None:
            self._parts.live_router.reload()

    def reload_changed_router(self) -> None:
        """`reload_router`, if there is another artefact than was read."""
        if self._parts.live_router is not None:
            self._parts.live_router.reload_if_changed()

    def exposition(self) -> bytes:
        if self._parts.live_router is not None:
            self.metrics.router(*self._parts.live_router.loaded)
        return self.metrics.exposition(self._parts.ledger.queue_depth if self._parts.ledger is not None else 0)

    async def _recall(self, past_feedback: Callable[[], Sequence[LedgerRecord]]) -> None:
        """Learn from earlier feedback while the gateway answers already."""
        try:
            records = await asyncio.to_thread(past_feedback)
            await asyncio.to_thread(self.feedback.teach, records)
        except Exception:
            _log.warning("earlier feedback could not be read; the router starts without it", exc_info=True)

    def _record(self, row: LedgerRow) -> None:
        if self._parts.ledger is not None:
            self._parts.ledger.record(row)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _routes(catalog: Catalog, upstreams: Mapping[str, Upstream]) -> dict[str, Route]:
    routes = {}
    for name, upstream in upstreams.items():
        settings = catalog.upstreams[name]
        gives_usage = settings.stream_usage if isinstance(settings, OpenAIUpstream) else True
        routes[name] = Route(upstream, settings.timeouts, gives_usage)
    return routes
