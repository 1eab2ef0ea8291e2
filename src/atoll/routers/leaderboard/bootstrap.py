"""Confidence intervals: a router's metric, and the paired difference of two, over prompts and seeds.

A replica draws prompts and seeds anew, with replacement. A prompt that is in the test part of several seeds is drawn
once for all of them: treating overlapping test parts as independent would make intervals too narrow. Drawing seeds
as well counts part of the prompts' noise twice, so intervals err on the wide side. The same `seed`
draws the same replicas for every router, so subtracting two routers' replicas is the paired bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from atoll.errors import DataError
from atoll.routers.leaderboard.curves import Curve, Floats, Integers, nauc, peak, qnc

_CHUNK: Final = 256
"""Replicas at a time: 20 MB of weights for 10,000 prompts."""
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True)
class SeedSweep:
    """One router's choices for one seed's test prompts, beside the best single model's."""

    quality: Floats
    """Of shape (L, n): of the chosen models, by setting and prompt."""
    cost_usd: Floats
    """Of shape (L, n)."""
    best_cost_usd: Floats
    """Of shape (n,): the best single model's."""
    best_quality: Floats | None = None
    """Of shape (n,): the best single model's; `qnc` needs it."""
    prompt_rows: Integers | None = None
    """Of shape (n,): which prompts of the dataset these are, so that seeds share draws. None: drawn by themselves."""

    def __post_init__(self) -> None:
        shape = self.quality.shape
        if len(shape) != 2 or 0 in shape or self.cost_usd.shape != shape:
            raise DataError(f"expected qualities and costs of one shape (L, n), found {shape}, {self.cost_usd.shape}")
        for name in ("best_cost_usd", "best_quality", "prompt_rows"):
            array = getattr(self, name)
            if array is not None and array.shape != shape[1:]:
                raise DataError(f"{name} has shape {array.shape}; {shape[1]} prompts were swept")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a metric reads: curves of shape (..., L) and the best single model's means, of shape (...)."""

    curve: Curve
    best_cost_usd: Floats
    best_quality: Floats


CurveMetric = Callable[[Sample], Floats]


def nauc_metric(sample: Sample) -> Floats:
    return nauc(sample.curve, sample.best_cost_usd)


def peak_metric(sample: Sample) -> Floats:
    return peak(sample.curve)


def qnc_metric(sample: Sample) -> Floats:
    return qnc(sample.curve, sample.best_quality, sample.best_cost_usd)


@dataclass(frozen=True, slots=True)
class Replicas:
    """A metric's value on the prompts as they are (mean over seeds), and on each replica, of shape (B,)."""

    value: float
    replicas: Floats


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where 95 % (or `level`) of the replicas lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours − theirs: the difference as measured, its interval, and the two-sided p of no difference."""

    difference: float
    low: float
    high: float
    p_value: float
    """In [1/(B + 1), 1]: twice the smaller share of replicas on one side of zero."""

    @property
    def is_better(self) -> bool:
        """The whole interval is above zero; for metrics where up is better."""
        return self.low > 0.0

    @property
    def is_worse(self) -> bool:
        return self.high < 0.0


def bootstrap(
    sweeps: Sequence[SeedSweep], *, metric: CurveMetric = nauc_metric, n_replicas: int = 2000, seed: int = 0
) -> Replicas:
    """A metric's replicas for one router, one sweep a seed. Raises DataError for no sweep or fewer than 2 replicas.

    Cost: one matrix product of (B, n) and (n, 2 L + 2) for each seed.
    """
    if not sweeps or n_replicas < 2:
        raise DataError(f"a bootstrap needs a seed and two replicas at least, found {len(sweeps)} and {n_replicas}")
    columns = [_columns(sweep) for sweep in sweeps]
    rows, n_rows = _rows(sweeps)
    value = float(np.mean([_measure(each.mean(axis=0), metric) for each in columns]))
    rng = np.random.default_rng(seed)
    parts = []
    for start in range(0, n_replicas, _CHUNK):
        n = min(_CHUNK, n_replicas - start)
        seed_weights = _draw(rng, n, len(sweeps)) / len(sweeps)
        prompt_weights = _draw(rng, n, n_rows)
        of_seeds = [
            _measure(_weighted(prompt_weights[:, taken], each), metric)
            for taken, each in zip(rows, columns, strict=True)
        ]
        values = np.stack(of_seeds, axis=1)
        # A seed that was not drawn has no say, even if its value is infinite (`qnc`).
        values = np.multiply(values, seed_weights, out=np.zeros_like(values), where=seed_weights > 0.0)
        parts.append(values.sum(axis=1))
    return Replicas(value, np.concatenate(parts))


def confidence_interval(replicas: Replicas, *, level: float = 0.95) -> Interval:
    """The percentile interval; NaN where the metric is unknown."""
    return Interval(replicas.value, *_interval(replicas.replicas, level))


def compare(ours: Replicas, theirs: Replicas, *, level: float = 0.95) -> Comparison:
    """The paired difference of two routers whose replicas were drawn with one `seed` over the same sweeps' prompts."""
    if ours.replicas.shape != theirs.replicas.shape:
        raise DataError(f"{len(ours.replicas)} and {len(theirs.replicas)} replicas are not pairs")
    differences = _minus(ours.replicas, theirs.replicas)
    n = len(differences)
    if np.isnan(differences).any():
        return Comparison(float("nan"), float("nan"), float("nan"), float("nan"))
    tail = min(int((differences <= 0.0).sum()), int((differences >= 0.0).sum()))
    p_value = min(1.0, 2.0 * (tail + 1) / (n + 1))
    difference = float(_minus(np.array(ours.value), np.array(theirs.value)))
    return Comparison(difference, *_interval(differences, level), p_value)


