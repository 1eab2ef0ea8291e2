"""RouteLLM's metrics for a strong and a weak model (Ong et al., arXiv 2406.18665, section 2).

A curve here is a router's mean quality against the share of calls that go to the strong model: arrays of shape
(..., L), in any order. All weak (share 0) and all strong (share 1) are always possible and belong to every curve;
between two points a coin mixes, so lines join them.
"""

from __future__ import annotations

import numpy as np

from atoll.errors import DataError
from atoll.routers.leaderboard.curves import Floats, Integers


def strong_share(choices: Integers, strong: int) -> Floats:
    """The share of prompts that go to the column `strong`, for choices of shape (..., n)."""
    return np.asarray((np.asarray(choices) == strong).mean(axis=-1))


def pgr(quality: float | Floats, weak_quality: float, strong_quality: float) -> Floats:
    """Performance gap recovered: 0 as the weak model, 1 as the strong one, above 1 where routing beats both."""
    if strong_quality == weak_quality:
        raise DataError(f"both models reach {weak_quality!r}: there is no gap to recover")
    return (np.asarray(quality, dtype=np.float64) - weak_quality) / (strong_quality - weak_quality)


def apgr(share: Floats, quality: Floats, weak_quality: float, strong_quality: float) -> Floats:
    """Average PGR over shares from 0 to 1: 0.5 for a coin; up is better. Exact for the lines, falling or rising."""
    share, recovered = _completed(share, quality, weak_quality, strong_quality)
    return np.asarray(np.trapezoid(recovered, share, axis=-1))


def cpt(share: Floats, quality: Floats, weak_quality: float, strong_quality: float, target: float) -> Floats:
    """Call-performance threshold: the least share of strong calls that recovers `target` of the gap; down is better.

    CPT(50%) is `target=0.5`. The first crossing from the left. RouteLLM's code interpolates shares over qualities,
    which is wrong where a curve falls in between; this walks the curve. Inf for a target that no share reaches.
    """
    share, recovered = _completed(share, quality, weak_quality, strong_quality)
    start, end = recovered[..., :-1], recovered[..., 1:]
    climb = np.divide(target - start, end - start, out=np.zeros_like(end), where=end > start)
    at = share[..., :-1] + np.clip(climb, 0.0, 1.0) * np.diff(share, axis=-1)
    crossings = np.where((start >= target) | (end >= target), np.where(start >= target, share[..., :-1], at), np.inf)
    return np.asarray(crossings.min(axis=-1))


def _completed(share: Floats, quality: Floats, weak_quality: float, strong_quality: float) -> tuple[Floats, Floats]:
    """Shares in order and their PGR, from all weak to all strong: shapes (..., L + 2)."""
    share, quality = np.asarray(share, dtype=np.float64), np.asarray(quality, dtype=np.float64)
    if share.shape != quality.shape or share.ndim == 0:
        raise DataError(f"expected shares and qualities of one shape (..., L), found {share.shape} and {quality.shape}")
    if share.size and not (share.min() >= 0.0 and share.max() <= 1.0):
        raise DataError(f"shares must lie in [0, 1], found {float(share.min())!r} to {float(share.max())!r}")
    recovered = pgr(quality, weak_quality, strong_quality)
    order = np.lexsort((recovered, share), axis=-1)
    column = np.zeros((*share.shape[:-1], 1))
    return (
        np.concatenate([column, np.take_along_axis(share, order, -1), column + 1.0], axis=-1),
        np.concatenate([column, np.take_along_axis(recovered, order, -1), column + 1.0], axis=-1),
    )
