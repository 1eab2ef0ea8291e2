"""The local upstream with a real engine process behind it: while it loads, while it answers, and when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from atoll.config import LocalUpstream, Timeouts
from atoll.errors import Unavailable, UpstreamUnreachable
from atoll.gateway.upstreams.base import UpstreamRequest
from atoll.gateway.upstreams.local import Local
from atoll.types import Candidate
from doubles.tiny_model import write_tiny_model

pytest.importorskip("torch")
CANDIDATE = Candidate("tiny", "tiny", "up")
PATIENT = Timeouts(connect_s=5, first_byte_s=60, idle_s=60, total_s=90)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def local(model: Path, tmp_path: Path) -> AsyncIterator[Local]:
    settings = LocalUpstream(kind="local", model=str(model), dtype="float32", threads=1)
    upstream = Local(
        "up", settings, cache_dir=tmp_path / "cache", runtime_dir=tmp_path / "run", max_response_bytes=1_000_000
    )
    yield upstream
    await upstream.close()
    await upstream.close()


def asked(*, is_streaming: bool = False, timeouts: Timeouts = PATIENT, **members: Any) -> UpstreamRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **members}
    return UpstreamRequest("/chat/completions", orjson.dumps({**body, "stream": is_streaming}), is_streaming, timeouts)


async def status_of(local: Local) -> int:
    response = await local.send(asked(), CANDIDATE)
    await response.read()
    await response.close()
    return response.status


async def test_an_engine_that_loads_answers_and_dies(local: Local) -> None:
    before = {one.pid for one in psutil.Process().children()}
    await local.start()
    assert not await local.is_ready()
    with pytest.raises(Unavailable, match=r"'up' is not running yet") as caught:
        await local.send(asked(timeouts=PATIENT.model_copy(update={"first_byte_s": 0.05})), CANDIDATE)
    assert caught.value.http_status == 503
    assert caught.value.retry_after_s

    assert await asyncio.gather(*(status_of(local) for _ in range(10))) == [200] * 10
    assert await local.is_ready()

    response = await local.send(asked(is_streaming=True, max_tokens=400, ignore_eos=True), CANDIDATE)
    chunks = aiter(response.chunks())
    assert (await anext(chunks)).startswith(b"data: ")
    (engine,) = [one for one in psutil.Process().children() if one.pid not in before]
    engine.kill()
    with pytest.raises(UpstreamUnreachable, match="'up'"):
        async for _ in chunks:
            pass
    await response.close()

    async with asyncio.timeout(60):
        while True:
            try:
                assert await status_of(local) == 200
                break
            except UpstreamUnreachable:
                await asyncio.sleep(0.05)


async def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    settings = LocalUpstream(kind="local", model=str(tmp_path / "nowhere"), start_timeout_s=30)
    upstream = Local(
        "up", settings, cache_dir=tmp_path / "cache", runtime_dir=tmp_path / "run", max_response_bytes=1_000_000
    )
    await upstream.start()
    with pytest.raises(Unavailable, match="nowhere"):
        await upstream.send(asked(), CANDIDATE)
    await upstream.close()
