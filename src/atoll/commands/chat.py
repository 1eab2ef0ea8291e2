"""Asks a gateway over HTTP and reads its stream. Standard library only, so that a question costs no long import."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from atoll.errors import AtollError, ConfigError

_MAX_LINE_BYTES: Final = 10_000_000
_MAX_ERROR_BYTES: Final = 100_000
_READ_TIMEOUT_S: Final = 900.0
"""A little longer than any upstream may take; the gateway is the one that times out."""


class GatewayUnreachable(AtollError):
    """Nobody answers there."""


class AskFailed(AtollError):
    """The gateway answered with an error, or broke off."""


@dataclass(slots=True)
class Answered:
    """What an answer was, once its stream has ended."""

    request_id: str | None = None
    model: str | None = None
    router: str | None = None
    reason: str | None = None
    cost_usd: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    decision: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway's API root, such as `http://127.0.0.1:8700/v1`."""

    url: str
    api_key: str | None = None

    def chat(self, body: Mapping[str, Any], answered: Answered) -> Generator[str]:
        """The text of a streamed chat completion as it arrives; `answered` is complete when it ends.

        Closing the generator ends the call.
        Raises GatewayUnreachable when there is no connection, AskFailed for an error answer and a broken stream.
        """
        connection = self._connection()
        with contextlib.ExitStack() as open_ends:
            # In the middle of a stream this tells the gateway that nobody listens, and it stops the model.
            open_ends.callback(connection.close)
            response = self._post(connection, body)
            # The connection has let go of an answer that ends with it.
            open_ends.callback(response.close)
            answered.request_id = response.getheader("x-atoll-request-id")
            answered.model = response.getheader("x-atoll-model")
            answered.router = response.getheader("x-atoll-router")
            answered.reason = response.getheader("x-atoll-reason")
            if response.status != 200:
                raise AskFailed(_told(response.status, response.read(_MAX_ERROR_BYTES)))
            yield from _texts(response, answered)

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{self.url!r} is no gateway's address. Write it like http://127.0.0.1:8700/v1")
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, port, timeout=_READ_TIMEOUT_S, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(host, port, timeout=_READ_TIMEOUT_S)

    def _post(self, connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        path = urlsplit(self.url).path.rstrip("/") + "/chat/completions"
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayUnreachable(
                f"No gateway answers at {self.url} ({getattr(error, 'strerror', None) or error}). Start one with "
                "`atoll serve`, or name another with --url"
            ) from None
        try:
            connection.request("POST", path, orjson.dumps(body), headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AskFailed(f"{self.url} did not answer as a gateway does: {error or type(error).__name__}") from None


def _texts(response: http.client.HTTPResponse, answered: Answered) -> Iterator[str]:
    is_complete = False
    for data in _events(response):
        if data == b"[DONE]":
            is_complete = True
            continue
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise AskFailed(f"The gateway sent an event that is not JSON: {data[:80]!r}") from None
        if "error" in event:
            raise AskFailed(_message(event) or "The answer broke off")
        yield from _text_of(event, answered)
    if not is_complete:
        raise AskFailed("The answer broke off: the connection ended before the stream did")


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each server-sent event. A gateway sends each in one line."""
    while True:
        try:
            line = response.readline(_MAX_LINE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise AskFailed(f"The answer broke off: {error or type(error).__name__}") from None
        if not line:
            return
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _text_of(event: Mapping[str, Any], answered: Answered) -> Iterator[str]:
    for choice in event.get("choices") or ():
        if choice.get("finish_reason"):
            answered.finish_reason = choice["finish_reason"]
        text = (choice.get("delta") or {}).get("content")
        if text:
            yield text
    answered.usage = event.get("usage") or answered.usage
    extension = event.get("atoll") or {}
    for name in ("request_id", "model", "router", "reason", "cost_usd", "decision"):
        if extension.get(name) is not None:
            setattr(answered, name, extension[name])


def _told(status: int, body: bytes) -> str:
    """An error answer for a person."""
    try:
        message = _message(orjson.loads(body))
    except orjson.JSONDecodeError:
        message = None
    hint = " Set ATOLL_API_KEY or --api-key" if status == 401 else ""
    return f"{message or body[:300].decode('utf-8', 'replace').strip() or 'no reason given'} (HTTP {status}){hint}"


def _message(event: Any) -> str | None:
    error = event.get("error") if isinstance(event, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
