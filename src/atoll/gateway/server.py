"""Running the gateway: bind, start workers, tell where it listens, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import orjson
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from atoll.config import LocalUpstream, ServerSettings, Settings
from atoll.errors import AtollError, ConfigError
from atoll.gateway.asgi import Gateway
from atoll.gateway.auth import check_exposure
from atoll.gateway.banner import banner, ready_line
from atoll.gateway.catalog import Catalog, build_catalog
from atoll.gateway.http.protocol import BoundedProtocol
from atoll.gateway.redact import RedactingFilter, Redactor, secrets_of
from atoll.gateway.state import GatewayState
from atoll.gateway.upstreams.local import ENGINE_SOCKETS
from atoll.local_backend.supervisor import EngineSupervisor

_BACKLOG: Final = 2048
_READY_POLL_S: Final = 0.1
_KEEP_ALIVE_S: Final = 75
"""Longer than the idle time of common load balancers and client pools, which would else meet a closed connection."""


def run(settings: Settings, environ: Mapping[str, str] | None = None) -> int:
    """Serve until told to stop; the process's exit code. What is wrong is told in one line on standard error."""
    try:
        return _run(settings, os.environ if environ is None else environ)
    except AtollError as error:
        sys.stderr.write(f"atoll: {error}\n")
        return 1


def _run(settings: Settings, environ: Mapping[str, str]) -> int:
    check_exposure(settings.server)
    catalog = build_catalog(settings, environ)
    listener = bind(settings.server)
    application = Application(settings, catalog)
    config = uvicorn_config(settings, application)
    configure_logging(application)
    # After draining, uvicorn raises the signal again that stopped it. Being told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    told = banner(settings, catalog, listener)
    try:
        if settings.server.workers == 1:
            _Server(config, told).run(sockets=[listener])
        else:
            _tell(told)
            with _shared_metrics(), shared_engines(settings, catalog):
                return _supervise(_Workers(config, sockets=[listener]))
    except KeyboardInterrupt:
        return 0
    except SystemExit as stop:
        return 1 if stop.code else 0
    finally:
        listener.close()
    return 0


def _supervise(workers: Multiprocess) -> int:
    """Run workers until told to stop; 1 when they cannot start."""
    workers.run()
    return 1 if any(process.exitcode == STARTUP_FAILURE for process in workers.processes) else 0


@dataclass(frozen=True, slots=True)
class Application:
    """Makes the gateway of one process. Travels to each worker, which calls it there."""

    settings: Settings
    catalog: Catalog

    def __call__(self) -> Gateway:
        # The parts are heavy and belong to the process that serves.
        from atoll.gateway.parts import build_parts

        configure_logging(self)
        # Until the gateway runs there is nothing to reload, and the default would end the process.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            parts = build_parts(self.settings, self.catalog)
        except AtollError as error:
            # A worker cannot tell its parent more than an exit code.
            sys.stderr.write(f"atoll: {error}\n")
            sys.exit(STARTUP_FAILURE)
        return Gateway(GatewayState(self.settings, self.catalog, parts))


class _Workers(Multiprocess):
    """Workers that replace their router on SIGHUP, where uvicorn would restart them."""

    def handle_hup(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGHUP)


class _Server(uvicorn.Server):
    """Tells where it listens once it does."""

    def __init__(self, config: uvicorn.Config, told: str) -> None:
        super().__init__(config)
        self._told = told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _tell(self._told)
        gateway = self.config.loaded_app
        assert isinstance(gateway, Gateway)
        self._waiting = asyncio.create_task(_tell_when_ready(gateway.state), name="atoll-ready")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._waiting.cancel()
        await super().shutdown(sockets)


async def _tell_when_ready(state: GatewayState) -> None:
    """A line for each local model once it answers: loading one takes seconds, and more the first time."""
    started = time.monotonic()
    waiting = {name for name, upstream in state.catalog.upstreams.items() if isinstance(upstream, LocalUpstream)}
    while waiting:
        ready = await state.upstreams_ready()
        for name in sorted(name for name in waiting if ready[name]):
            _tell(ready_line(state.catalog, name, time.monotonic() - started))
            waiting.discard(name)
        await asyncio.sleep(_READY_POLL_S)


def _tell(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def uvicorn_config(settings: Settings, application: Application | Gateway) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        factory=isinstance(application, Application),
        workers=settings.server.workers,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.server.drain_s),
    )


def bind(server: ServerSettings) -> socket.socket:
    """A listening socket. Raises ConfigError that says what to do when there is none to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"server.host {server.host!r} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_bound(server, error)) from None
    listener.setblocking(False)
    listener.set_inheritable(True)
    return listener


def _why_not_bound(server: ServerSettings, error: OSError) -> str:
    place = f"{server.host}:{server.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{place} is in use by another program. Stop it, or choose another port with --port"
    if error.errno == errno.EACCES:
        return f"{place} must not be bound by this user. Choose a port from 1024 up with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"server.host {server.host!r} is no address of this machine"
    return f"{place} cannot be bound: {error.strerror}"


def configure_logging(application: Application) -> None:
    """Plain lines on standard error, from warnings up; no secret gets through, whatever logs it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    secrets = secrets_of(application.settings, application.catalog.upstreams.values())
    handler.addFilter(RedactingFilter(Redactor(secrets)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


@contextmanager
def shared_engines(settings: Settings, catalog: Catalog) -> Iterator[None]:
    """One engine for each local upstream, whatever the number of workers: this process runs them, workers connect.

    Raises MissingExtraError when what a local model needs is not installed.
    """
    from atoll.gateway.parts import surroundings

    around = surroundings(settings)
    engines = {
        name: EngineSupervisor(upstream, around.cache_dir, around.runtime_dir)
        for name, upstream in catalog.upstreams.items()
        if isinstance(upstream, LocalUpstream)
    }
    try:
        for name, engine in engines.items():
            engine.start()
            threading.Thread(target=_tell_when_engine_ready, args=(catalog, name, engine), daemon=True).start()
        sockets = {name: str(engine.socket_path) for name, engine in engines.items()}
        os.environ[ENGINE_SOCKETS] = orjson.dumps(sockets).decode()
        yield
    finally:
        os.environ.pop(ENGINE_SOCKETS, None)
        for engine in engines.values():
            engine.close()


def _tell_when_engine_ready(catalog: Catalog, name: str, engine: EngineSupervisor) -> None:
    started = time.monotonic()
    try:
        asyncio.run(engine.wait_ready())
    except AtollError as error:
        _tell(f"atoll: {error}\n")
    else:
        _tell(ready_line(catalog, name, time.monotonic() - started))


@contextmanager
def _shared_metrics() -> Iterator[None]:
    """A folder through which the workers' counters add up; gone with the server."""
    from atoll.gateway.metrics import MULTIPROCESS_DIR

    folder = tempfile.mkdtemp(prefix="atoll-metrics-")
    os.environ[MULTIPROCESS_DIR] = folder
    try:
        yield
    finally:
        del os.environ[MULTIPROCESS_DIR]
        shutil.rmtree(folder, ignore_errors=True)
