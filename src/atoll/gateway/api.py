"""Everything that is not hot, in plain FastAPI: models, feedback, health, metrics, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from atoll import __version__
from atoll.config import AUTO_MODEL
from atoll.errors import ClientClosed, InternalFault, InvalidRequest, NotFound, RequestError
from atoll.gateway import headers, metrics
from atoll.gateway.parse import Endpoint, body_too_large, parse_object, unknown_model
from atoll.gateway.state import GatewayState
from atoll.types import Candidate

_MAX_FEEDBACK_BYTES: Final = 65_536
_MAX_COMMENT_CHARS: Final = 2000


def build_api(state: GatewayState) -> FastAPI:
    """The application behind the hot endpoints. Whoever runs it starts and closes `state`."""
    api = FastAPI(title="Atoll", version=__version__, openapi_url=None, redirect_slashes=False)
    api.state.gateway = state
    api.include_router(_open)
    api.include_router(_keyed)
    api.add_exception_handler(RequestError, _request_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(Exception, _fault)
    return api


def _state(request: Request) -> GatewayState:
    state = request.app.state.gateway
    assert isinstance(state, GatewayState)
    return state


def _key(request: Request, state: State) -> str | None:
    return state.keys.authenticate(headers.by_name(request.scope["headers"]))


State = Annotated[GatewayState, Depends(_state)]
Key = Annotated[str | None, Depends(_key)]

_open = APIRouter()
"""Answers anybody, and tells nothing that is not harmless."""
_keyed = APIRouter(dependencies=[Depends(_key)])
"""Needs a key wherever keys are set."""


@_open.get("/")
async def index() -> Response:
    return _json(
        {
            "name": "Atoll",
            "version": __version__,
            "api": "/v1",
            "endpoints": [f"/v1{endpoint.value}" for endpoint in Endpoint] + ["/v1/models", "/v1/feedback"],
        }
    )


@_open.get("/health")
async def health() -> Response:
    """The process answers."""
    return _json({"status": "ok"})


@_open.get("/ready")
async def ready(state: State) -> Response:
    """Whether a request could be answered now: at least one upstream is ready."""
    upstreams = await state.upstreams_ready()
    is_ready = any(upstreams.values())
    told: dict[str, Any] = {"status": "ready" if is_ready else "starting", "upstreams": upstreams}
    if (router := state.router_status()) is not None:
        told["router"] = {"name": router["name"], "version": router["version"], "is_current": router["error"] is None}
    answer = _json(told, status=200 if is_ready else 503)
    if not is_ready:
        answer.headers["retry-after"] = "1"
    return answer


@_keyed.get("/metrics")
async def prometheus(state: State) -> Response:
    return Response(state.exposition(), media_type=metrics.CONTENT_TYPE)


@_keyed.get("/v1/models")
async def models(state: State) -> Response:
    return _json({"object": "list", "data": _models(state)})


@_keyed.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> Response:
    found = next((entry for entry in _models(state) if entry["id"] == name), None)
    if found is None:
        raise unknown_model(name, state.catalog.candidates)
    return _json(found)


@_keyed.post("/v1/feedback")
async def feedback(request: Request, state: State, key_id: Key) -> Response:
    """`{request_id, score, comment?}`: how good an answer was, from 0 to 1. The last score of a request counts."""
    given = parse_object(await _body(request, state), state.settings.limits)
    unknown = next((name for name in given if name not in ("request_id", "score", "comment")), None)
    if unknown is not None:
        raise InvalidRequest(
            f"Unknown key {unknown[:40]!r}. Allowed are request_id, score and comment", param=unknown[:40]
        )
    request_id, score, comment = given.get("request_id"), given.get("score"), given.get("comment")
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequest("'request_id' must be the x-atoll-request-id of an answer", param="request_id")
    if not isinstance(score, int | float) or isinstance(score, bool) or not 0 <= score <= 1:
        raise InvalidRequest(
            f"'score' must be a number from 0 to 1, found {orjson.dumps(score).decode()[:40]}", param="score"
        )
    if comment is not None and (not isinstance(comment, str) or len(comment) > _MAX_COMMENT_CHARS):
        raise InvalidRequest(f"'comment' must be a text of at most {_MAX_COMMENT_CHARS} characters", param="comment")
    has_taught = await state.feedback.give(request_id, float(score), comment)
    return _json({"object": "feedback", "request_id": request_id, "score": score, "router_updated": has_taught})


def _models(state: GatewayState) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = [_model(AUTO_MODEL, "atoll", {"routes_to": list(state.catalog.routable)})]
    routable = set(state.catalog.routable)
    listed += [
        _model(candidate.name, candidate.upstream, _facts(candidate, is_routable=candidate.name in routable))
        for candidate in state.catalog.candidates.values()
    ]
    listed += [
        _model(name, "atoll", {"capabilities": ["embeddings"]})
        for name in state.embeddings.names
        if name not in state.catalog.candidates
    ]
    return [{**entry, "created": state.started_at} for entry in listed]


def _model(name: str, owner: str, facts: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "model", "owned_by": owner, "atoll": facts}


def _facts(candidate: Candidate, *, is_routable: bool) -> dict[str, Any]:
    return {
        "model": candidate.model,
        "effort": candidate.effort,
        "input_usd_per_mtok": candidate.input_usd_per_mtok,
        "cached_input_usd_per_mtok": candidate.cached_input_usd_per_mtok,
        "output_usd_per_mtok": candidate.output_usd_per_mtok,
        "context_tokens": candidate.context_tokens,
        "max_output_tokens": candidate.max_output_tokens,
        "capabilities": sorted(candidate.capabilities),
        "sees_private_data": candidate.sees_private_data,
        "is_routable": is_routable,
    }


async def _body(request: Request, state: GatewayState) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(state.settings.limits.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_FEEDBACK_BYTES:
                    raise body_too_large(_MAX_FEEDBACK_BYTES)
    except TimeoutError:
        raise InvalidRequest("The body did not arrive in time", status=408, code="body_timeout") from None
    except ClientDisconnect:
        raise ClientClosed("The client left before its request was complete") from None
    return bytes(body)


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


async def _request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    told = {name.decode(): value.decode() for name, value in headers.of_error(error)}
    return Response(error.body_bytes(), status_code=error.http_status, headers=told)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if error.status_code == 404:
        return await _request_error(request, NotFound(f"There is no {path!r} here. The API stands under /v1"))
    if error.status_code == 405:
        allowed = {name.lower(): value for name, value in (error.headers or {}).items()}.get("allow", "POST")
        told = await _request_error(
            request,
            InvalidRequest(f"{path!r} takes {allowed}, not {request.method}", status=405, code="method_not_allowed"),
        )
        told.headers["allow"] = allowed
        return told
    return await _request_error(request, InvalidRequest(str(error.detail)[:200], status=error.status_code))


async def _fault(request: Request, _: Exception) -> Response:
    """Our own mistake; the server logs it."""
    return await _request_error(request, InternalFault("The gateway made a mistake. Its log has the details"))
