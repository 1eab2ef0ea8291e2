"""The parts of a gateway process, made from the settings: upstreams, embedder, router, ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from atoll.config import Settings
from atoll.gateway.catalog import Catalog
from atoll.gateway.chooser import LearnedChooser
from atoll.gateway.feedback import MAX_RECALLED
from atoll.gateway.learning import BackgroundLearner, artefact_stamp
from atoll.gateway.ledger import Filters, Ledger, LedgerRecord
from atoll.gateway.router_file import open_router
from atoll.gateway.routing import RequestRouter
from atoll.gateway.sessions import Sessions
from atoll.gateway.state import Parts
from atoll.gateway.upstreams.factory import Surroundings, build_upstream
from atoll.routers.base import Router
from atoll.routers.embedding.service import EmbeddingService

EMBEDDER_NAMES: Final = {"static": "atoll-static", "minilm": "all-minilm-l6-v2"}
"""What `/v1/embeddings` calls the embedders."""


def surroundings(settings: Settings) -> Surroundings:
    """Where models, sockets and logs of this configuration are."""
    return Surroundings(
        cache_dir=settings.data_path / "models",
        runtime_dir=settings.data_path / "run",
        max_response_bytes=settings.limits.max_response_bytes,
    )


def build_parts(settings: Settings, catalog: Catalog) -> Parts:
    """Starts nothing. Raises DataError for a router that cannot be read, MissingExtraError for a missing part."""
    embedder = _embedder(settings)
    path = settings.routing.router.path
    artefact = path.expanduser() if path is not None else None
    opened_stamp = artefact_stamp(artefact)
    chooser = _chooser(settings, catalog, embedder)
    around = surroundings(settings)
    ledger = Ledger(settings.ledger, settings.data_path) if settings.ledger.enabled else None
    past_feedback = partial(_past_feedback, ledger) if ledger is not None else None
    learner = BackgroundLearner(
        chooser,
        reopen=partial(_router, settings, catalog, embedder),
        artefact=artefact,
        opened_stamp=opened_stamp,
        reload_s=settings.routing.reload_s,
        past_feedback=past_feedback,
    )
    return Parts(
        upstreams={name: build_upstream(name, upstream, around) for name, upstream in catalog.upstreams.items()},
        chooser=chooser,
        learner=learner,
        embedders={EMBEDDER_NAMES[settings.routing.embedder.kind]: embedder},
        ledger=ledger,
        services=(embedder, learner),
        live_router=learner,
        past_feedback=past_feedback,
    )


def _past_feedback(ledger: Ledger) -> list[LedgerRecord]:
    return ledger.reader.tail(MAX_RECALLED, Filters(has_feedback=True))


@asynccontextmanager
async def open_request_router(settings: Settings, catalog: Catalog) -> AsyncIterator[RequestRouter]:
    """Routing alone, without upstreams or ledger: for commands that only decide."""
    embedder = _embedder(settings)
    sessions = Sessions(settings.routing.session_ttl_s, settings.routing.max_sessions)
    router = RequestRouter(catalog, _chooser(settings, catalog, embedder), sessions)
    await embedder.start()
    try:
        yield router
    finally:
        await embedder.close()


def _embedder(settings: Settings) -> EmbeddingService:
    return EmbeddingService(settings.routing.embedder, surroundings(settings).cache_dir)


def _chooser(settings: Settings, catalog: Catalog, embedder: EmbeddingService) -> LearnedChooser:
    return LearnedChooser(_router(settings, catalog, embedder), embedder, exploration=settings.routing.exploration)


def _router(settings: Settings, catalog: Catalog, embedder: EmbeddingService) -> Router:
    return open_router(settings, catalog, embedder.fallback_space, embedder_space=embedder.space)
