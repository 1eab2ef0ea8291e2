"""Any OpenAI-compatible endpoint: the bytes of requests and answers are passed through."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import SecretStr
from yarl import URL

from atoll.gateway.upstreams.base import Upstream, UpstreamRequest, UpstreamResponse
from atoll.gateway.upstreams.transport import HttpTransport
from atoll.types import Candidate

_JSON: Final = {
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "user-agent": "atoll",
}
_EVENT_STREAM: Final = {**_JSON, "accept": "text/event-stream"}


class OpenAICompatible(Upstream):
    """An endpoint at `base_url`, over TCP or through a Unix socket."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: SecretStr | None = None,
        headers: dict[str, str] | None = None,
        max_connections: int,
        max_response_bytes: int,
        socket_path: Path | None = None,
    ) -> None:
        self.name = name
        self._base_url = URL(base_url.rstrip("/"))
        self._urls: dict[str, URL] = {}
        own = {key.lower(): value for key, value in (headers or {}).items()}
        if api_key is not None:
            own.setdefault("authorization", f"Bearer {api_key.get_secret_value()}")
        self._headers = {True: {**_EVENT_STREAM, **own}, False: {**_JSON, **own}}
        self._transport = HttpTransport(
            name, max_connections=max_connections, max_response_bytes=max_response_bytes, socket_path=socket_path
        )

    async def start(self) -> None:
        await self._transport.start()

    async def send(self, request: UpstreamRequest, candidate: Candidate) -> UpstreamResponse:
        headers = self._headers[request.is_streaming]
        if request.headers:
            # Ours win: a client's header never replaces a credential.
            headers = {**request.headers, **headers}
        return await self._transport.post(
            self._url(request.path), headers, request.body, request.timeouts, is_streaming=request.is_streaming
        )

    async def is_ready(self) -> bool:
        return True

    async def close(self) -> None:
        await self._transport.close()

    def _url(self, path: str) -> URL:
        """Paths come from our own endpoints: a handful."""
        url = self._urls.get(path)
        if url is None:
            base = self._base_url
            # A query (Azure's `api-version`, say) stays behind the path.
            url = self._urls[path] = base.joinpath(*path.strip("/").split("/")).with_query(base.query)
        return url
