"""Keeps the engine's process running: starts it, says when it answers, starts it again when it dies.

The gateway speaks HTTP to `socket_path`. When the process dies, open connections break, which is how the gateway's
requests learn of it; the next process listens on the same path. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Final

from atoll.config import LocalUpstream
from atoll.errors import EngineError
from atoll.local_backend.checkpoint import check_installed

_READY_LINE: Final = b"ready\n"
_EXIT_CANNOT_START: Final = 78
"""As in `server.py`: another start would fail in the same way."""
_STARTS_BEFORE_TOLD: Final = 3
"""After so many failed starts in a row, whoever waits is told. Starting goes on, more and more slowly."""
_BACKOFF_FIRST_S: Final = 0.2
_BACKOFF_MOST_S: Final = 30.0
_TERM_GRACE_S: Final = 5.0
_POLL_S: Final = 0.02
_LOG_LIMIT_BYTES: Final = 5_000_000
_LOG_TOLD_LINES: Final = 12
_LOG_TOLD_BYTES: Final = 4000
_SOCKET_PATH_BYTES: Final = 100
"""A Unix socket's path has at most 107 bytes on Linux, 103 elsewhere."""

_KERNEL_CACHE_LIMITS: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""How many prepared kernels oneDNN and torch's layer above it keep; by default 1024, each up to a megabyte."""

_names = itertools.count()


class EngineSupervisor:
    """One engine process. All methods may be called from any thread; none but `close` and `wait_ready` waits.

    `cache_dir` keeps converted weights from start to start, `runtime_dir` holds the socket and the log.
    """

    def __init__(self, settings: LocalUpstream, cache_dir: Path, runtime_dir: Path) -> None:
        self._settings = settings
        self._cache_dir = cache_dir
        self._runtime_dir = runtime_dir
        self._socket_folder: tempfile.TemporaryDirectory[str] | None = None
        self.socket_path = self._choose_socket_path(f"engine-{os.getpid()}-{next(_names)}.sock")
        """Where the engine listens, whenever it does."""
        self.log_path = runtime_dir / "engine.log"
        self.restarts = 0
        """How often a process was started anew."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._is_closing = threading.Event()
        self._failed_starts = 0
        self._failure: str | None = None
        self._log_start_bytes = 0
        """Where in the log the latest start begins."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the process and return at once. Idempotent.

        Raises MissingExtraError if a package or the embedded weights are not installed.
        """
        check_installed(self._settings.model)
        with self._lock:
            if self._thread is not None or self._is_closing.is_set():
                return
            self._runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One thread for all starts: on Linux a child is told of the end of the thread that started it.
            self._thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)
            self._thread.start()

    def is_ready(self) -> bool:
        """Whether the process answers, as far as is known without asking it."""
        return self._is_ready

    @property
    def pid(self) -> int | None:
        """The running process; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def failure(self) -> str | None:
        """Why starting fails, if it does; for `/ready` and the log."""
        return self._failure

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the process answers; by default as long as the settings' `start_timeout_s`.

        Raises EngineError with the last lines of its log if it keeps failing, and when the time is over.
        """
        limit_s = self._settings.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self._is_ready:
            if self._is_closing.is_set():
                raise EngineError("The local engine is shutting down")
            if self._failure is not None:
                raise EngineError(self._failure)
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"The local engine for {self._settings.model!r} did not answer within {limit_s:g} s. "
                    f"Raise start_timeout_s, or see {self.log_path}{self._last_log_lines()}"
                )
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """End the process (SIGTERM, and SIGKILL after a grace period) and wait for it. Idempotent."""
        self._is_closing.set()
        with self._lock:
            process = self._process
        if process is not None:
            _end(process)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.socket_path.unlink(missing_ok=True)
        if self._socket_folder is not None:
            self._socket_folder.cleanup()

    def _choose_socket_path(self, name: str) -> Path:
        path = self._runtime_dir / name
        if len(os.fsencode(path.absolute())) <= _SOCKET_PATH_BYTES:
            return path.absolute()
        self._socket_folder = tempfile.TemporaryDirectory(prefix="atoll-")
        return Path(self._socket_folder.name) / name

    def _supervise(self) -> None:
        while not self._is_closing.is_set():
            with self._open_log() as log:
                process = self._spawn(log)
            if process is None:
                break
            was_ready = self._watch(process)
            if self._is_closing.is_set() or not self._account(process, was_ready=was_ready):
                break
            self._is_closing.wait(self._backoff_s())
            if not self._is_closing.is_set():
                self.restarts += 1

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes] | None:
        """Start a process, unless `close` was called in the meantime."""
        with self._lock:
            if self._is_closing.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                self._command(),
                stdin=subprocess.PIPE,  # never written to: its end tells the process that we are gone
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for the gateway, which drains first
                env=self._environment(),
            )
            return self._process

    def _command(self) -> list[str]:
        settings = self._settings
        options = {
            "--socket": self.socket_path,
            "--cache-dir": self._cache_dir,
            "--model": settings.model,
            "--dtype": settings.dtype,
            "--context-tokens": settings.context_tokens,
            "--max-batch": settings.max_batch,
            "--max-waiting": settings.max_waiting,
            "--threads": settings.threads,
        }
        given = [(name, str(value)) for name, value in options.items() if value is not None]
        return [sys.executable, "-m", "atoll.local_backend.server", *itertools.chain.from_iterable(given)]

    def _environment(self) -> dict[str, str]:
        """Ours, with this very Atoll importable however it was found, and nothing that reaches for the network."""
        here = str(Path(__file__).parents[2])
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return os.environ | ours | _KERNEL_CACHE_LIMITS

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Follow a process to its end; whether it ever answered."""
        assert process.stdout is not None
        was_ready = False
        with process.stdout as output:
            for line in output:
                if line == _READY_LINE:
                    was_ready = self._is_ready = True
                    self._failed_starts, self._failure = 0, None
        self._is_ready = False
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        return was_ready

    def _account(self, process: subprocess.Popen[bytes], *, was_ready: bool) -> bool:
        """Book how a process ended; whether to start another."""
        if was_ready:
            return True
        self._failed_starts += 1
        is_hopeless = process.returncode == _EXIT_CANNOT_START
        if is_hopeless or self._failed_starts >= _STARTS_BEFORE_TOLD:
            self._failure = (
                f"The local engine for {self._settings.model!r} does not start ({_how_ended(process.returncode)}); "
                f"see {self.log_path}{self._last_log_lines()}"
            )
        return not is_hopeless

    def _backoff_s(self) -> float:
        return min(_BACKOFF_FIRST_S * 2.0**self._failed_starts, _BACKOFF_MOST_S)

    def _open_log(self) -> IO[bytes]:
        """Appended to by every start; set aside once when it has become long."""
        with contextlib.suppress(FileNotFoundError):
            if self.log_path.stat().st_size > _LOG_LIMIT_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
        log = self.log_path.open("ab")
        self._log_start_bytes = log.tell()
        return log

    def _last_log_lines(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self.log_path.stat().st_size - _LOG_TOLD_BYTES, self._log_start_bytes))
                lines = log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return ":\n" + "\n".join(lines[-_LOG_TOLD_LINES:]) if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
