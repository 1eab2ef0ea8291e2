"""What the gateway costs: CPU, latency and throughput against calling the same upstream directly.

    python benchmarks/gateway_overhead.py [--seconds 5] [--rounds 3] [--json] [--check]

A mock upstream and the load generator share one core, the gateway under test has the other, everything on loopback.
Measured in the same run: the upstream called directly, `atoll serve`, and LiteLLM's proxy where `litellm[proxy]` is
installed. CPU time is that of the gateway's process tree, so it hardly depends on what else the machine does; rates and
percentiles do. `--check` fails when a budget is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httptools
import orjson
import psutil

BUDGET_MS_PER_REQUEST: Final = 0.30
BUDGET_MS_PER_STREAM: Final = 4.0
STREAM_CHUNKS: Final = 64
STREAM_CONNECTIONS: Final = 8

_MODEL: Final = "mock"
_PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 20
_TEXT: Final = "An answer of about a kilobyte, as chat models give them. " * 16


# The mock upstream


def _whole_answer() -> bytes:
    body = orjson.dumps(
        {
            "id": "chatcmpl-mock",
            "object": "chat.completion",
            "created": 1700000000,
            "model": _MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": _TEXT},
                    "finish_reason": "stop",
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": 220, "completion_tokens": 190, "total_tokens": 410},
        }
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def _stream_pieces() -> list[bytes]:
    def event(data: bytes) -> bytes:
        payload = b"data: " + data + b"\n\n"
        return b"%x\r\n%s\r\n" % (len(payload), payload)

    def chunk(choices: list[object], **members: object) -> bytes:
        frame = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 1700000000, "model": _MODEL}
        return event(orjson.dumps({**frame, "choices": choices, **members}))

    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [
        chunk([{"index": 0, "delta": {"content": f" word{index:03d}"}, "logprobs": None, "finish_reason": None}])
        for index in range(STREAM_CHUNKS - 1)
    ]
    pieces.append(chunk([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]))
    usage = chunk([], usage={"prompt_tokens": 220, "completion_tokens": 64, "total_tokens": 284})
    return [head, *pieces, usage + event(b"[DONE]") + b"0\r\n\r\n"]


class _Mock(asyncio.Protocol):
    """Answers as fast as it can; one write for each chunk, so that each travels alone."""

    whole = _whole_answer()
    pieces = _stream_pieces()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        is_streaming = b'"stream":true' in self._body or b'"stream": true' in self._body
        self._body = b""
        if is_streaming:
            self._send_piece(0)
        else:
            self._transport.write(self.whole)

    def _send_piece(self, index: int) -> None:
        self._transport.write(self.pieces[index])
        if index + 1 < len(self.pieces) and not self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self._send_piece, index + 1)


async def _serve_mock(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Mock, "127.0.0.1", port)
    await server.serve_forever()


# The load


@dataclass(slots=True)
class Load:
    """What a load generator saw."""

    requests: int
    seconds: float
    errors: int
    latency_ms: list[float]
    first_byte_ms: list[float]


class _Client(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer."""

    def __init__(self, request: bytes, load: Load, ends_at: float, done: asyncio.Future[None]) -> None:
        self._request = request
        self._load = load
        self._ends_at = ends_at
        self._done = done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._is_first = True
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, _: bytes) -> None:
        if self._is_first:
            self._is_first = False
            self._load.first_byte_ms.append((time.perf_counter() - self._started) * 1e3)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self._load.latency_ms.append((now - self._started) * 1e3)
        self._load.requests += 1
        self._load.errors += self._parser.get_status_code() != 200
        if now < self._ends_at:
            asyncio.get_running_loop().call_soon(self._ask)
        else:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def _request(port: int, *, is_streaming: bool) -> bytes:
    messages = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": _PROMPT}]
    body = orjson.dumps(
        {"model": _MODEL, "messages": messages, "temperature": 0.7, "max_tokens": 256, "stream": is_streaming}
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer bench-client-key\r\naccept: */*\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _load(port: int, connections: int, seconds: float, *, is_streaming: bool) -> Load:
    loop = asyncio.get_running_loop()
    load = Load(0, 0.0, 0, [], [])
    request = _request(port, is_streaming=is_streaming)
    started = time.perf_counter()
    ends = [loop.create_future() for _ in range(connections)]
    for end in ends:
        await loop.create_connection(partial(_Client, request, load, started + seconds, end), "127.0.0.1", port)
    await asyncio.wait_for(asyncio.gather(*ends), seconds + 60)
    load.seconds = time.perf_counter() - started
    return load


def _run_load(core: int | None, port: int, connections: int, seconds: float, *, is_streaming: bool) -> Load:
    """In a process of its own."""
    command = [sys.executable, __file__, "--role", "load", "--port", str(port), "--connections", str(connections)]
    command += ["--seconds", str(seconds), *(["--stream"] if is_streaming else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=_pinned(core))
    return Load(**orjson.loads(done.stdout))


# What is compared


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    command: list[str]
    environ: dict[str, str]


def _atoll(folder: Path, port: int, upstream_port: int) -> Target:
    config = folder / "atoll.yaml"
    config.write_text(
        f"server: {{port: {port}, api_keys: [bench-client-key]}}\n"
        f"data_dir: {folder / 'data'}\n"
        f"upstreams: {{mock: {{kind: openai, base_url: 'http://127.0.0.1:{upstream_port}/v1', api_key: mock-key}}}}\n"
        f"candidates: [{{name: {_MODEL}, upstream: mock, prices: {{input: 1.0, output: 2.0}}}}]\n"
    )
    return Target("atoll", [sys.executable, "-m", "atoll", "serve", "--config", str(config)], {})


def _litellm(folder: Path, port: int, upstream_port: int) -> Target | None:
    """LiteLLM's proxy, where it and the packages of its `proxy` extra are installed."""
    if any(importlib.util.find_spec(module) is None for module in ("litellm", "backoff", "apscheduler", "multipart")):
        return None
    config = folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {_MODEL}\n    litellm_params:\n      model: openai/{_MODEL}\n"
        f"      api_base: http://127.0.0.1:{upstream_port}/v1\n      api_key: mock-key\n"
        "general_settings: {master_key: bench-client-key}\n"
    )
    command = [sys.executable, "-m", "litellm.proxy.proxy_cli", "--config", str(config), "--port", str(port)]
    return Target(
        "litellm", [*command, "--host", "127.0.0.1"], {"LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": "bench-client-key"}
    )


@dataclass(slots=True)
class Row:
    """One target. Latencies in milliseconds, `added_` against the direct call of the same round."""

    target: str
    rps_c1: float = 0.0
    rps_c32: float = 0.0
    cpu_ms_per_request: float = 0.0
    added_p50_ms_c1: float = 0.0
    p50_ms_c32: float = 0.0
    p99_ms_c32: float = 0.0
    cpu_ms_per_stream: float = 0.0
    streams_per_s: float = 0.0
    added_first_byte_ms_c1: float = 0.0
    rss_mib: float = 0.0
    errors: int = 0


def measure(name: str, port: int, process: psutil.Process | None, seconds: float, core: int | None) -> Row:
    row = Row(name)
    for is_streaming in (False, True):  # Warm-up.
        _run_load(core, port, 4, min(1.0, seconds), is_streaming=is_streaming)
    alone = _run_load(core, port, 1, seconds, is_streaming=False)
    before = _cpu_s(process)
    many = _run_load(core, port, 32, seconds, is_streaming=False)
    between = _cpu_s(process)
    streams = _run_load(core, port, STREAM_CONNECTIONS, seconds, is_streaming=True)
    after = _cpu_s(process)
    stream_alone = _run_load(core, port, 1, min(2.0, seconds), is_streaming=True)
    row.rps_c1, row.rps_c32 = alone.requests / alone.seconds, many.requests / many.seconds
    row.cpu_ms_per_request = (between - before) / many.requests * 1e3
    row.cpu_ms_per_stream = (after - between) / streams.requests * 1e3
    row.streams_per_s = streams.requests / streams.seconds
    row.added_p50_ms_c1 = statistics.median(alone.latency_ms)
    row.added_first_byte_ms_c1 = statistics.median(stream_alone.first_byte_ms)
    row.p50_ms_c32 = statistics.median(many.latency_ms)
    row.p99_ms_c32 = statistics.quantiles(many.latency_ms, n=100)[98]
    row.rss_mib = sum(member.memory_info().rss for member in _tree(process)) / 2**20
    row.errors = alone.errors + many.errors + streams.errors + stream_alone.errors
    return row


def _tree(process: psutil.Process | None) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)] if process is not None else []


def _cpu_s(process: psutil.Process | None) -> float:
    return sum(times.user + times.system for times in (member.cpu_times() for member in _tree(process)))


def _pinned(core: int | None) -> Callable[[], None] | None:
    return None if core is None else partial(os.sched_setaffinity, 0, {core})


@contextlib.contextmanager
def _running(
    command: list[str], port: int, core: int | None, environ: dict[str, str], log: Path
) -> Iterator[psutil.Process]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env={**os.environ, **environ}, stdout=output, stderr=output, preexec_fn=_pinned(core)
        ) as child,
    ):
        try:
            _until_up(port, child, log)
            yield psutil.Process(child.pid)
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def _until_up(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", method="GET")
        try:
            urllib.request.urlopen(request, timeout=2)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"{child.args!r} did not come up:\n{log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def compare(seconds: float, rounds: int) -> list[Row]:
    """Medians over the rounds, one row a target."""
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, load_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mock_port = _free_port()
        mock = [sys.executable, __file__, "--role", "mock", "--port", str(mock_port)]
        with _running(mock, mock_port, load_core, {}, folder / "mock.log"):
            for _ in range(rounds):
                direct = measure("direct", mock_port, None, seconds, load_core)
                results.setdefault("direct", []).append(direct)
                for make in (_atoll, _litellm):
                    port = _free_port()
                    target = make(folder, port, mock_port)
                    if target is None:
                        continue
                    log = folder / f"{target.name}.log"
                    with _running(target.command, port, gateway_core, target.environ, log) as process:
                        row = measure(target.name, port, process, seconds, load_core)
                    row.added_p50_ms_c1 -= direct.added_p50_ms_c1
                    row.added_first_byte_ms_c1 -= direct.added_first_byte_ms_c1
                    results.setdefault(target.name, []).append(row)
    return [_median(rows) for rows in results.values()]


def _median(rows: list[Row]) -> Row:
    names = [name for name in asdict(rows[0]) if name not in ("target", "errors")]
    middle = {name: statistics.median(getattr(row, name) for row in rows) for name in names}
    return Row(rows[0].target, **middle, errors=sum(row.errors for row in rows))


def over_budget(rows: list[Row]) -> list[str]:
    problems = []
    for row in rows:
        if row.errors:
            problems.append(f"{row.target}: {row.errors} requests failed")
        if row.target == "atoll" and row.cpu_ms_per_request > BUDGET_MS_PER_REQUEST:
            problems.append(f"{row.cpu_ms_per_request:.3f} ms of CPU a request, budget {BUDGET_MS_PER_REQUEST}")
        if row.target == "atoll" and row.cpu_ms_per_stream > BUDGET_MS_PER_STREAM:
            problems.append(f"{row.cpu_ms_per_stream:.2f} ms of CPU a stream, budget {BUDGET_MS_PER_STREAM}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail when a budget is exceeded")
    parser.add_argument("--role", choices=["compare", "mock", "load"], default="compare", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "mock":
        asyncio.run(_serve_mock(options.port))
    elif options.role == "load":
        load = asyncio.run(_load(options.port, options.connections, options.seconds, is_streaming=options.stream))
        sys.stdout.buffer.write(orjson.dumps(load))
    else:
        return _compare_and_show(options.seconds, options.rounds, is_json=options.json, is_check=options.check)
    return 0


def _compare_and_show(seconds: float, rounds: int, *, is_json: bool, is_check: bool) -> int:
    rows = compare(seconds, rounds)
    if is_json:
        print(orjson.dumps([asdict(row) for row in rows], option=orjson.OPT_INDENT_2).decode())
    else:
        names = list(asdict(rows[0]))
        widths = [max(len(name), 10) for name in names]
        print("  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
        for row in rows:
            values = [value if isinstance(value, str) else f"{value:,.3f}" for value in asdict(row).values()]
            print("  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True)))
    problems = over_budget(rows)
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
