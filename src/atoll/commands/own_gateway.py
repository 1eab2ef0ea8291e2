"""A gateway of one's own for the length of one command."""

from __future__ import annotations

import ctypes
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from atoll.errors import AtollError

_READY: Final = re.compile(rb"^Atoll \S+ on (http://\S+)")
"""The first line of what `atoll serve` tells when it listens."""
_START_TIMEOUT_S: Final = 240.0
"""The first start of the embedded model unpacks its weights."""
_STOP_TIMEOUT_S: Final = 10.0
_EXIT_TIMEOUT_S: Final = 2.0
"""Between the end of what a process tells and its own."""
_KEPT_LINES: Final = 20
_PR_SET_PDEATHSIG: Final = 1


class GatewayNotStarted(AtollError):
    """The gateway ended, or did not get ready in time."""


@contextmanager
def own_gateway(config_path: Path | None) -> Iterator[str]:
    """The API root of a gateway in a child process, on a free loopback port; stopped at the end, whatever happens.

    Raises GatewayNotStarted with what the child told.
    """
    command = [sys.executable, "-m", "atoll", "serve", "--host", "127.0.0.1", "--port", "0", "--workers", "1"]
    if config_path is not None:
        command += ["--config", str(config_path)]
    # Its own group, so that Ctrl-C reaches us alone and we can stop it in order.
    child = subprocess.Popen(  # noqa: S603 (our own program)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=_end_with_parent,
    )
    assert child.stderr is not None
    try:
        yield _when_ready(child, child.stderr)
    finally:
        _stop(child)


def _when_ready(child: subprocess.Popen[bytes], told: IO[bytes]) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([told], [], [], left)[0]:
            break
        line = told.readline()
        if not line:
            break
        ready = _READY.match(line)
        if ready is not None:
            # Nobody reads on, and a full pipe would stop the child.
            threading.Thread(target=told.read, daemon=True).start()
            return ready.group(1).decode()
        lines.append(line)
    text = b"".join(lines).decode("utf-8", "replace").strip().removeprefix("atoll: ")
    raise GatewayNotStarted(f"The gateway {_fate(child)}: {text or 'it said nothing'}")


def _fate(child: subprocess.Popen[bytes]) -> str:
    """What became of a child that told nothing more."""
    try:
        child.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"was not ready in {_START_TIMEOUT_S:.0f} s"
    return "could not start"


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end_with_parent() -> None:
    """In the child: be told to stop when this process is killed and cannot do it itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