def paired_bootstrap(
    ours: Sequence[SeedSweep],
    theirs: Sequence[SeedSweep],
    *,
    metric: CurveMetric = nauc_metric,
    n_replicas: int = 2000,
    seed: int = 0,
) -> Comparison:
    """`compare` of two `bootstrap`s. With many pairs, keep each router's `Replicas` and compare those.

    Raises DataError where the two were not measured on the same prompts.
    """
    if len(ours) != len(theirs):
        raise DataError(f"{len(ours)} and {len(theirs)} seeds cannot be paired")
    for mine, other in zip(ours, theirs, strict=True):
        if mine.quality.shape[1] != other.quality.shape[1] or not _same(mine.prompt_rows, other.prompt_rows):
            raise DataError("the two routers were measured on different prompts; pair them seed by seed")
    return compare(
        bootstrap(ours, metric=metric, n_replicas=n_replicas, seed=seed),
        bootstrap(theirs, metric=metric, n_replicas=n_replicas, seed=seed),
    )


def _columns(sweep: SeedSweep) -> Floats:
    """Qualities, costs, and the best single model's quality and cost: shape (n, 2 L + 2)."""
    best_quality = np.full(sweep.best_cost_usd.shape, np.nan) if sweep.best_quality is None else sweep.best_quality
    rows = [sweep.quality, sweep.cost_usd, best_quality[None], sweep.best_cost_usd[None]]
    return np.ascontiguousarray(np.concatenate(rows, dtype=np.float64).T)


def _rows(sweeps: Sequence[SeedSweep]) -> tuple[list[Integers], int]:
    """Where each seed's prompts stand among all that are drawn, and how many those are."""
    if all(sweep.prompt_rows is not None for sweep in sweeps):
        every, positions = np.unique(np.concatenate([sweep.prompt_rows for sweep in sweeps]), return_inverse=True)
        ends = np.cumsum([sweep.quality.shape[1] for sweep in sweeps])
        return [part.astype(np.int64) for part in np.split(positions, ends[:-1])], len(every)
    starts = np.cumsum([0, *(sweep.quality.shape[1] for sweep in sweeps)])
    return [np.arange(first, last) for first, last in pairwise(starts)], int(starts[-1])


def _draw(rng: np.random.Generator, n_replicas: int, size: int) -> Floats:
    """How often each of `size` is drawn in `size` draws with replacement: shape (n_replicas, size)."""
    draws = rng.integers(size, size=(n_replicas, size)) + np.arange(n_replicas)[:, None] * size
    return np.bincount(draws.ravel(), minlength=n_replicas * size).reshape(n_replicas, size).astype(np.float64)


def _weighted(weights: Floats, columns: Floats) -> Floats:
    """Weighted means of the columns: shape (B, 2 L + 2). Prompts of a seed are drawn a random number of times."""
    total = weights.sum(axis=1, keepdims=True)
    # A test part of a handful of prompts may be missed altogether: then it counts as it is.
    weights = np.where(total > 0.0, weights, 1.0)
    return np.asarray((weights @ columns) / weights.sum(axis=1, keepdims=True))


def _measure(means: Floats, metric: CurveMetric) -> Floats:
    n_settings = (means.shape[-1] - 2) // 2
    curve = Curve(means[..., n_settings:-2], means[..., :n_settings])
    return metric(Sample(curve, means[..., -1], means[..., -2]))


def _minus(ours: Floats, theirs: Floats) -> Floats:
    """Ours − theirs; 0 where both are infinite, or where they differ by rounding alone.

    Two routers that choose alike differ by rounding, which would look like a difference on every replica.
    """
    equal = (ours == theirs) | (np.abs(np.nan_to_num(ours) - np.nan_to_num(theirs)) < _ROUNDING)
    known = ~(np.isnan(ours) | np.isnan(theirs))
    return np.subtract(ours, theirs, out=np.where(known, 0.0, np.nan), where=known & ~equal)


def _interval(values: Floats, level: float) -> tuple[float, float]:
    if not 0.0 < level < 1.0:
        raise DataError(f"a level of {level!r} is outside (0, 1); 0.95 is usual")
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail], method="inverted_cdf")
    return float(low), float(high)


def _same(mine: Integers | None, other: Integers | None) -> bool:
    return mine is other if mine is None or other is None else bool(np.array_equal(mine, other))
