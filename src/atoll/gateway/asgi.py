"""The application: one raw ASGI callable for the hot endpoints, FastAPI for everything else.

A framework's route costs more than all that the gateway does for a request, so the hot ones never reach it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from typing import Final

from fastapi import FastAPI

from atoll.errors import AtollError, InvalidRequest, RequestError
from atoll.gateway import headers
from atoll.gateway.api import build_api
from atoll.gateway.http.exchange import Exchange, Receive, Scope, Send
from atoll.gateway.parse import Endpoint
from atoll.gateway.state import GatewayState

API_ROOT: Final = "/v1"
HOT: Final = {API_ROOT + endpoint.value: endpoint for endpoint in Endpoint}


class Gateway:
    """What a server runs. Starts `state` when the server starts up, closes it when the server shuts down."""

    def __init__(self, state: GatewayState) -> None:
        self.state = state
        self._cold: FastAPI = build_api(state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        endpoint = HOT.get(exchange.path)
        try:
            self.state.hosts.check(exchange.headers.get(b"host"))
            if endpoint is not None and scope["method"] != "POST":
                raise InvalidRequest(
                    f"{exchange.path!r} takes POST, not {scope['method']}", status=405, code="method_not_allowed"
                )
        except RequestError as error:
            head = headers.of_error(error)
            if error.http_status == 405:
                head.append((b"allow", b"POST"))
            await exchange.answer(error.http_status, head, error.body_bytes())
            return
        if endpoint is None:
            await self._cold(scope, receive, send)
        else:
            await self.state.pipeline.serve(endpoint, exchange)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """ASGI's lifespan. What a person can put right is told in one line, anything else with its traceback."""
        await receive()
        try:
            await self.state.start()
        except AtollError as error:
            sys.stderr.write(f"atoll: {error}\n")
            # uvicorn would add that starting up has failed.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await send({"type": "lifespan.startup.failed", "message": ""})
            return
        _reload_on_hangup(self.state)
        # What lives from here to the end need not be looked at by every full collection, which would stop all requests.
        gc.collect()
        gc.freeze()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.state.close()
        await send({"type": "lifespan.shutdown.complete"})


def _reload_on_hangup(state: GatewayState) -> None:
    """SIGHUP replaces the router; a thread that is not the main one gets no signals."""
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, state.reload_router)
        # A hangup that came while the process started was not heard.
        state.reload_changed_router()
