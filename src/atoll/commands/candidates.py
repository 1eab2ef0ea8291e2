"""Candidates as commands show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.commands.output import NOTHING, count, echo_table, number
from atoll.types import Candidate

if TYPE_CHECKING:
    from atoll.config import Settings
    from atoll.gateway.catalog import Catalog


def expected_qualities(settings: Settings, catalog: Catalog) -> dict[str, float | None]:
    """By name: how good a candidate is taken to be over all kinds of prompts, before any feedback.

    None where a router of the user's own decides, which says nothing without a prompt.
    """
    candidates = catalog.candidates.values()
    if settings.routing.router.path is not None:
        return {candidate.name: candidate.quality_prior for candidate in candidates}
    from atoll.routers.prior import SHIPPED, PriorRouter

    router = PriorRouter.load(SHIPPED)
    return {candidate.name: float(router.prior_of(candidate).quality[-1]) for candidate in candidates}


def facts_of_all(settings: Settings, catalog: Catalog) -> list[dict[str, Any]]:
    """For JSON."""
    qualities = expected_qualities(settings, catalog)
    return [_facts(catalog, candidate, qualities[candidate.name]) for candidate in catalog.candidates.values()]


def _facts(catalog: Catalog, candidate: Candidate, expected_quality: float | None) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "model": candidate.model,
        "upstream": candidate.upstream,
        "kind": catalog.upstreams[candidate.upstream].kind,
        "effort": candidate.effort,
        "input_usd_per_mtok": candidate.input_usd_per_mtok,
        "cached_input_usd_per_mtok": candidate.cached_input_usd_per_mtok,
        "output_usd_per_mtok": candidate.output_usd_per_mtok,
        "context_tokens": candidate.context_tokens,
        "max_output_tokens": candidate.max_output_tokens,
        "capabilities": sorted(candidate.capabilities),
        "sees_private_data": candidate.sees_private_data,
        "quality_prior": candidate.quality_prior,
        "expected_quality": expected_quality,
        "is_routable": candidate.name in catalog.routable,
        "is_default": candidate.name == catalog.default,
    }


def echo_candidates(settings: Settings, catalog: Catalog) -> None:
    """For people."""
    qualities = expected_qualities(settings, catalog)
    head = ["model", "upstream", ">$/Mtok in", ">cached", ">out", ">context", "can", ">quality", "auto"]
    rows = [
        [
            candidate.name,
            f"{candidate.upstream} ({catalog.upstreams[candidate.upstream].kind})",
            f"{candidate.input_usd_per_mtok:g}",
            NOTHING if candidate.cached_input_usd_per_mtok is None else f"{candidate.cached_input_usd_per_mtok:g}",
            f"{candidate.output_usd_per_mtok:g}",
            count(candidate.context_tokens),
            ",".join(sorted(candidate.capabilities)) or NOTHING,
            number(qualities[candidate.name]),
            _auto(catalog, candidate),
        ]
        for candidate in catalog.candidates.values()
    ]
    echo_table(head, rows)


def _auto(catalog: Catalog, candidate: Candidate) -> str:
    if candidate.name == catalog.default:
        return "yes, default"
    return "yes" if candidate.name in catalog.routable else "no"
