"""Embeds texts of concurrent requests together, in one worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.routers.embedding.base import Embedder, Vectors

Vector = npt.NDArray[np.float32]
_API_CHUNK = 8
"""Texts of one bulk job at a time, so that a request waiting to be routed is never behind more than these."""


@dataclass(slots=True)
class BatcherStats:
    batches: int = 0
    batched_texts: int = 0
    dropped_texts: int = 0
    """Left the queue unread, since nobody waited for them any more."""


class _Waiting:
    """A text in the queue, and how many requests wait for it."""

    __slots__ = ("future", "is_running", "text", "waiters")

    def __init__(self, text: str, future: asyncio.Future[Vector]) -> None:
        self.text = text
        self.future = future
        self.waiters = 0
        self.is_running = False


class MicroBatcher:
    """Collects texts for `window_s`, or until `max_batch`, or while a batch runs. Equal texts are embedded once.

    Lives on one event loop. `embedder` is only ever called in the worker thread.
    """

    def __init__(
        self, embedder: Embedder, *, window_s: float, max_batch: int, keep: Callable[[str, Vector], None]
    ) -> None:
        """`keep` gets every text's vector, also when nobody waits for it any more."""
        self.stats = BatcherStats()
        self._embedder = embedder
        self._keep = keep
        self._window_s = window_s
        self._max_batch = max_batch
        self._waiting: dict[str, _Waiting] = {}
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="atoll-embed")
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    async def embed(self, text: str, time_limit_s: float) -> Vector | None:
        """The vector, or None when it was not there in time. Raises what the embedder raised."""
        waiting = self._enqueue(text)
        waiting.waiters += 1
        try:
            await asyncio.wait((waiting.future,), timeout=time_limit_s)
        finally:
            waiting.waiters -= 1
            if waiting.waiters == 0 and not waiting.is_running and not waiting.future.done():
                self._drop(waiting)
        return waiting.future.result() if waiting.future.done() and not waiting.future.cancelled() else None

    async def embed_bulk(self, texts: Sequence[str]) -> Vectors:
        """All vectors, however long it takes, without holding up `embed` by more than a few texts."""
        loop = asyncio.get_running_loop()
        vectors = np.empty((len(texts), self._embedder.dimension), dtype=np.float32)
        for start in range(0, len(texts), _API_CHUNK):
            chunk = texts[start : start + _API_CHUNK]
            vectors[start : start + len(chunk)] = await loop.run_in_executor(self._worker, self._embedder.embed, chunk)
        return vectors

    async def close(self) -> None:
        """Let the running batch end; what still waits gets no vector."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiting in list(self._waiting.values()):
            if not waiting.is_running:
                self._drop(waiting)
        if self._running is not None:
            await asyncio.wait((self._running,))
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, text: str) -> _Waiting:
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(text)
        if waiting is None:
            waiting = _Waiting(text, loop.create_future())
            if self._is_closed:
                waiting.future.cancel()
                return waiting
            self._waiting[text] = waiting
            self._schedule(loop)
        return waiting

    def _drop(self, waiting: _Waiting) -> None:
        waiting.future.cancel()
        self._waiting.pop(waiting.text, None)
        self.stats.dropped_texts += 1

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._running is not None:
            return
        if len(self._waiting) >= self._max_batch or self._window_s == 0:
            self._start(loop)
        elif self._timer is None:
            self._timer = loop.call_later(self._window_s, self._start, loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is None and self._waiting:
            self._running = loop.create_task(self._run(loop))

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while self._waiting and not self._is_closed:
                await self._run_batch(loop, list(self._waiting.values())[: self._max_batch])
        finally:
            self._running = None

    async def _run_batch(self, loop: asyncio.AbstractEventLoop, batch: list[_Waiting]) -> None:
        for waiting in batch:
            waiting.is_running = True
        self.stats.batches += 1
        self.stats.batched_texts += len(batch)
        try:
            vectors = await loop.run_in_executor(
                self._worker, self._embedder.embed, [waiting.text for waiting in batch]
            )
        except Exception as error:  # An embedder may fail in any way; each request that waits is told, and none hangs.
            for waiting in batch:
                waiting.future.set_exception(error)
                waiting.future.exception()  # Nobody may be waiting any more; that is no news to asyncio.
        else:
            for waiting, vector in zip(batch, vectors, strict=True):
                own = vector.copy()  # Not a view, which would keep the whole batch in memory.
                self._keep(waiting.text, own)
                waiting.future.set_result(own)
        finally:
            for waiting in batch:
                waiting.future.cancel()  # Only where this task was cancelled; else it is done.
                del self._waiting[waiting.text]
