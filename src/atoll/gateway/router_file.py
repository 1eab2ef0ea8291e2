"""The configured router, opened and checked against what it is to serve.

A router that cannot be meant is an error that names file, line and key; one that knows only some of the models says
which it has to guess. It never happens that a router quietly answers for models that it knows nothing of.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from atoll.config import PRIOR_ROUTER, RouterSettings, Settings
from atoll.errors import ConfigError, DataError, RouterError
from atoll.gateway.catalog import Catalog
from atoll.routers.artefact import read_about
from atoll.routers.base import Router
from atoll.routers.names import match_name
from atoll.routers.prior import PriorRouter
from atoll.routers.registry import router_class
from atoll.types import Candidate

_log = logging.getLogger(__name__)


def open_router(settings: Settings, catalog: Catalog, space: str, *, embedder_space: str | None = None) -> Router:
    """The configured router, answering for the routable candidates.

    `space` is where the vectors of the static embedder lie, `embedder_space` those of the configured one. Raises
    ConfigError, which begins with the place in the configuration, for a router that cannot be read or does not fit.
    """
    wanted = settings.routing.router
    candidates = [catalog.candidates[name] for name in catalog.routable]
    try:
        if wanted.path is None:
            if wanted.name not in (None, PRIOR_ROUTER):
                router_class(str(wanted.name))
                raise RouterError(
                    f"the router {wanted.name!r} has to be fitted first, and its `path` named here: "
                    f"atoll fit {wanted.name} --data DIR --out PATH"
                )
            return PriorRouter.shipped(candidates, space=space)
        return _open(wanted, candidates, embedder_space or space)
    except (DataError, RouterError) as error:
        raise ConfigError(f"{wanted.place}: {error}") from error


def _open(wanted: RouterSettings, candidates: Sequence[Candidate], space: str) -> Router:
    assert wanted.path is not None
    path = wanted.path.expanduser()
    if wanted.name is not None:
        router_class(wanted.name)
    if not path.exists():
        raise DataError(f"there is no router at {str(path)!r}. Make one: atoll fit {wanted.name or 'knn'} --out {path}")
    about = read_about(path, wanted.name)
    router = router_class(about["router"]).load(path)
    if space not in router.spaces:
        raise RouterError(
            f"the {router.name} router in {str(path)!r} was fitted with vectors of {', '.join(router.spaces)}, and "
            f"routing.embedder gives {space!r}. Name the embedder that it was fitted with, or fit it again"
        )
    if router.name != PRIOR_ROUTER:
        _check_pool(path.name, _known(about, router), candidates)
    return router.set_candidates(candidates)


def _known(about: dict[str, Any], router: Router) -> list[str]:
    """Names of all models that it has learned something of."""
    known = about.get("known_names")
    names = [str(name) for name in known] if isinstance(known, list) else []
    return names + [candidate.name for candidate in router.candidates_ if candidate.name not in names]


def _check_pool(file: str, known: Sequence[str], candidates: Sequence[Candidate]) -> None:
    strangers = [candidate.name for candidate in candidates if match_name(candidate, known) is None]
    if len(strangers) == len(candidates):
        shown = ", ".join(known[:8]) + (" …" if len(known) > 8 else "")
        raise RouterError(
            f"it knows none of the models that may be chosen ({', '.join(strangers[:8])}), but {shown}. Give the "
            "candidates `aliases` that it knows, or fit it on outcomes of these models"
        )
    if strangers:
        _log.warning("the router in %r has learned nothing of %s and guesses them", file, ", ".join(strangers))
