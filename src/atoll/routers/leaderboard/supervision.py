"""Whether labels pay for themselves, after SaveRouter: what labelling cost against what routing saves."""

from __future__ import annotations

import math

from atoll.errors import DataError


def sa_bep(label_cost_usd: float, best_cost_usd: float, router_cost_usd: float) -> float:
    """Supervision-aware break-even point: after how many queries the labels are paid for; down is better.

    ceil(C_0 / (C_b − c_r)): C_0 for collecting the labels, C_b a query of the best single model, c_r a query of the
    router at that model's quality. Inf where the router saves nothing (an infinite `router_cost_usd`: it never reaches
    that quality).
    """
    _check_costs(label_cost_usd, best_cost_usd, router_cost_usd)
    saved_usd = best_cost_usd - router_cost_usd
    return float(math.ceil(label_cost_usd / saved_usd)) if saved_usd > 0.0 else math.inf


def sa_cr(label_cost_usd: float, best_cost_usd: float, router_cost_usd: float, n_queries: int) -> float:
    """Supervision-aware cost ratio over `n_queries`, (C_0 + H c_r) / (H C_b): below 1 where routing paid."""
    _check_costs(label_cost_usd, best_cost_usd, router_cost_usd)
    if n_queries < 1 or best_cost_usd == 0.0:
        raise DataError(f"a ratio needs queries and a cost: found {n_queries!r} queries of {best_cost_usd!r} USD")
    return (label_cost_usd + n_queries * router_cost_usd) / (n_queries * best_cost_usd)


def _check_costs(*costs_usd: float) -> None:
    if not all(cost >= 0.0 for cost in costs_usd):
        raise DataError(f"costs must be zero or more USD, found {costs_usd!r}")
