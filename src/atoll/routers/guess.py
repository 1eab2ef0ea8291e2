"""How good a model is of which nothing but price and size is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from atoll.routers.monotone import MonotoneCurve
from atoll.routers.names import size_in_name
from atoll.types import Candidate

_INPUT_SHARE: Final = 0.75
"""Of the tokens of a usual call, by which the two prices are blended."""
_LEAST_PRICE_SLOPE: Final = 0.15
"""Logits of quality per e-fold of price: a gpt-4-class price beyond all known ones still counts for something."""
_LEAST_SIZE_SLOPE: Final = 0.2
_LEAST_SIZE_SLOPE_BELOW: Final = 0.5
"""Under the smallest known model quality falls at least so fast: 135 million parameters are no small 7 billion."""
_FEWEST_POINTS: Final = 4
_UNKNOWN_STD: Final = 0.8
"""In logits, of a model without price and size."""
EFFORTS: Final[Mapping[str, tuple[float, float]]] = {
    "none": (-0.3, 0.7),
    "minimal": (-0.3, 0.7),
    "low": (-0.15, 1.0),
    "medium": (0.0, 1.7),
    "high": (0.15, 3.0),
    "xhigh": (0.2, 4.5),
    "max": (0.2, 4.5),
}
"""What a reasoning effort adds to a model's skill (logits), and by what it multiplies its output tokens. Assumed, not
fitted: it keeps the efforts of one model in order until feedback tells."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Of skill, in logits at average difficulty."""

    skill: float
    std: float


@dataclass(frozen=True, slots=True)
class SkillCurves:
    """Skill over the logarithms of price and of size; a curve is None where too few models told."""

    by_price: MonotoneCurve | None
    by_size: MonotoneCurve | None
    mean_skill: float

    @classmethod
    def fit(cls, candidates: Sequence[Candidate], skills: Sequence[float], mean_skill: float) -> Self:
        """`skills` of models whose prices or sizes are known; others among them are passed over."""
        priced = [(math.log(price), s) for c, s in zip(candidates, skills, strict=True) if (price := blended_price(c))]
        sized = [(math.log(size), s) for c, s in zip(candidates, skills, strict=True) if (size := size_billion(c))]
        return cls(
            _curve(priced, _LEAST_PRICE_SLOPE), _curve(sized, _LEAST_SIZE_SLOPE, _LEAST_SIZE_SLOPE_BELOW), mean_skill
        )

    def guess(self, candidate: Candidate) -> Guess:
        """By price and by size, their mean where both are known; a model that is free is known by its size alone."""
        guesses = []
        price, size = blended_price(candidate), size_billion(candidate)
        if self.by_price is not None and price:
            guesses.append(Guess(self.by_price(math.log(price)), self.by_price.residual_std))
        if self.by_size is not None and size:
            guesses.append(Guess(self.by_size(math.log(size)), self.by_size.residual_std))
        if not guesses:
            return Guess(self.mean_skill, _UNKNOWN_STD)
        n = len(guesses)
        return Guess(sum(each.skill for each in guesses) / n, sum(each.std for each in guesses) / n)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        price, size = data["by_price"], data["by_size"]
        return cls(
            MonotoneCurve.from_json(price) if price else None,
            MonotoneCurve.from_json(size) if size else None,
            float(data["mean_skill"]),
        )


def blended_price(candidate: Candidate) -> float:
    """US dollars per million tokens of a usual call; 0 for a model without prices."""
    return _INPUT_SHARE * candidate.input_usd_per_mtok + (1.0 - _INPUT_SHARE) * candidate.output_usd_per_mtok


def size_billion(candidate: Candidate) -> float | None:
    """What the candidate says, else what its name does."""
    if candidate.parameters_billion is not None:
        return candidate.parameters_billion
    return next((size for name in (candidate.model, candidate.name) if (size := size_in_name(name)) is not None), None)


def _curve(points: list[tuple[float, float]], least_slope: float, below: float | None = None) -> MonotoneCurve | None:
    if len({x for x, _ in points}) < _FEWEST_POINTS:
        return None
    curve = MonotoneCurve.fit([x for x, _ in points], [y for _, y in points], least_slope=least_slope)
    if below is None or curve.below >= below:
        return curve
    return MonotoneCurve(curve.x, curve.y, below, curve.above, curve.residual_std)
