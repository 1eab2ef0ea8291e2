"""What RouterArena measures (Lu et al., arXiv 2510.00202): one score for accuracy and cost, optimality, robustness.

`chosen` are columns of shape (..., n), `quality` and `cost_usd` full tables of shape (n, m).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.errors import DataError
from atoll.routers.leaderboard.categories import flip_rate
from atoll.routers.leaderboard.curves import Floats, Integers, picked

BETA: Final = 0.1
"""Below 1: accuracy outweighs cost."""
DEAREST_USD_PER_1K: Final = 200.0
CHEAPEST_USD_PER_1K: Final = 0.0044


def arena_score(accuracy: float | Floats, usd_per_1k: float | Floats) -> Floats:
    """The weighted harmonic mean of accuracy A, in [0, 1], and C, how cheap 1,000 queries are on a log scale.

    C = (log2 200 − log2 c) / (log2 200 − log2 0.0044) and S = (1 + β) A C / (β A + C), in [0, 1]; the published
    leaderboard prints 100 S. Outside the two costs, which RouterArena does not provide for, C stays at 0 or 1.
    """
    accuracy = np.asarray(accuracy, dtype=np.float64)
    cost = np.clip(np.asarray(usd_per_1k, dtype=np.float64), CHEAPEST_USD_PER_1K, DEAREST_USD_PER_1K)
    if not ((accuracy >= 0.0) & (accuracy <= 1.0) | np.isnan(accuracy)).all():
        raise DataError(f"an accuracy of {float(accuracy.max())!r} is outside [0, 1]; give 0.72 for 72 %")
    cheapness = np.log2(DEAREST_USD_PER_1K / cost) / np.log2(DEAREST_USD_PER_1K / CHEAPEST_USD_PER_1K)
    below = BETA * accuracy + cheapness
    product = (1.0 + BETA) * accuracy * cheapness
    return np.asarray(np.divide(product, below, out=np.zeros(np.shape(below)), where=below != 0.0))


def opt_sel(chosen: Integers, quality: Floats, cost_usd: Floats, *, correct_from: float = 1.0) -> Floats:
    """Of the prompts that some model gets right, the share where the router picked the cheapest that does.

    Right is a quality of at least `correct_from`. NaN where no model gets any prompt right.
    """
    is_right, cheapest_usd = _cheapest_right(quality, cost_usd, correct_from)
    solvable = is_right.any(axis=1)
    if not solvable.any():
        return np.full(np.shape(chosen)[:-1], np.nan)
    optimal = (picked(chosen, is_right) > 0) & (picked(chosen, cost_usd) <= cheapest_usd)
    return np.asarray(optimal[..., solvable].mean(axis=-1))


def opt_cost(chosen: Integers, quality: Floats, cost_usd: Floats, *, correct_from: float = 1.0) -> Floats:
    """Over the prompts that the router got right: what the cheapest right models cost / what the router's picks cost.

    In [0, 1], 1 at best; NaN where it got none right. Prompts that it got wrong are left out: a cheap wrong pick would
    otherwise count as a saving.
    """
    is_right, cheapest_usd = _cheapest_right(quality, cost_usd, correct_from)
    got_right = picked(chosen, is_right) > 0
    spent = np.where(got_right, picked(chosen, cost_usd), 0.0).sum(axis=-1)
    needed = np.where(got_right, cheapest_usd, 0.0).sum(axis=-1)
    # Right picks that are all free are as cheap as can be.
    none_right = np.where(got_right.any(axis=-1), 1.0, np.nan)
    return np.asarray(np.divide(needed, spent, out=np.array(none_right, dtype=np.float64), where=spent > 0.0))


def opt_acc(chosen: Integers, quality: Floats, cost_usd: Floats, *, correct_from: float = 1.0) -> Floats:
    """Over the prompts that some model gets right: the router's summed quality / the oracle's."""
    is_right, _ = _cheapest_right(quality, cost_usd, correct_from)
    solvable = is_right.any(axis=1)
    if not solvable.any():
        return np.full(np.shape(chosen)[:-1], np.nan)
    oracle = quality[solvable].max(axis=1).sum(dtype=np.float64)
    return np.asarray(picked(chosen, quality)[..., solvable].sum(axis=-1) / oracle)


def robustness(chosen: Integers, chosen_perturbed: Integers) -> float:
    """1 − the share of prompts whose chosen model changes when the prompt is worded otherwise; both of shape (n,)."""
    return 1.0 - flip_rate(chosen, chosen_perturbed)


def utility_flip(chosen: Integers, chosen_perturbed: Integers, utility: Floats, *, tolerance: float = 0.0) -> float:
    """The share of prompts where the other choice is also worth something else, by more than `tolerance`.

    `utility` has shape (n, m): quality, or quality − λ cost. Two models that are equally good for a prompt may be
    swapped freely, which `robustness` counts as a flip and this does not.
    """
    change = np.abs(picked(chosen, utility) - picked(chosen_perturbed, utility))
    return float(np.mean(change > tolerance))


def _cheapest_right(quality: Floats, cost_usd: Floats, correct_from: float) -> tuple[Floats, Floats]:
    """Which cells are right (1.0 or 0.0), and what the cheapest right model of each prompt costs (inf: none is)."""
    if quality.shape != cost_usd.shape:
        raise DataError(
            f"qualities of shape {quality.shape} and costs of shape {cost_usd.shape} are of different tables"
        )
    is_right = quality >= correct_from
    return is_right.astype(np.float64), np.where(is_right, cost_usd, np.inf).min(axis=1)
