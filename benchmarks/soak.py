"""Many streaming clients on the local model for a while: errors, leaks and memory of the gateway and the engine.

    python benchmarks/soak.py --clients 64 --seconds 120 [--json]

Starts a gateway of its own (embedded defaults, a free port, a temporary data folder), lets each client stream one
answer after the other, and samples memory, file descriptors and event-loop tasks of both processes. Fails when a
request fails, when something is still held once all clients are gone, or when memory grew by more than 10 % in the
second half.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import psutil

_PROMPTS = (
    "Name three rivers of Europe.",
    "Write a short poem about the sea.",
    "What is 17 times 3? Explain.",
    "Tell me a story about a lighthouse keeper and a whale, in four sentences.",
)


@dataclass(slots=True)
class Sample:
    at_s: float
    rss_mib: dict[str, float]
    file_descriptors: dict[str, int]


@dataclass(slots=True)
class Report:
    requests: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder)) as (url, process):
        report = asyncio.run(soak(url, process, options.clients, options.seconds, options.max_tokens))
    return show(report, options.seconds, is_json=options.json)


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A whole gateway on embedded defaults; yields its URL and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "atoll.yaml"
    config.write_text(f"server: {{port: {port}}}\ndata_dir: {folder / 'data'}\n")
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    command = [sys.executable, "-m", "atoll", "serve", "--config", str(config)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as child:
        try:
            yield f"http://127.0.0.1:{port}", psutil.Process(child.pid)
        finally:
            child.terminate()
            child.wait(60)


async def soak(url: str, process: psutil.Process, clients: int, seconds: float, max_tokens: int) -> Report:
    report = Report()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await _until_ready(session)
        await asyncio.gather(*(_stream(session, report, max_tokens, index) for index in range(clients)))
        await asyncio.sleep(1)
        before = await _idle_state(session, process)
        report.requests = report.tokens = 0
        report.ttft_s.clear()
        ends_at = time.monotonic() + seconds
        async with _sampling(process, report):
            await asyncio.gather(*(_client(session, report, max_tokens, index, ends_at) for index in range(clients)))
        await asyncio.sleep(3)
        after = await _idle_state(session, process)
    report.leaks = [
        f"{name}: {before[name]} before, {after[name]} after" for name in before if after[name] > before[name] + 2
    ]
    first, last = _halves(report.samples)
    for name in first:
        if last[name] > first[name] * 1.1:
            report.leaks.append(f"memory of the {name} grew from {first[name]:.0f} to {last[name]:.0f} MiB")
    return report


async def _until_ready(session: aiohttp.ClientSession) -> None:
    for _ in range(1800):
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get("/ready") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise SystemExit("the gateway was not ready within three minutes")


async def _client(session: aiohttp.ClientSession, report: Report, max_tokens: int, index: int, ends_at: float) -> None:
    while time.monotonic() < ends_at:
        await _stream(session, report, max_tokens, index)


async def _stream(session: aiohttp.ClientSession, report: Report, max_tokens: int, index: int) -> None:
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": _PROMPTS[index % len(_PROMPTS)]}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": index,
    }
    started = time.monotonic()
    is_first, is_done = True, False
    try:
        async with session.post("/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                report.errors.append(f"{answer.status}: {(await answer.text())[:200]}")
                return
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if is_first:
                    report.ttft_s.append(time.monotonic() - started)
                    is_first = False
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    report.errors.append(str(event["error"])[:200])
                if event.get("usage"):
                    report.tokens += event["usage"]["completion_tokens"]
    except aiohttp.ClientError as error:
        report.errors.append(repr(error))
        return
    if not is_done:
        report.errors.append("a stream ended without [DONE]")
    report.requests += 1


@contextlib.asynccontextmanager
async def _sampling(process: psutil.Process, report: Report) -> AsyncIterator[None]:
    async def sample() -> None:
        started = time.monotonic()
        while True:
            rss, descriptors = _footprint(process)
            report.samples.append(Sample(time.monotonic() - started, rss, descriptors))
            await asyncio.sleep(2)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()


def _footprint(process: psutil.Process) -> tuple[dict[str, float], dict[str, int]]:
    engines = process.children(recursive=True)
    groups = {"gateway": [process], "engine": engines}
    rss = {name: sum(member.memory_info().rss for member in members) / 2**20 for name, members in groups.items()}
    return rss, {name: sum(member.num_fds() for member in members) for name, members in groups.items()}


async def _idle_state(session: aiohttp.ClientSession, process: psutil.Process) -> dict[str, int]:
    """What is held when nobody asks anything: descriptors of both processes, tasks and requests of the gateway."""
    _, descriptors = _footprint(process)
    state = {f"file descriptors of the {name}": count for name, count in descriptors.items()}
    async with session.get("/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith(("atoll_in_flight", "atoll_event_loop_tasks")):
                name, value = line.rsplit(" ", 1)
                state[name] = int(float(value))
    return state


def _halves(samples: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """Median memory over the second and the fourth quarter: the first quarter is warm-up."""
    quarter = max(len(samples) // 4, 1)
    second, fourth = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    names = samples[0].rss_mib

    def middle(part: list[Sample], name: str) -> float:
        return statistics.median(sample.rss_mib[name] for sample in part)

    return {name: middle(second, name) for name in names}, {name: middle(fourth, name) for name in names}


def show(report: Report, seconds: float, *, is_json: bool) -> int:
    first, last = _halves(report.samples)
    result = {
        "requests": report.requests,
        "tokens_per_s": round(report.tokens / seconds, 1),
        "ttft_p50_s": round(statistics.median(report.ttft_s), 3) if report.ttft_s else None,
        "ttft_max_s": round(max(report.ttft_s), 3) if report.ttft_s else None,
        "rss_mib_second_quarter": {name: round(value) for name, value in first.items()},
        "rss_mib_last_quarter": {name: round(value) for name, value in last.items()},
        "errors": len(report.errors),
        "error_samples": report.errors[:5],
        "leaks": report.leaks,
    }
    if is_json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    else:
        for name, value in result.items():
            print(f"{name:24} {value}")
    return 1 if report.errors or report.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
