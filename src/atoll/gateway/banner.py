"""What a person sees when the gateway starts: where it listens, who answers, who chooses."""

from __future__ import annotations

import socket
from collections import defaultdict

from atoll import __version__
from atoll.config import Settings
from atoll.gateway.catalog import Catalog

_MAX_NAMES = 6


def banner(settings: Settings, catalog: Catalog, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    keys = len(settings.server.api_keys)
    lines = [
        f"Atoll {__version__} on http://{place}/v1",
        f"  keys      {f'{keys} set' if keys else 'none: everybody on this machine may call'}",
        *_served(catalog),
        f"  router    {settings.routing.router}, {settings.routing.embedder.kind} embedder; default {catalog.default}",
        *(f"  note      {note}" for note in catalog.notes),
    ]
    if settings.server.workers > 1:
        lines.append(f"  workers   {settings.server.workers}")
    return "\n".join(lines) + "\n"


def ready_line(catalog: Catalog, upstream: str, seconds: float) -> str:
    """Told when a local model answers."""
    names = ", ".join(one.name for one in catalog.candidates.values() if one.upstream == upstream)
    return f"  ready     {names} after {seconds:.1f} s\n"


def _served(catalog: Catalog) -> list[str]:
    names_by_upstream: dict[str, list[str]] = defaultdict(list)
    for candidate in catalog.candidates.values():
        names_by_upstream[candidate.upstream].append(candidate.name)
    lines = []
    for upstream, names in names_by_upstream.items():
        shown = ", ".join(names[:_MAX_NAMES]) + (
            f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        )
        lines.append(f"  models    {shown}  ({catalog.upstreams[upstream].kind} upstream {upstream!r})")
    return lines
