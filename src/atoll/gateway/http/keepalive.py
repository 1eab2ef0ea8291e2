"""Comments that keep a silent stream's connection open, where the configuration asks for them.

Load balancers cut what is silent for a minute; reasoning models think for longer. A comment never counts as a first
token.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from atoll.gateway.headers import Headers
from atoll.gateway.http.exchange import Exchange

COMMENT: Final = b": keep-alive\n\n"


class KeepAlive:
    """Sends a comment whenever nothing was sent for `period_s`, before the first token too.

    The first comment sends the answer's head: from then on the status is 200, and what fails later is told as an event.
    """

    def __init__(self, exchange: Exchange, period_s: float, head: Headers) -> None:
        self._exchange = exchange
        self._period_s = period_s
        self._head = head
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        exchange = self._exchange
        while not exchange.has_ended:
            waiting_s = exchange.last_sent_at + self._period_s - time.monotonic()
            if waiting_s > 0:
                await asyncio.sleep(waiting_s)
                continue
            if not exchange.has_begun:
                await exchange.begin(200, self._head)
            await exchange.send(COMMENT)
