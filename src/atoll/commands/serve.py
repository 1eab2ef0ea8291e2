"""`atoll serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from atoll.commands.options import config_option, read_settings


@click.command(
    epilog="""
\b
Examples:
  atoll serve
  OPENAI_API_KEY=sk-... atoll serve                     its models join in
  atoll serve --config atoll.yaml --port 9000
  atoll serve --host 0.0.0.0 --workers 4                needs server.api_keys in the configuration

The line `Atoll ... on http://...` on standard error says that it listens; SIGTERM lets running requests finish.
"""
)
@config_option
@click.option("--host", help="The address to listen on.  [default: server.host, 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free one.  [default: server.port, 8700]")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes that answer.  [default: server.workers, 1]")
def serve(config_path: Path | None, host: str | None, port: int | None, workers: int | None) -> None:
    """Answer on http://127.0.0.1:8700/v1. Any OpenAI client can ask there; `model: auto` is routed."""
    given: dict[str, Any] = {"host": host, "port": port, "workers": workers}
    settings = read_settings(config_path)
    server = settings.server.model_copy(update={name: value for name, value in given.items() if value is not None})
    # The server is heavy: a wrong configuration is told before it is imported.
    from atoll.gateway.server import run

    sys.exit(run(settings.model_copy(update={"server": server})))
