"""Non-decreasing convex hulls of cost-quality points, after RouterBench (Hu et al., arXiv 2403.12031, section 3)."""

from __future__ import annotations

import numpy as np

from atoll.errors import DataError
from atoll.routers.leaderboard.curves import Curve, Floats, single_models


def hull(curve: Curve) -> Curve:
    """The least concave, non-decreasing curve above all points, as its corners from cheap to dear.

    Between two corners it is what a coin that mixes the two settings reaches; right of the last it is flat. Corners
    come first along the last axis, which keeps its length: the last corner is repeated. RouterBench's own code finds
    the hull by interpolating all pairs; this walks from corner to corner along the steepest rise.
    """
    points = curve.by_cost()
    cost, quality = np.atleast_2d(points.cost_usd), np.atleast_2d(points.quality)
    lead = cost.shape[:-1]
    # The cheapest point, the best among equally cheap ones (which stand last).
    at = (cost <= cost[..., :1]).sum(axis=-1) - 1
    corners = [np.maximum(at, 0)]
    for _ in range(cost.shape[-1] - 1):
        here = corners[-1][..., None]
        run = cost - np.take_along_axis(cost, here, -1)
        rise = quality - np.take_along_axis(quality, here, -1)
        ahead = (run > 0.0) & (rise > 0.0)
        slope = np.divide(rise, run, out=np.full(run.shape, -1.0), where=ahead)
        # The farthest of the steepest: corners are never in one line with both neighbours.
        steepest = run.shape[-1] - 1 - slope[..., ::-1].argmax(axis=-1)
        corners.append(np.where(ahead.any(axis=-1), steepest, corners[-1]))
    index = np.stack(corners, axis=-1).reshape((*lead, -1))
    shape = curve.cost_usd.shape
    corner_cost = np.take_along_axis(cost, index, -1).reshape(shape)
    return Curve(corner_cost, np.take_along_axis(quality, index, -1).reshape(shape))


def aiq(curve: Curve, low_usd: float, high_usd: float) -> Floats:
    """Average improvement in quality: mean height of the hull over costs from `low_usd` to `high_usd`; up is better.

    Every router of a comparison takes the same interval, from the cheapest to the dearest single model. RouterBench's
    code divides by the upper end alone; this divides by the interval's width. Left of a router's cheapest point the
    height is 0, as it is for `nauc`.
    """
    if not 0.0 <= low_usd < high_usd:
        raise DataError(f"an interval of costs from {low_usd!r} to {high_usd!r} USD is empty or starts below zero")
    corners = hull(curve)
    start, end = corners.cost_usd[..., :-1], corners.cost_usd[..., 1:]
    first, last = corners.quality[..., :-1], corners.quality[..., 1:]
    slope = np.divide(last - first, end - start, out=np.zeros_like(end), where=end > start)
    left, right = np.clip(start, low_usd, high_usd), np.clip(end, low_usd, high_usd)
    heights = first + slope * ((left + right) / 2.0 - start)
    area = (heights * (right - left)).sum(axis=-1)
    flat = high_usd - np.clip(corners.cost_usd[..., -1], low_usd, high_usd)
    area = area + corners.quality[..., -1] * flat
    return np.where(curve.is_known, area / (high_usd - low_usd), np.nan)


def zero_router(quality: Floats, cost_usd: Floats) -> Curve:
    """RouterBench's zero router: the hull of the single models over tables of shape (n, m), which a router must beat.

    It looks at no prompt: between two corners it tosses a coin. These are its corners; the area under its lines is
    `nauc(mixed(corners), …)`, well above that of the corners as steps.
    """
    return hull(single_models(quality, cost_usd))


def mixed(corners: Curve, n_between: int = 100) -> Curve:
    """Points along the lines between consecutive corners of one curve, from cheap to dear, the corners among them.

    What coins of 1/n_between, 2/n_between, … reach. For the step functions (`nauc`, `qnc`) of a router that mixes.
    """
    if corners.cost_usd.ndim != 1:
        raise DataError(f"expected one curve, found a batch of shape {corners.cost_usd.shape}")
    at = np.linspace(0.0, len(corners) - 1, (len(corners) - 1) * n_between + 1)
    index = np.arange(len(corners))
    return Curve(np.interp(at, index, corners.cost_usd), np.interp(at, index, corners.quality))
