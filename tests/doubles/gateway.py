"""A whole gateway in this process: a real server on a free port, real upstream clients, a ledger in a list."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn

from atoll.config import CandidateSettings, OpenAIUpstream, Prices, Settings, Timeouts
from atoll.gateway.asgi import Gateway
from atoll.gateway.catalog import Catalog, build_catalog
from atoll.gateway.embeddings import TextEmbedder
from atoll.gateway.ledger.row import LedgerRecord, LedgerRow
from atoll.gateway.parse import ParsedRequest
from atoll.gateway.routing import Choice
from atoll.gateway.server import bind, uvicorn_config
from atoll.gateway.sessions import Session
from atoll.gateway.state import GatewayState, Parts
from atoll.gateway.upstreams.factory import Surroundings, build_upstream
from atoll.routers.eligibility import Exclusion, Requirements
from atoll.types import Decision, Outcome

PROVIDER_KEY = "provider-secret-key-0123456789"


class InOrder:
    """Chooses the first eligible candidate, the others behind it; or fails when told to."""

    def __init__(self, routable: Sequence[str]) -> None:
        self.routable = routable
        self.error: Exception | None = None
        self.asked: list[tuple[Requirements, Session | None]] = []

    async def choose(
        self,
        request: ParsedRequest,
        requirements: Requirements,
        excluded: Mapping[str, Exclusion],
        session: Session | None,
    ) -> Choice:
        self.asked.append((requirements, session))
        if self.error is not None:
            raise self.error
        names = [name for name in self.routable if name not in excluded]
        return Choice(Decision(names[0], tuple(names[1:]), "in-order", "1", "The first one that can"))


class ListLedger:
    """Keeps rows in a list."""

    def __init__(self) -> None:
        self.rows: list[LedgerRow] = []
        self.queue_depth = 0
        self.scores: dict[str, tuple[float, str | None]] = {}

    async def start(self) -> None:
        return

    def record(self, row: LedgerRow) -> None:
        self.rows.append(row)

    async def add_feedback(self, request_id: str, score: float, comment: str | None) -> LedgerRecord | None:
        row = next((row for row in self.rows if row.request_id == request_id), None)
        if row is None:
            return None
        self.scores[request_id] = (score, comment)
        return LedgerRecord(**dataclasses.asdict(row), feedback_score=score, feedback_comment=comment)

    async def close(self) -> None:
        return


class ListLearner:
    def __init__(self) -> None:
        self.learned: list[Outcome] = []

    def learn(self, outcomes: Sequence[Outcome], embeddings: Mapping[str, Any], space: str) -> int:
        self.learned += outcomes
        return len(outcomes) if space == "test-space" else 0


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert {"message", "type"} <= set(error)
        assert isinstance(error["message"], str)
        assert error["message"]
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """Parsed data events of a stream; `[DONE]` as it stands."""
        payloads = [part[6:] for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]
        return [payload.decode() if payload == b"[DONE]" else orjson.loads(payload) for payload in payloads]


@dataclass
class Running:
    """A gateway that runs, and how to talk to it."""

    port: int
    state: GatewayState
    client: aiohttp.ClientSession
    chooser: InOrder
    ledger: ListLedger
    learner: ListLearner
    server: uvicorn.Server

    def stop(self) -> None:
        """What SIGTERM does."""
        self.server.should_exit = True

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(
            path, data=io.BytesIO(data), headers={"content-type": "application/json", **named}
        ) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def chat(self, model: str = "first", headers: dict[str, str] | None = None, **members: Any) -> Answer:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello there"}], **members}
        return await self.post("/v1/chat/completions", body, **(headers or {}))

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.client.get(path, headers=headers) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def last_row(self, count: int = 1) -> LedgerRow:
        """The latest row, once there are `count`: a row is written after its answer has gone out."""
        await until(lambda: len(self.ledger.rows) >= count)
        return self.ledger.rows[-1]

    async def until_idle(self) -> None:
        await until(lambda: not self.state.watchdog.in_flight)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; at most ten seconds."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - whatever a test asks about tells nobody
            await asyncio.sleep(0.005)


QUICK = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=20.0)


def settings_for(base_urls: dict[str, str], **sections: Any) -> Settings:
    """One upstream and one candidate a name, priced 1 and 2 dollars per million tokens."""
    upstream: dict[str, Any] = {"kind": "openai", "api_key": PROVIDER_KEY, "timeouts": QUICK.model_dump()}
    upstream |= sections.pop("upstream", {})
    candidates = sections.pop("candidates", {})
    given = {
        "upstreams": {
            f"up-{name}": OpenAIUpstream.model_validate_json(orjson.dumps({**upstream, "base_url": url}))
            for name, url in base_urls.items()
        },
        "candidates": tuple(
            CandidateSettings(
                name=name,
                model=f"{name}-model",
                upstream=f"up-{name}",
                **{"prices": Prices(input=1.0, output=2.0, cached_input=0.5), **candidates.get(name, {})},
            )
            for name in base_urls
        ),
        **sections,
    }
    return Settings(**given)


@contextlib.asynccontextmanager
async def running_gateway(
    base_urls: dict[str, str], *, embedders: dict[str, TextEmbedder] | None = None, **sections: Any
) -> AsyncIterator[Running]:
    settings = settings_for(base_urls, **sections)
    catalog: Catalog = build_catalog(settings, {})
    chooser, ledger, learner = InOrder(catalog.routable), ListLedger(), ListLearner()
    around = Surroundings(Path("unused"), Path("unused"), settings.limits.max_response_bytes)
    upstreams = {name: build_upstream(name, upstream, around) for name, upstream in settings.upstreams.items()}
    state = GatewayState(settings, catalog, Parts(upstreams, chooser, embedders or {}, ledger, learner))
    listener = bind(settings.server.model_copy(update={"port": 0}))
    server = uvicorn.Server(uvicorn_config(settings, Gateway(state)))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    port = listener.getsockname()[1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        try:
            yield Running(port, state, client, chooser, ledger, learner, server)
        finally:
            await client.close()
            server.should_exit = True
            await serving


def row_fields(row: LedgerRow, *names: str) -> tuple[Any, ...]:
    values = dataclasses.asdict(row)
    return tuple(values[name] for name in names)
