"""Candidates as commands show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.commands.output import NOTHING, count, echo_table, number
from atoll.types import Candidate

if TYPE_CHECKING:
    from atoll.gateway.catalog import Catalog


def candidate_facts(catalog: Catalog, candidate: Candidate) -> dict[str, Any]:
    """For JSON."""
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
        "is_routable": candidate.name in catalog.routable,
        "is_default": candidate.name == catalog.default,
    }


def echo_candidates(catalog: Catalog) -> None:
    """For people."""
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
            number(candidate.quality_prior),
            _auto(catalog, candidate),
        ]
        for candidate in catalog.candidates.values()
    ]
    echo_table(head, rows)


def _auto(catalog: Catalog, candidate: Candidate) -> str:
    if candidate.name == catalog.default:
        return "yes, default"
    return "yes" if candidate.name in catalog.routable else "no"
