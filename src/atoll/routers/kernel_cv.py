"""Choosing a kernel by leave-one-out cross-validation.

Every sampled prompt is estimated from all others: one search gives the neighbours for every k, and running sums along
them give the estimates for every k at once. The kernel with the smallest squared error of quality is taken. Copies of
the prompt itself are not neighbours: they would speak for k = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.routers.kernel import Kernel
from atoll.routers.nearest import NearestPrompts
from atoll.routers.table import OutcomeTable

Floats = npt.NDArray[np.float64]

K_GRID: Final = (5, 10, 20, 40, 80, 160, 320)
BANDWIDTH_GRID: Final = (0.05, 0.1, 0.2, 0.4)
PRIOR_STRENGTH_GRID: Final = (1.0, 4.0, 16.0)
COPY_SIMILARITY: Final = 0.9995
"""From here on a neighbour is the same prompt."""
_FEWEST_K: Final = 5
_NEAR_QUANTILE: Final = 0.1
_EXTRA_NEIGHBOURS: Final = 16
"""Searched beyond k, to make up for copies."""
_CHUNK: Final = 64
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """Leave-one-out results on the sampled prompts."""

    kernel: Kernel
    squared_error: float
    """Mean over known cells, of quality; the candidate's mean everywhere would have `squared_error_of_means`."""
    squared_error_of_means: float
    residual_variance: Floats
    """Of quality, per candidate, shape (m,); NaN where unknown."""
    rows: npt.NDArray[np.int64]
    """The sampled prompts."""
    quality: Floats
    """Their estimates, of shape (len(rows), m)."""


@dataclass(frozen=True, slots=True)
class Picks:
    """Mean quality that choices would have had on the sampled prompts, among the candidates known for each."""

    router: float
    """The candidate with the highest estimate."""
    best_single: float
    """Always the candidate with the highest mean."""
    random: float
    oracle: float
    """The best candidate of each prompt, in hindsight."""


def picks(validation: CrossValidation, table: OutcomeTable, means: Floats) -> Picks:
    truth = table.quality[validation.rows].astype(np.float64)
    is_asked = np.isfinite(truth).any(axis=1)
    truth, quality = truth[is_asked], validation.quality[is_asked]
    known, row = np.isfinite(truth), np.arange(len(truth))
    return Picks(
        router=float(truth[row, np.where(known, quality, -1.0).argmax(axis=1)].mean()),
        best_single=float(truth[row, np.where(known, means, -1.0).argmax(axis=1)].mean()),
        random=float(np.nanmean(truth, axis=1).mean()),
        oracle=float(np.nanmax(truth, axis=1).mean()),
    )


def cross_validate(
    table: OutcomeTable,
    means: Floats,
    nearest: NearestPrompts,
    *,
    rows: npt.NDArray[np.int64],
    k_grid: Sequence[int] = K_GRID,
    bandwidths: Sequence[float] = BANDWIDTH_GRID,
    prior_strengths: Sequence[float] = PRIOR_STRENGTH_GRID,
    progress: Progress = lambda share: None,
) -> CrossValidation:
    """Estimate the prompts `rows` of `table` from all others, with every kernel of the grids.

    `means` are the candidates' means, of shape (m,), finite. `progress` is told the share that is done.
    """
    most = max(1, min(max(k_grid), len(table) - 1))
    ks = sorted({min(k, most) for k in k_grid})
    similarity, neighbours = _without_copies(table, nearest, rows, most)
    others = similarity[:, 0][np.isfinite(similarity[:, 0])]
    # Where no prompt has another beside copies of itself, only copies count as near.
    near = float(np.quantile(others, _NEAR_QUANTILE)) if len(others) else 1.0
    kernels = [
        [Kernel(k, bandwidth, strength, near) for k in ks for strength in prior_strengths] for bandwidth in bandwidths
    ]
    errors = np.zeros((len(bandwidths), len(kernels[0])))
    n_chunks = -(-len(rows) // _CHUNK)
    for done, chunk in enumerate(range(0, len(rows), _CHUNK)):
        part = slice(chunk, chunk + _CHUNK)
        truth = table.quality[rows[part]].astype(np.float64)
        for index, same_bandwidth in enumerate(kernels):
            estimates = _estimates(table, means, similarity[part], neighbours[part], same_bandwidth)
            errors[index] += [np.nansum((estimate - truth) ** 2) for estimate in estimates]
        progress((done + 1) / n_chunks)
    best = min(
        itertools.product(range(len(bandwidths)), range(len(kernels[0]))),
        key=lambda cell: (errors[cell], -kernels[cell[0]][cell[1]].k),
    )
    return _results(table, means, similarity, neighbours, rows, kernels[best[0]][best[1]])


def _results(
    table: OutcomeTable,
    means: Floats,
    similarity: npt.NDArray[np.float32],
    neighbours: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    kernel: Kernel,
) -> CrossValidation:
    truth = table.quality[rows].astype(np.float64)
    quality = np.concatenate(
        [
            _estimates(table, means, similarity[start : start + _CHUNK], neighbours[start : start + _CHUNK], [kernel])[
                0
            ]
            for start in range(0, len(rows), _CHUNK)
        ]
    )
    known = np.isfinite(truth)
    squares = np.where(known, (quality - np.nan_to_num(truth)) ** 2, 0.0)
    squares_of_means = np.where(known, (means - np.nan_to_num(truth)) ** 2, 0.0)
    counts = known.sum(axis=0)
    return CrossValidation(
        kernel,
        float(squares.sum() / known.sum()),
        float(squares_of_means.sum() / known.sum()),
        np.divide(squares.sum(axis=0), counts, out=np.full(len(counts), np.nan), where=counts > 0),
        rows,
        quality,
    )


def _without_copies(
    table: OutcomeTable, nearest: NearestPrompts, rows: npt.NDArray[np.int64], k: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Similarities and rows of the nearest *other* prompts, each of shape (len(rows), k)."""
    similarity, neighbours = nearest.search(table.embeddings[rows], k + _EXTRA_NEIGHBOURS)
    is_copy = (neighbours == rows[:, None]) | (similarity >= COPY_SIMILARITY)
    similarity = np.where(is_copy, -np.inf, similarity)
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarity, order, axis=1), np.take_along_axis(neighbours, order, axis=1)


def _estimates(
    table: OutcomeTable,
    means: Floats,
    similarity: npt.NDArray[np.float32],
    neighbours: npt.NDArray[np.int64],
    kernels: Sequence[Kernel],
) -> list[Floats]:
    """One array of shape (n, m) per kernel; the kernels differ in k and prior strength only."""
    finite = np.where(np.isfinite(similarity), similarity, -1e9).astype(np.float32)
    weights = np.where(np.isfinite(similarity), kernels[0].weights(finite), 0.0)[:, :, None]
    values = table.quality[neighbours]
    known = np.isfinite(values)
    mass = np.cumsum(weights * known, axis=1)
    total = np.cumsum(np.where(known, weights * np.nan_to_num(values), 0.0), axis=1)
    return [
        (kernel.prior_strength * means + total[:, kernel.k - 1]) / (kernel.prior_strength + mass[:, kernel.k - 1])
        for kernel in kernels
    ]
