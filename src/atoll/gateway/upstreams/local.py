"""The local engine: a supervised process of its own, reached through a Unix socket."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import orjson

from atoll.config import LocalUpstream
from atoll.errors import EngineError, Unavailable
from atoll.gateway.upstreams.base import Upstream, UpstreamRequest, UpstreamResponse
from atoll.gateway.upstreams.openai import OpenAICompatible
from atoll.local_backend.supervisor import EngineSupervisor
from atoll.types import Candidate

ENGINE_SOCKETS: Final = "ATOLL_ENGINE_SOCKETS"
"""Set for workers whose parent supervises the engines: JSON, upstream name to socket path."""
_COME_BACK_S: Final = 5.0
_POLL_S: Final = 0.05


class Local(Upstream):
    """One engine. Starts and supervises its process, unless another process does so already."""

    def __init__(
        self,
        name: str,
        settings: LocalUpstream,
        *,
        cache_dir: Path,
        runtime_dir: Path,
        max_response_bytes: int,
    ) -> None:
        self.name = name
        self._settings = settings
        shared = orjson.loads(os.environ.get(ENGINE_SOCKETS, "{}")).get(name)
        self._supervisor = None if shared else EngineSupervisor(settings, cache_dir, runtime_dir)
        self._socket_path = Path(shared) if shared else self._own_socket()
        self._http = OpenAICompatible(
            name,
            "http://engine/v1",
            max_connections=settings.max_connections,
            max_response_bytes=max_response_bytes,
            socket_path=self._socket_path,
        )

    async def start(self) -> None:
        """Returns at once: the model loads while the gateway is up already. Raises MissingExtraError."""
        if self._supervisor is not None:
            self._supervisor.start()
        await self._http.start()

    async def send(self, request: UpstreamRequest, candidate: Candidate) -> UpstreamResponse:
        await self._until_ready(request)
        return await self._http.send(request, candidate)

    async def is_ready(self) -> bool:
        return self._supervisor.is_ready() if self._supervisor is not None else self._socket_path.exists()

    async def close(self) -> None:
        await self._http.close()
        if self._supervisor is not None:
            # Waits for the process to end.
            await asyncio.to_thread(self._supervisor.close)

    def _own_socket(self) -> Path:
        assert self._supervisor is not None
        return self._supervisor.socket_path

    async def _until_ready(self, request: UpstreamRequest) -> None:
        """A request that comes while the model loads waits for it, as long as it would for a first byte."""
        if await self.is_ready():
            return
        try:
            async with asyncio.timeout(request.timeouts.first_byte_s):
                if self._supervisor is not None:
                    await self._supervisor.wait_ready()
                while not await self.is_ready():  # noqa: ASYNC110 - another process makes the socket
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"The local model of the upstream {self.name!r} is not running yet, after waiting "
                f"{request.timeouts.first_byte_s:g} s (upstreams.{self.name}.timeouts.first_byte_s). Try again soon",
                retry_after_s=_COME_BACK_S,
            ) from None
        except EngineError as error:
            raise Unavailable(
                f"The local model of the upstream {self.name!r} is not running: {error}", retry_after_s=_COME_BACK_S
            ) from None
