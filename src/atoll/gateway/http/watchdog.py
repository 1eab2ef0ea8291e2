"""One timer for all requests: finds those whose client keeps them waiting.

A timer for each request, or for each chunk sent, would cost more than the request does.
"""

from __future__ import annotations

import asyncio
import time

from atoll.gateway.http.exchange import Exchange


class Watchdog:
    """Knows the requests in flight, and interrupts those that wait too long for their client."""

    def __init__(self, stall_s: float, interval_s: float = 0.25) -> None:
        self.in_flight: set[Exchange] = set()
        self._stall_s = stall_s
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def until_idle(self, limit_s: float) -> None:
        """Wait until no request is in flight, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self.in_flight and time.monotonic() < deadline:  # noqa: ASYNC110 - an event would cost every request
            await asyncio.sleep(0.02)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="atoll-watchdog")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            now = time.monotonic()
            for exchange in list(self.in_flight):
                exchange.expire(now, self._stall_s)
