"""A router's cost-quality curve, and what is read off it without drawing hulls.

A router answers for the same prompts at every setting of its dial, from quality first to cost first. Each setting is
one point: mean cost and mean quality over the prompts. Metrics read one curve or a batch of them (bootstrap replicas):
the last axis is the sweep, all axes before it are kept. A curve with an unknown (NaN) point has NaN metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer[Any]]

SAME_QUALITY: Final = 1e-9
"""Two means of quality as near as this are one: sums of the same prompts in another order differ by rounding."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order of the sweep (quality first to cost first): arrays of shape (..., L)."""

    cost_usd: Floats
    """Mean over the prompts, of one call."""
    quality: Floats
    """Mean over the prompts, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.cost_usd.shape != self.quality.shape or self.cost_usd.ndim == 0 or self.cost_usd.shape[-1] == 0:
            raise DataError(
                f"a curve needs costs and qualities of one shape (..., L) with L >= 1, found {self.cost_usd.shape} "
                f"and {self.quality.shape}"
            )

    def __len__(self) -> int:
        """Settings in the sweep."""
        return int(self.cost_usd.shape[-1])

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Of shape (...): whether every point has a cost and a quality."""
        return np.asarray((np.isfinite(self.cost_usd) & np.isfinite(self.quality)).all(axis=-1))

    def by_cost(self) -> Curve:
        """The same points from cheap to dear, the worse first where costs are equal."""
        order = np.lexsort((self.quality, self.cost_usd), axis=-1)
        return Curve(np.take_along_axis(self.cost_usd, order, -1), np.take_along_axis(self.quality, order, -1))

    def frontier(self) -> Curve:
        """From cheap to dear, each point's quality the best that can be had for at most its cost."""
        points = self.by_cost()
        return Curve(points.cost_usd, np.maximum.accumulate(points.quality, axis=-1))


def curve_of(choices: Integers, quality: Floats, cost_usd: Floats) -> Curve:
    """The curve of `choices`, columns of shape (L, n), over outcomes of shape (n, m)."""
    return Curve(picked(choices, cost_usd).mean(axis=-1), picked(choices, quality).mean(axis=-1))


def single_models(quality: Floats, cost_usd: Floats) -> Curve:
    """Every model by itself, in column order: L = m."""
    _check_table(quality)
    _check_table(cost_usd)
    return Curve(cost_usd.mean(axis=0, dtype=np.float64), quality.mean(axis=0, dtype=np.float64))


def best_single(quality: Floats, cost_usd: Floats) -> int:
    """The column of the best mean quality; the cheapest among equals, the first where no cost is known."""
    singles = single_models(quality, cost_usd)
    best = singles.quality >= np.nanmax(singles.quality) - SAME_QUALITY
    costs = np.where(best, np.nan_to_num(singles.cost_usd, nan=np.inf), np.inf)
    return int(np.lexsort((costs, ~best))[0])


def picked(choices: Integers, values: Floats) -> Floats:
    """The cells of `values`, of shape (n, m), that `choices`, columns of shape (..., n), names: shape (..., n)."""
    _check_table(values)
    choices = np.asarray(choices)
    n, m = values.shape
    if choices.ndim == 0 or choices.shape[-1] != n:
        raise DataError(f"choices of shape {choices.shape} do not fit a table of {n} prompts: expected (..., {n})")
    if choices.size and not (choices.min() >= 0 and choices.max() < m):
        raise DataError(f"a choice is outside the table's {m} models: {choices.min()} to {choices.max()}")
    return np.asarray(values[np.arange(n), choices], dtype=np.float64)


def nauc(curve: Curve, cost_of_best_usd: float | Floats) -> Floats:
    """Normalised area under the deferral curve, in [0, 1]; up is better.

    The integral over x = cost / `cost_of_best_usd` (the best single model's, shape (...) or one for all) from 0 to 1 of
    the best mean quality of any point that costs at most x, and 0 left of the cheapest point. A step function: nothing
    is promised between two settings. After the deferral curve's area of UniRoute (arXiv 2502.08773) and ORBIT's nAUC,
    which interpolate.
    """
    frontier = curve.frontier()
    x = np.minimum(frontier.cost_usd / _positive(cost_of_best_usd)[..., None], 1.0)
    widths = np.diff(x, axis=-1, append=1.0)
    return np.where(curve.is_known, (frontier.quality * widths).sum(axis=-1), np.nan)


def peak(curve: Curve) -> Floats:
    """The best mean quality of any setting, whatever it costs; known without costs too."""
    return np.asarray(curve.quality.max(axis=-1))


def qnc(curve: Curve, best_quality: float | Floats, best_cost_usd: float | Floats) -> Floats:
    """Quality-neutral cost (UniRoute, arXiv 2502.08773): what the best single model's quality costs, over its cost.

    The cheapest point of at least `best_quality`, as a ratio (1: no saving); inf where no point reaches it.
    """
    reaches = curve.quality >= np.asarray(best_quality)[..., None] - SAME_QUALITY
    cheapest = np.where(reaches, curve.cost_usd, np.inf).min(axis=-1)
    return np.where(curve.is_known, cheapest / _positive(best_cost_usd), np.nan)


def operating_point(validation: Curve, target_quality: float) -> int:
    """The setting to measure on test, chosen on validation: the cheapest that reaches `target_quality` there.

    The best-quality one where none does, or where costs are unknown; the cheaper among equals.
    """
    if validation.quality.ndim != 1:
        raise DataError(
            f"an operating point is chosen on one curve, not on a batch of shape {validation.quality.shape}"
        )
    cost_usd = np.nan_to_num(validation.cost_usd, nan=np.inf)
    reaches = validation.quality >= target_quality - SAME_QUALITY
    if not reaches.any() or not np.isfinite(validation.cost_usd).any():
        reaches = validation.quality >= np.nanmax(validation.quality) - SAME_QUALITY
    return int(np.lexsort((-validation.quality, cost_usd, ~reaches))[0])


def _positive(usd: float | Floats) -> Floats:
    values = np.asarray(usd, dtype=np.float64)
    if (values <= 0.0).any():
        raise DataError(f"the best single model costs {float(values.min())!r} USD; ratios need a cost above zero")
    return values


def _check_table(values: Floats) -> None:
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(f"expected a table of shape (n, m) with a prompt and a model at least, found {values.shape}")
