"""`atoll serve` as a process: what stops it from starting, how it stops, and several workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from atoll.config import LedgerSettings
from atoll.gateway.ledger import Ledger
from doubles.process import Process, serving
from doubles.scripted import ScriptedUpstream, chunk

SECRET = "provider-secret-key-0123456789"


def _config(upstream: ScriptedUpstream | None = None, **sections: Any) -> str:
    url = upstream.base_url if upstream is not None else "http://127.0.0.1:9/v1"
    given = {
        "upstreams": {"up": {"kind": "openai", "base_url": url, "api_key": SECRET}},
        "candidates": [{"name": "first", "upstream": "up"}],
        **sections,
    }
    return yaml.safe_dump(given)


def _start(folder: Path, config: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a gateway that must not come up."""
    path = folder / "atoll.yaml"
    path.write_text(config)
    command = [sys.executable, "-m", "atoll", "serve", "--config", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def _assert_told(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line]
    assert len(told) == 1, done.stderr
    for word in words:
        assert word in told[0]
    assert SECRET not in done.stderr


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = _start(tmp_path, _config(data_dir=str(tmp_path / "data")), "--port", str(port))
    _assert_told(done, f"127.0.0.1:{port} is in use", "--port")


def test_an_address_of_another_machine_is_one_line(tmp_path: Path) -> None:
    config = _config(data_dir=str(tmp_path / "data"), server={"host": "192.0.2.1", "port": 0, "api_keys": ["k-123456"]})
    _assert_told(_start(tmp_path, config), "192.0.2.1", "no address of this machine")


def test_being_reachable_without_a_key_is_refused(tmp_path: Path) -> None:
    config = _config(data_dir=str(tmp_path / "data"))
    _assert_told(_start(tmp_path, config, "--host", "0.0.0.0", "--port", "0"), "server.api_keys")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_data_folder_that_cannot_be_written_is_told(tmp_path: Path, workers: str) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = _start(tmp_path, _config(data_dir=str(blocked / "data")), "--port", "0", "--workers", workers)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_database_is_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "ledger.sqlite3").write_bytes(b"this is no database at all" * 100)
    _assert_told(_start(tmp_path, _config(data_dir=str(data)), "--port", "0"), "ledger", "damaged")


def test_a_router_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = _config(data_dir=str(tmp_path / "data"), routing={"router": str(tmp_path / "no-router")})
    _assert_told(_start(tmp_path, config, "--port", "0"), "no-router")


@asynccontextmanager
async def _running(folder: Path, config: str) -> AsyncIterator[tuple[Process, aiohttp.ClientSession]]:
    manager = serving(folder, config)
    process = await asyncio.to_thread(manager.__enter__)
    try:
        async with aiohttp.ClientSession(process.url) as client:
            yield process, client
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    from doubles.scripted import answering

    async with ScriptedUpstream([answering("Hello")]).running() as running:
        yield running


async def _ask(client: aiohttp.ClientSession) -> str:
    body = {"model": "first", "messages": [{"role": "user", "content": "Hi"}]}
    async with client.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        return str(answer.headers["x-atoll-request-id"])


def _rows(data: Path) -> list[str]:
    ledger = Ledger(LedgerSettings(), data)
    ledger.open()
    try:
        return [record.request_id for record in ledger.reader.tail(100)]
    finally:
        ledger.shut()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_being_told_to_stop_is_no_failure_and_loses_no_row(
    tmp_path: Path, upstream: ScriptedUpstream, how: signal.Signals
) -> None:
    async with _running(tmp_path, _config(upstream)) as (process, client):
        told = re.match(rf"Atoll \S+ on {process.url}/v1\n", process.log)
        assert told, process.log
        ids = [await _ask(client) for _ in range(5)]
        assert await asyncio.to_thread(process.stop, how) == 0
        assert "Traceback" not in process.log
    assert sorted(_rows(tmp_path / "data")) == sorted(ids)


async def test_a_stream_ends_before_the_process_does(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    async def slowly(wire: Any) -> None:
        await wire.head()
        for index in range(10):
            await wire.event(chunk(str(index)))
            await asyncio.sleep(0.1)
        await wire.event(chunk(None, "stop"))
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.end()

    upstream.answer(slowly)
    async with _running(tmp_path, _config(upstream)) as (process, client):
        body = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with client.post("/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
            stopping = asyncio.create_task(asyncio.to_thread(process.stop))
            rest = await answer.read()
        await client.close()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await stopping == 0


async def test_workers_answer_together_and_add_up(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    config = _config(upstream, server={"workers": 2})
    async with _running(tmp_path, config) as (process, client):
        ids = []
        for _ in range(30):
            # A connection each, so that both workers get some.
            async with aiohttp.ClientSession(process.url) as once:
                ids.append(await _ask(once))
        async with client.get("/metrics") as answer:
            shown = await answer.text()
        assert re.search(r'atoll_requests_total\{candidate="first",.*status="200"\} 30\.0', shown)
        async with client.post("/v1/feedback", json={"request_id": ids[0], "score": 1}) as answer:
            assert answer.status == 200
        victim = _workers(process)[0]
        victim.kill()
        async with asyncio.timeout(30):
            while victim in (workers := _workers(process)) or len(workers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await _ask(client)
        assert await asyncio.to_thread(process.stop) == 0
    assert len(_rows(tmp_path / "data")) == 31


def _workers(process: Process) -> list[psutil.Process]:
    """The processes that serve; multiprocessing has a helper of its own."""
    found = []
    for child in psutil.Process(process.process.pid).children():
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def test_no_secret_is_in_the_log_whatever_happens(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    """GW-61, with every logger at its most talkative."""

    async def quoting(wire: Any) -> None:
        key = wire.request.headers["authorization"]
        await wire.json({"error": {"message": f"bad key {key}", "type": "t"}}, 401)

    upstream.answer(quoting)
    config = _config(upstream, server={"api_keys": ["client-secret-key-1234"]})
    async with _running(tmp_path, config) as (process, client):
        for key in ("client-secret-key-1234", "wrong-secret-key-5678"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "first", "messages": [{"role": "user", "content": "Hi"}]}
            async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status in (401, 502)
                assert "secret" not in await answer.text()
        await asyncio.to_thread(process.stop)
        assert "502" in process.log
        assert "secret" not in process.log
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            assert b"secret-key" not in path.read_bytes(), path


def test_the_environment_has_no_keys_that_tests_could_spend() -> None:
    assert not any("API_KEY" in name and value.startswith("sk-") for name, value in os.environ.items())


async def test_what_feedback_has_taught_is_known_after_a_restart(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    config = _config(upstream)

    async def quality(client: aiohttp.ClientSession) -> float:
        body = {"messages": [{"role": "user", "content": "Write a haiku about the sea"}]}
        async with client.post("/v1/route", json=body) as answer:
            return float((await answer.json())["estimates"][0]["quality"])

    async with _running(tmp_path, config) as (_, client):
        before = await quality(client)
        for _ in range(10):
            body = {"model": "auto", "messages": [{"role": "user", "content": "Write a haiku about the sea"}]}
            async with client.post("/v1/chat/completions", json=body) as answer:
                request_id = answer.headers["x-atoll-request-id"]
            async with client.post("/v1/feedback", json={"request_id": request_id, "score": 0}) as answer:
                assert (await answer.json())["router_updated"] is True
        learned = await quality(client)
    assert learned < before
    async with _running(tmp_path, config) as (_, client):
        async with asyncio.timeout(10):
            while abs(await quality(client) - learned) > 1e-6:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
