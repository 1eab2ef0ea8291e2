"""What a candidate is worth for a preference: the one place where quality and money meet.

    score = p² · quality − COST_WEIGHT · (1 − p)² · cost / typical cost        (over p² + (1 − p)²)

with p the preference. That is the argmax of `quality − λ · normalised cost` with λ = COST_WEIGHT · ((1 − p) / p)²: from
infinity at p = 0 (money alone) to zero at p = 1 (quality alone). Squared odds, because prices of one pool span three
powers of ten and the dial should reach all of them: λ goes through three and a half powers of ten between 0.1 and 0.9.

Dollars of one call are of the order of 1e-3 and qualities of 1, so a cost enters as a multiple of the pool's typical
cost for *this prompt*: the geometric mean over the candidates that cost anything. A long prompt is thus no reason to
be stingier, one very expensive candidate hardly moves the scale, and excluding a candidate does not change how the
others compare (the typical cost is the whole pool's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.errors import RouterError

COST_WEIGHT: Final = 0.1
"""At preference 0.5 the typical cost has to buy this much quality."""


def weights(quality_weight: float) -> tuple[float, float]:
    """What quality and cost (in typical costs) weigh in a score, for a preference in [0, 1]; RouterError outside."""
    if not 0.0 <= quality_weight <= 1.0:
        raise RouterError(f"a preference of {quality_weight!r} is out of range: 0 (cheapest) to 1 (best quality)")
    for_quality, for_cost = quality_weight**2, (1.0 - quality_weight) ** 2
    total = for_quality + for_cost
    return for_quality / total, COST_WEIGHT * for_cost / total


def typical_cost_usd(costs_usd: Sequence[float]) -> float:
    """Geometric mean of the positive costs; 1.0 where nothing costs anything, so that it can always divide."""
    logs = [math.log(cost) for cost in costs_usd if cost > 0.0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


def score_table(
    quality: npt.NDArray[np.float64], cost_usd: npt.NDArray[np.float64], quality_weight: float
) -> npt.NDArray[np.float64]:
    """Scores of shape (n_prompts, n_candidates), the same numbers as one prompt at a time."""
    for_quality, for_cost = weights(quality_weight)
    is_paid = cost_usd > 0.0
    logs = np.log(cost_usd, out=np.zeros_like(cost_usd), where=is_paid)
    typical = np.exp(logs.sum(axis=1) / np.maximum(is_paid.sum(axis=1), 1))
    return np.asarray(for_quality * quality - for_cost * cost_usd / typical[:, None])
