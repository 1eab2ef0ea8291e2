"""A rising curve through scattered points, shipped as breakpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MonotoneCurve:
    """Straight lines between breakpoints, and beyond them with the slopes `below` and `above`. Strictly rising."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    below: float
    above: float
    residual_std: float
    """Of the points around the curve: how much it is to be believed."""

    @classmethod
    def fit(cls, x: Sequence[float], y: Sequence[float], *, least_slope: float, below: float | None = None) -> Self:
        """Isotonic regression (pool adjacent violators) with a least slope.

        What is isotonic is `y - least_slope * x`, so no stretch is flat: of two models that differ in price alone, the
        dearer is expected to be better, if only a little. `below` is the slope under the lowest point, by default that
        of the straight line through all points, but at least `least_slope`.
        """
        order = np.argsort(x, kind="stable")
        xs, ys = np.asarray(x, dtype=np.float64)[order], np.asarray(y, dtype=np.float64)[order]
        blocks = _pooled(xs, ys - least_slope * xs)
        knots_x = tuple(float(block[0]) for block in blocks)
        knots_y = tuple(float(block[1] + least_slope * block[0]) for block in blocks)
        spread = float(np.var(xs))
        line = float(np.cov(xs, ys, bias=True)[0, 1]) / spread if spread > 0 else least_slope
        curve = cls(knots_x, knots_y, max(line, least_slope) if below is None else below, least_slope, 0.0)
        residuals = ys - np.array([curve(value) for value in xs])
        return cls(curve.x, curve.y, curve.below, curve.above, float(np.sqrt(np.mean(residuals**2))))

    def __call__(self, x: float) -> float:
        if x < self.x[0]:
            return self.y[0] - self.below * (self.x[0] - x)
        if x > self.x[-1]:
            return self.y[-1] + self.above * (x - self.x[-1])
        return float(np.interp(x, self.x, self.y))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(tuple(data["x"]), tuple(data["y"]), data["below"], data["above"], data["residual_std"])


def _pooled(xs: Floats, ys: Floats) -> list[tuple[float, float]]:
    """Centre and level of each block of pool-adjacent-violators; levels rise, and so do centres."""
    blocks: list[tuple[float, float, int]] = []
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        blocks.append((x, y, 1))
        while len(blocks) > 1 and (blocks[-2][1] >= blocks[-1][1] or blocks[-2][0] >= blocks[-1][0]):
            (x1, y1, n1), (x2, y2, n2) = blocks.pop(-2), blocks.pop()
            n = n1 + n2
            blocks.append(((x1 * n1 + x2 * n2) / n, (y1 * n1 + y2 * n2) / n, n))
    return [(x, y) for x, y, _ in blocks]
