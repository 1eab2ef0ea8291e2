"""Embedding as the gateway uses it: asynchronous, cached, in time, and never failing a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from atoll.config import EmbedderSettings
from atoll.errors import InvalidRequest, RateLimited
from atoll.routers.embedding.base import Embedder, Vectors
from atoll.routers.embedding.batcher import MicroBatcher
from atoll.routers.embedding.cache import VectorCache
from atoll.routers.embedding.load import load_embedder
from atoll.routers.embedding.static import StaticEmbedder

CACHE_BYTES = 32 * 2**20
MAX_API_TEXTS = 2048
"""Of one call, as at OpenAI."""
MAX_API_TEXTS_WAITING = 4 * MAX_API_TEXTS
"""Of all calls together; the next call is refused."""
_MODEL_THREADS = 1
"""Several would halve the time on an idle machine and multiply it by ten on a busy one: they wait for each other."""
_SLOW_API_TEXTS = 32
"""The static embedder does so many in line; more go to a thread."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Embedded:
    """A unit vector of shape (dimension,), read-only, and the space it lies in."""

    vector: npt.NDArray[np.float32]
    space: str


@dataclass(slots=True)
class EmbeddingStats:
    """Counts since the start. `timeouts` and `failures` were answered by the static embedder."""

    cache_hits: int = 0
    cache_misses: int = 0
    timeouts: int = 0
    failures: int = 0


class EmbeddingService:
    """The configured embedder behind a cache. Lives on one event loop; call `start` first and `close` last.

    With `kind: static` everything happens in line. With `kind: minilm` texts of concurrent requests are embedded
    together in a worker thread, and a text that takes longer than `time_limit_s`, or fails, gets the static
    embedder's vector: its `space` tells.
    """

    def __init__(self, settings: EmbedderSettings, cache_dir: Path, *, model: Embedder | None = None) -> None:
        """`cache_dir` keeps MiniLM's int8 form. `model` takes the place of MiniLM (for `kind: minilm`)."""
        self.stats = EmbeddingStats()
        self._settings = settings
        self._cache_dir = cache_dir
        self._static = StaticEmbedder()
        self._model = model if settings.kind == "minilm" else None
        self._batcher: MicroBatcher | None = None
        self._cache = VectorCache(settings.cache_entries, CACHE_BYTES)
        self._api_texts_waiting = 0

    @property
    def space(self) -> str:
        """The space of vectors when nothing is late or broken."""
        return self._static.space if self._model is None else self._model.space

    @property
    def fallback_space(self) -> str:
        """The space of vectors when something is."""
        return self._static.space

    @property
    def dimension(self) -> int:
        return self._static.dimension if self._model is None else self._model.dimension

    async def start(self) -> None:
        """Load the model, off the event loop. Raises MissingExtraError when it is not installed."""
        if self._settings.kind == "static" or self._batcher is not None:
            return
        if self._model is None:
            self._model = await asyncio.to_thread(
                load_embedder,
                self._settings.kind,
                dtype=self._settings.dtype,
                cache_dir=self._cache_dir,
                threads=_MODEL_THREADS,
            )
        self._batcher = MicroBatcher(
            self._model,
            window_s=self._settings.batch_window_s,
            max_batch=self._settings.max_batch,
            keep=self._cache.put,
        )

    async def warm(self) -> None:
        """Do everything once, so that the first request is as fast as the next."""
        self._static.embed(["warm"])
        if self._batcher is not None:
            await self._batcher.embed_bulk(["warm", "warm " * 200])

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
            self._batcher = None

    async def embed(self, text: str) -> Embedded:
        """The vector of one text. Never raises for any text; with `minilm` takes little longer than the time limit."""
        cached = self._cache.get(text)
        if cached is not None:
            self.stats.cache_hits += 1
            return Embedded(cached, self.space)
        self.stats.cache_misses += 1
        if self._batcher is None:
            return self._embed_static(text)
        return await self._embed_by_model(self._batcher, text)

    async def embed_many(self, texts: Sequence[str]) -> list[Embedded]:
        """All in one space: when one text was late or failed, all are the static embedder's."""
        embedded = list(await asyncio.gather(*map(self.embed, texts)))
        if len({each.space for each in embedded}) > 1:
            return [self._embed_static(text) for text in texts]
        return embedded

    async def embed_api(self, texts: Sequence[str]) -> Vectors:
        """Vectors of shape (len(texts), dimension), always of the configured embedder, however long it takes.

        For `/v1/embeddings`. Raises InvalidRequest for too many texts, RateLimited when too many wait already, and
        whatever the model raises.
        """
        if len(texts) > MAX_API_TEXTS:
            raise InvalidRequest(
                f"{len(texts)} texts are too many for one call; send at most {MAX_API_TEXTS}", param="input"
            )
        if self._api_texts_waiting + len(texts) > MAX_API_TEXTS_WAITING:
            raise RateLimited(
                f"{self._api_texts_waiting} texts wait to be embedded already; try again in a second", retry_after_s=1.0
            )
        self._api_texts_waiting += len(texts)
        try:
            if self._batcher is not None:
                return await self._batcher.embed_bulk(texts)
            if len(texts) > _SLOW_API_TEXTS:
                return await asyncio.to_thread(self._static.embed, texts)
            return self._static.embed(texts)
        finally:
            self._api_texts_waiting -= len(texts)

    def snapshot(self) -> dict[str, int]:
        """Every count by name, for metrics."""
        counts = asdict(self.stats) | {"cache_entries": len(self._cache), "cache_bytes": self._cache.size_bytes}
        return counts if self._batcher is None else counts | asdict(self._batcher.stats)

    def _embed_static(self, text: str) -> Embedded:
        vector = self._static.embed([text])[0]
        if self._settings.kind == "static":
            self._cache.put(text, vector)
        return Embedded(vector, self._static.space)

    async def _embed_by_model(self, batcher: MicroBatcher, text: str) -> Embedded:
        try:
            vector = await batcher.embed(text, self._settings.time_limit_s)
        except Exception as error:  # Routing goes on with the static embedder, whatever befell the model.
            self._note_failure(error)
            return self._embed_static(text)
        if vector is None:
            self.stats.timeouts += 1
            return self._embed_static(text)
        return Embedded(vector, self.space)

    def _note_failure(self, error: Exception) -> None:
        self.stats.failures += 1
        if self.stats.failures & (self.stats.failures - 1) == 0:  # At 1, 2, 4, 8, …: told, but never a flood.
            _log.warning(
                "the embedding model has failed %d times; the static embedder answers: %r", self.stats.failures, error
            )
