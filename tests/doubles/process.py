"""A whole gateway as a user runs it: `atoll serve` in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

_READY_LIMIT_S = 120.0
_STOP_LIMIT_S = 40.0


@dataclass
class Process:
    """A gateway that runs."""

    url: str
    """`http://127.0.0.1:PORT`, without `/v1`."""
    process: subprocess.Popen[str]
    folder: Path
    """Its data, its configuration and its log."""

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(how)
        return self.process.wait(_STOP_LIMIT_S)


@contextlib.contextmanager
def serving(
    folder: Path, config: str = "", *, environ: Mapping[str, str] | None = None, until: str = "/ready"
) -> Iterator[Process]:
    """Run `atoll serve` with `config` (YAML; port and data folder are added) until the path `until` answers 200.

    Provider keys of the surrounding environment are not passed on.
    """
    data = yaml.safe_load(config) or {}
    port = free_port()
    data["server"] = {"port": port, **data.get("server", {})}
    data.setdefault("data_dir", str(folder / "data"))
    path = folder / "atoll.yaml"
    path.write_text(yaml.safe_dump(data))
    inherited = {name: value for name, value in os.environ.items() if "API_KEY" not in name and "_proxy" not in name}
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll", "serve", "--config", str(path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**inherited, **(environ or {})},
        )
    running = Process(f"http://127.0.0.1:{data['server']['port']}", process, folder)
    try:
        _wait(running, until)
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(running: Process, path: str) -> None:
    ends_at = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < ends_at:
        if running.process.poll() is not None:
            raise AssertionError(f"atoll serve ended with {running.process.returncode}:\n{running.log}")
        try:
            with urllib.request.urlopen(running.url + path, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.05)
    raise AssertionError(f"atoll serve was not ready in {_READY_LIMIT_S:.0f} s:\n{running.log}")
