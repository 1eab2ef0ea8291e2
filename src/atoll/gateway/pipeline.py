"""The way of a request: authenticate, parse, route, call, stream back, settle, record.

One page, from socket to answer: `_serve` has the steps in their order, and what a step does is in the module it calls.
However a request ends, it is answered once, released once and recorded once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import orjson

from atoll.config import Settings
from atoll.errors import ClientClosed, InternalFault, RequestError
from atoll.gateway import headers, splice
from atoll.gateway.attempts import Answer, Caller
from atoll.gateway.auth import KeyRing
from atoll.gateway.books import Books
from atoll.gateway.call import Call
from atoll.gateway.embeddings import EmbeddingsEndpoint
from atoll.gateway.faults import MAX_MESSAGE_CHARS
from atoll.gateway.http.exchange import Exchange
from atoll.gateway.http.keepalive import KeepAlive
from atoll.gateway.http.watchdog import Watchdog
from atoll.gateway.meter import Extras, StreamMeter
from atoll.gateway.metrics import Metrics
from atoll.gateway.parse import EXTENSION_KEY, Endpoint, ParsedRequest, parse_request
from atoll.gateway.redact import Redactor
from atoll.gateway.routing import Plan, RequestRouter, decision_body

_log = logging.getLogger(__name__)
_TELL_LIMIT_S: Final = 5.0
"""How long a client may take to read its error."""
_AFTER_DONE_S: Final = 1.0
"""How long an upstream may take to end its body after `[DONE]`; then its connection is dropped."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Serves the hot endpoints. One for a process."""

    settings: Settings
    keys: KeyRing
    router: RequestRouter
    embeddings: EmbeddingsEndpoint
    caller: Caller
    books: Books
    metrics: Metrics
    watchdog: Watchdog
    redactor: Redactor

    async def serve(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Serve one request, whatever happens to it."""
        call = Call.begin(exchange, endpoint)
        self.watchdog.in_flight.add(exchange)
        self.metrics.begin()
        try:
            await self._serve(call)
        except RequestError as error:
            await self._tell(call, error)
        except asyncio.CancelledError:
            await self._tell(call, exchange.interruption())
        except Exception:
            _log.exception("request %s failed inside the gateway", call.row.request_id)
            await self._tell(call, InternalFault("The gateway made a mistake. Its log has the details"))
        finally:
            try:
                await self._release(call)
            finally:
                self.books.close(call)

    async def _serve(self, call: Call) -> None:
        exchange, limits = call.exchange, self.settings.limits
        call.row.key_id = self.keys.authenticate(exchange.headers)
        body = await exchange.read_body(limits.max_body_bytes, limits.body_timeout_s)
        request = call.request = parse_request(
            call.endpoint, body, exchange.headers, limits, self.settings.routing.default_preference
        )
        exchange.watch()
        if self.embeddings.serves(request):
            await self._embed(call, request)
            return
        plan = call.plan = await self.router.plan(request, call.row.key_id)
        if call.endpoint is Endpoint.ROUTE:
            await self._explain(call, plan)
            return
        self._keep_alive(call, request)
        answer = call.answer = await self.caller.call(
            request, plan.candidates, headers.to_upstream(exchange.headers), self._extras(call, request), call.trail
        )
        if answer.meter is None:
            await self._give_back(call, request, answer)
        else:
            await self._stream_back(call, answer, answer.meter)

    async def _give_back(self, call: Call, request: ParsedRequest, answer: Answer) -> None:
        """A whole answer: the upstream's bytes, with the decision as their last member where it was asked for."""
        usage = call.usage = answer.usage or call.estimated_usage()
        call.row.status = answer.response.status
        body = answer.body
        if request.extensions.explain:
            body = splice.append(body, EXTENSION_KEY, call.extension(answer.candidate, usage))
        head = call.head(headers.JSON)
        head.append(headers.cost(answer.candidate.cost_usd(usage)))
        await call.exchange.answer(call.row.status, head, body)

    async def _stream_back(self, call: Call, answer: Answer, meter: StreamMeter) -> None:
        """A stream: each event as it comes, and at the end what the meter still owes."""
        exchange, chunks = call.exchange, answer.chunks
        assert chunks is not None
        call.row.status = 200
        if not exchange.has_begun:
            await exchange.begin(200, call.head(headers.EVENT_STREAM))
        ready = answer.begun
        while not meter.is_done:
            if ready:
                await exchange.send(ready)
            data = await anext(chunks, None)
            if data is None:
                ready = meter.finish()
                break
            ready = meter.feed(data)
            if meter.fault is not None:
                await exchange.send(ready)
                raise meter.fault
        if call.keep_alive is not None:
            call.keep_alive.stop()
        await exchange.end(ready)
        exchange.unwatch()
        await _drain(chunks)

    async def _embed(self, call: Call, request: ParsedRequest) -> None:
        """Embeddings by the embedder of this process."""
        answer = await self.embeddings.answer(request)
        call.row.served_model, call.row.status, call.usage = answer.model, 200, answer.usage
        head = [*call.head(headers.JSON), *headers.of_decision(answer.model, None, None, 1), headers.cost(0.0)]
        await call.exchange.answer(200, head, answer.body)

    async def _explain(self, call: Call, plan: Plan) -> None:
        """The decision alone; nobody is called."""
        call.row.status = 200
        body = orjson.dumps({"object": "route", "request_id": call.row.request_id, **decision_body(plan)})
        await call.exchange.answer(200, call.head(headers.JSON), body)

    def _keep_alive(self, call: Call, request: ParsedRequest) -> None:
        period_s = self.settings.server.keepalive_comment_s
        if request.is_streaming and period_s is not None:
            # Who answers is not known yet: the model stands in the last chunk's member then.
            call.keep_alive = KeepAlive(call.exchange, period_s, call.head(headers.EVENT_STREAM))

    def _extras(self, call: Call, request: ParsedRequest) -> Extras:
        return Extras(
            member=call.extension,
            estimate=call.estimated_usage,
            explain=request.extensions.explain,
            keeps_text=self.settings.ledger.store_content,
        )

    async def _tell(self, call: Call, error: RequestError) -> None:
        """Tell the client what went wrong: as the answer, or as the last event of a stream that has begun."""
        row, exchange = call.row, call.exchange
        row.status, row.error_code = error.http_status, error.error_code
        row.error_message = self.redactor.text(error.message, MAX_MESSAGE_CHARS)
        _log.log(error.log_level, "request %s: %d %s", row.request_id, row.status, row.error_message)
        if call.keep_alive is not None:
            call.keep_alive.stop()
        if isinstance(error, ClientClosed) or exchange.has_ended:
            return
        try:
            async with asyncio.timeout(_TELL_LIMIT_S):
                if exchange.has_begun:
                    await exchange.end(b"data: " + error.body_bytes() + b"\n\n")
                else:
                    head = headers.of_error(error) + call.head()
                    await exchange.answer(error.http_status, head, error.body_bytes())
        except TimeoutError:
            _log.info("request %s: the client does not read its error", row.request_id)

    async def _release(self, call: Call) -> None:
        """Let go of everything that the request holds."""
        call.exchange.unwatch()
        self.watchdog.in_flight.discard(call.exchange)
        if call.keep_alive is not None:
            call.keep_alive.stop()
        if call.answer is not None:
            await call.answer.close()


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Let the upstream end its body, so that the connection can serve again; the client has its answer already."""
    try:
        async with asyncio.timeout(_AFTER_DONE_S):
            async for _ in chunks:
                pass
    except (TimeoutError, RequestError):
        pass
