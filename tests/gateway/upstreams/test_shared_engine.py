"""A worker whose parent runs the local engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from atoll.config import LocalUpstream, Timeouts
from atoll.errors import Unavailable
from atoll.gateway.upstreams.base import UpstreamRequest
from atoll.gateway.upstreams.local import ENGINE_SOCKETS, Local
from atoll.types import Candidate
from doubles.scripted import ScriptedUpstream, answering

CANDIDATE = Candidate("local", "local", "up")


def _request(first_byte_s: float) -> UpstreamRequest:
    return UpstreamRequest("/chat/completions", b"{}", is_streaming=False, timeouts=Timeouts(first_byte_s=first_byte_s))


@pytest.fixture
def socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "engine.sock"
    monkeypatch.setenv(ENGINE_SOCKETS, orjson.dumps({"up": str(path)}).decode())
    return path


def _local(folder: Path) -> Local:
    settings = LocalUpstream(kind="local")
    return Local("up", settings, cache_dir=folder, runtime_dir=folder, max_response_bytes=10_000)


async def test_a_request_waits_for_the_engine_that_another_process_starts(tmp_path: Path, socket_path: Path) -> None:
    local = _local(tmp_path)
    await local.start()
    try:
        assert not await local.is_ready()
        sending = asyncio.create_task(local.send(_request(10.0), CANDIDATE))
        await asyncio.sleep(0.1)
        assert not sending.done()
        async with ScriptedUpstream([answering("late")]).running(socket_path):
            answer = await sending
            assert answer.status == 200
            assert b"late" in await answer.read()
            await answer.close()
            assert await local.is_ready()
    finally:
        await local.close()


@pytest.mark.usefixtures("socket_path")
async def test_an_engine_that_does_not_come_is_503(tmp_path: Path) -> None:
    local = _local(tmp_path)
    await local.start()
    try:
        with pytest.raises(Unavailable, match="not running"):
            await local.send(_request(0.2), CANDIDATE)
    finally:
        await local.close()
