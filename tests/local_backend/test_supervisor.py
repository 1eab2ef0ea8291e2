"""The engine's process: started, watched, started again, and gone when its parent is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from atoll.config import LocalUpstream
from atoll.errors import EngineError
from atoll.local_backend.supervisor import EngineSupervisor

SOURCE = Path(__file__).parents[2] / "src"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def supervise(tiny_folder: Path, tmp_path: Path) -> AsyncIterator[Callable[..., EngineSupervisor]]:
    supervisors: list[EngineSupervisor] = []

    def make(runtime: str = "run", **settings: Any) -> EngineSupervisor:
        wanted = LocalUpstream(kind="local", **{"model": str(tiny_folder), "dtype": "float32", "threads": 1} | settings)
        supervisors.append(EngineSupervisor(wanted, tmp_path / "cache", tmp_path / runtime))
        return supervisors[-1]

    yield make
    for supervisor in supervisors:
        supervisor.close()


def client(supervisor: EngineSupervisor) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(supervisor.socket_path)))


async def ask(supervisor: EngineSupervisor, **body: Any) -> Any:
    wanted = {"messages": HELLO, "max_tokens": 5} | body
    async with client(supervisor) as http, http.post("http://engine/v1/chat/completions", json=wanted) as response:
        return await response.json()


def is_gone(pid: int) -> bool:
    """Neither running nor a zombie that waits to be collected."""
    return not psutil.pid_exists(pid)


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


async def test_start_answer_close(supervise: Callable[..., EngineSupervisor]) -> None:
    supervisor = supervise()
    assert not supervisor.is_ready()
    assert supervisor.pid is None
    supervisor.start()
    supervisor.start()
    await supervisor.wait_ready(60)
    assert supervisor.is_ready()
    pid = supervisor.pid
    assert pid is not None
    assert (await ask(supervisor))["usage"]["completion_tokens"] > 0
    assert supervisor.socket_path.stat().st_mode & 0o777 == 0o600
    supervisor.close()
    supervisor.close()
    assert is_gone(pid)
    assert not supervisor.socket_path.exists()
    assert not supervisor.is_ready()
    with pytest.raises(EngineError, match="shutting down"):
        await supervisor.wait_ready(1)


async def test_a_killed_process_breaks_its_connections_and_comes_back(
    supervise: Callable[..., EngineSupervisor],
) -> None:
    supervisor = supervise()
    supervisor.start()
    await supervisor.wait_ready(60)
    first = supervisor.pid
    assert first is not None
    body = {"messages": HELLO, "max_tokens": 480, "ignore_eos": True, "stream": True}
    async with client(supervisor) as http, http.post("http://engine/v1/chat/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        os.kill(first, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await response.content.read()
    await until(lambda: supervisor.restarts == 1)
    await supervisor.wait_ready(60)
    assert supervisor.pid not in (None, first)
    assert is_gone(first)
    assert (await ask(supervisor))["choices"]


async def test_a_model_that_is_not_there_is_told_with_the_log(supervise: Callable[..., EngineSupervisor]) -> None:
    supervisor = supervise(model="/nowhere/at-all")
    supervisor.start()
    with pytest.raises(EngineError, match="exit status 78") as caught:
        await supervisor.wait_ready(60)
    assert "no local model '/nowhere/at-all'" in str(caught.value)
    assert str(supervisor.log_path) in str(caught.value)
    assert len(str(caught.value)) < 5000
    assert supervisor.failure is not None
    assert supervisor.restarts == 0  # another start would fail in the same way


async def test_a_process_that_keeps_dying_is_told(supervise: Callable[..., EngineSupervisor], tmp_path: Path) -> None:
    """Its socket's folder cannot be made: the process ends with a traceback, again and again."""
    (tmp_path / "run").mkdir()
    supervisor = supervise()
    supervisor.socket_path = tmp_path / "file" / "engine.sock"
    supervisor.socket_path.parent.touch()
    supervisor.start()
    with pytest.raises(EngineError, match="does not start"):
        await supervisor.wait_ready(100)
    assert supervisor.restarts >= 2
    supervisor.socket_path.parent.unlink()


async def test_waiting_has_a_limit(supervise: Callable[..., EngineSupervisor]) -> None:
    supervisor = supervise(start_timeout_s=0.01)
    supervisor.start()
    with pytest.raises(EngineError, match=r"did not answer within 0\.01 s"):
        await supervisor.wait_ready()


async def test_a_long_path_gets_a_short_socket(supervise: Callable[..., EngineSupervisor]) -> None:
    supervisor = supervise(runtime="long/" * 30)
    assert len(str(supervisor.socket_path)) < 100
    supervisor.start()
    await supervisor.wait_ready(60)
    assert (await ask(supervisor))["choices"]
    folder = supervisor.socket_path.parent
    supervisor.close()
    assert not folder.exists()


async def test_closing_while_starting_leaves_nothing(supervise: Callable[..., EngineSupervisor]) -> None:
    supervisor = supervise()
    supervisor.start()
    await until(lambda: supervisor.pid is not None)
    pid = supervisor.pid
    assert pid is not None
    supervisor.close()
    assert is_gone(pid)


async def test_closing_without_having_started(supervise: Callable[..., EngineSupervisor]) -> None:
    supervise().close()


async def test_the_process_ends_with_a_parent_that_was_killed(tiny_folder: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "from atoll.config import LocalUpstream\n"
        "from atoll.local_backend.supervisor import EngineSupervisor\n"
        "async def main():\n"
        f"    settings = LocalUpstream(kind='local', model={str(tiny_folder)!r}, threads=1)\n"
        f"    supervisor = EngineSupervisor(settings, Path({str(tmp_path)!r}), Path({str(tmp_path)!r}))\n"
        "    supervisor.start()\n"
        "    await supervisor.wait_ready(60)\n"
        "    print(json.dumps([supervisor.pid, 'torch' in sys.modules]), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(  # noqa: ASYNC220 - it has to be killed, not awaited
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(SOURCE)}
    )
    assert parent.stdout is not None
    line = await asyncio.to_thread(parent.stdout.readline)
    pid, has_torch = json.loads(line)
    assert not has_torch  # the gateway's process stays light
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child_has_ended = lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # noqa: E731
    await until(child_has_ended)
