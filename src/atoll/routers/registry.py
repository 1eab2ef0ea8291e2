"""Routers by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from atoll.errors import RouterError
from atoll.routers.artefact import read_about
from atoll.routers.base import Router

ROUTERS: Final = {
    "group_means": "atoll.routers.group_means:GroupMeansRouter",
    "knn": "atoll.routers.knn:KNNRouter",
    "ridge": "atoll.routers.linear:RidgeRouter",
    "save_router": "atoll.routers.save_router:SaveRouter",
    "router_dc": "atoll.routers.router_dc:RouterDCRouter",
    "cscr": "atoll.routers.cscr:CSCRRouter",
    "reef": "atoll.routers.reef:ReefRouter",
    "prior": "atoll.routers.prior:PriorRouter",
}
"""Where each is; imported when it is asked for."""


def router_class(name: str) -> type[Router]:
    """Raises RouterError, which lists the names there are."""
    if name not in ROUTERS:
        raise RouterError(f"there is no router {name!r}; choose one of {', '.join(ROUTERS)}")
    module, _, attribute = ROUTERS[name].partition(":")
    found: type[Router] = getattr(import_module(module), attribute)
    return found


def make_router(name: str, **parameters: Any) -> Router:
    """An unfitted router. Raises RouterError for an unknown name or parameter."""
    found = router_class(name)
    try:
        return found(**parameters)
    except TypeError as error:
        raise RouterError(f"the router {name!r} cannot be made with {parameters!r}: {error}") from error


def load_router(path: Path) -> Router:
    """Whichever router `path` holds. Raises DataError when it holds none."""
    return router_class(read_about(path)["router"]).load(path)
