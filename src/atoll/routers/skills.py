"""Skill of models and difficulty of clusters, from who answered what.

    P(right) = sigmoid(skill of the model + difficulty of the cluster in its dataset + deviation of the model in the
    cluster)

A logistic two-way model: the Rasch model of test theory, for clusters instead of questions. Datasets with other models
and other questions become comparable through the models that they share: on multiple choice with four options
everybody looks better than with ten. Deviations are what makes routing possible; they are drawn to zero where a cell
has few outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atoll.routers.additive import two_way

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_ROUNDS: Final = 200
_SETTLED: Final = 1e-6
_RIDGE: Final = 0.05
"""On difficulties and skills: keeps cells in which all or none were right finite."""
_LARGEST_STEP: Final = 1.0
_SLOPE_ROUNDS: Final = 3
_SLOPE_RIDGE: Final = 2.0
"""Against a few models that differ in skill: as much as two models one logit from the mean."""
_CELL_HALF: Final = 20.0
"""Outcomes after which a cell's deviation is half known."""


@dataclass(frozen=True, slots=True)
class Skills:
    """Of m models and k clusters."""

    skill: Floats
    """Shape (m,), logits at average difficulty (the outcomes' average is zero); NaN for a model without outcomes."""
    difficulty: Floats
    """Shape (k,), logits, higher is easier; mean of the datasets in the cluster."""
    slope: Floats
    """Shape (k,): how much more than elsewhere a logit of skill counts in the cluster."""
    mean_skill: float
    """From which skills are counted for `slope`."""
    deviation: Floats
    """Shape (m, k), logits; what the slope explains is in it."""
    share: Floats
    """Shape (k,): share of the prompts in each cluster."""
    log_tokens: Floats
    """Shape (m,): log of the mean output tokens at an average cluster; NaN where no outcome tells."""
    cluster_log_tokens: Floats
    """Shape (k,): what a cluster adds to it."""


def fit_skills(
    quality: npt.NDArray[np.float32],
    output_tokens: npt.NDArray[np.float32],
    cluster: Ints,
    dataset: Ints,
    n_clusters: int,
    *,
    deviation_std: float,
) -> Skills:
    """`quality` and `output_tokens` have shape (n, m), NaN where unknown; `cluster` and `dataset` shape (n,).

    `deviation_std` is the prior's standard deviation of a model in a cluster, in logits.
    """
    n_datasets = int(dataset.max()) + 1
    cell = cluster * n_datasets + dataset
    n_cells = n_clusters * n_datasets
    count, right = _sums(quality, cell, n_cells)
    skill, cell_difficulty = _two_way_logit(count, right)
    per_cell = count.sum(axis=1)
    difficulty = _by_cluster(cell_difficulty, per_cell, n_clusters)
    centre = float(np.average(difficulty, weights=np.maximum(per_cell.reshape(n_clusters, -1).sum(axis=1), 1e-9)))
    eta = skill + cell_difficulty[:, None]
    known = count.sum(axis=0) > 0
    mean_skill = float(skill[known].mean())
    slope = np.zeros(n_clusters)
    for _ in range(_SLOPE_ROUNDS):
        expected = slope * np.where(known, skill - mean_skill, 0.0)[:, None]
        deviation = _deviations(eta, count, right, expected, deviation_std)
        slope = _slopes(deviation, skill - mean_skill, _cell_counts(count, n_clusters))
    told, tokens = _sums(output_tokens, cell, n_cells)
    log_tokens, cell_tokens = two_way(np.log(np.maximum(tokens / np.maximum(told, 1.0), 1.0)), told)
    prompts = np.bincount(cluster, minlength=n_clusters).astype(np.float64)
    return Skills(
        skill=np.where(count.sum(axis=0) > 0, skill + centre, np.nan),
        difficulty=difficulty - centre,
        slope=slope,
        mean_skill=mean_skill + centre,
        deviation=deviation,
        share=prompts / prompts.sum(),
        log_tokens=log_tokens,
        cluster_log_tokens=_by_cluster(cell_tokens, told.sum(axis=1), n_clusters),
    )


def sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def _sums(values: npt.NDArray[np.float32], cell: Ints, n_cells: int) -> tuple[Floats, Floats]:
    """How many values are known and their sum, each of shape (n_cells, m)."""
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0).astype(np.float64)
    count = np.zeros((n_cells, values.shape[1]))
    total = np.zeros((n_cells, values.shape[1]))
    np.add.at(count, cell, known)
    np.add.at(total, cell, filled)
    return count, total


def _two_way_logit(count: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Skills (m,) and difficulties (n_cells,) by alternating Newton steps."""
    skill, difficulty = np.zeros(count.shape[1]), np.zeros(count.shape[0])
    for _ in range(_ROUNDS):
        step_down = _newton(skill + difficulty[:, None], count, right, difficulty, axis=1)
        difficulty = difficulty + step_down
        step_across = _newton(skill + difficulty[:, None], count, right, skill, axis=0)
        skill = skill + step_across
        if max(np.abs(step_down).max(), np.abs(step_across).max()) < _SETTLED:
            break
    return skill, difficulty


def _newton(eta: Floats, count: Floats, right: Floats, value: Floats, axis: int) -> Floats:
    p = sigmoid(eta)
    gradient = (right - count * p).sum(axis=axis) - _RIDGE * value
    curvature = (count * p * (1.0 - p)).sum(axis=axis) + _RIDGE
    return np.asarray(np.clip(gradient / curvature, -_LARGEST_STEP, _LARGEST_STEP))


def _deviations(eta: Floats, count: Floats, right: Floats, expected: Floats, std: float) -> Floats:
    """Per model and cluster, over the datasets in it, drawn to `expected`; both of shape (m, n_clusters)."""
    n_models, n_clusters = expected.shape
    eta, count, right = (each.reshape(n_clusters, -1, n_models) for each in (eta, count, right))
    deviation = expected.T.copy()
    for _ in range(_ROUNDS):
        p = sigmoid(eta + deviation[:, None])
        gradient = (right - count * p).sum(axis=1) - (deviation - expected.T) / std**2
        curvature = (count * p * (1.0 - p)).sum(axis=1) + 1.0 / std**2
        step = np.clip(gradient / curvature, -_LARGEST_STEP, _LARGEST_STEP)
        deviation += step
        if np.abs(step).max() < _SETTLED:
            break
    return deviation.T.copy()


def _slopes(deviation: Floats, skill: Floats, cell_count: Floats) -> Floats:
    """Ridge regression of deviations on skill, in each cluster, weighted by how much is known of a cell."""
    weight = cell_count / (cell_count + _CELL_HALF)
    return np.asarray(
        (weight * deviation * skill[:, None]).sum(axis=0) / ((weight * skill[:, None] ** 2).sum(axis=0) + _SLOPE_RIDGE)
    )


def _cell_counts(count: Floats, n_clusters: int) -> Floats:
    """Outcomes per model and cluster, shape (m, n_clusters)."""
    return np.asarray(count.reshape(n_clusters, -1, count.shape[1]).sum(axis=1).T)


def _by_cluster(cell_values: Floats, weights: Floats, n_clusters: int) -> Floats:
    """Weighted means over the datasets of a cluster; the overall mean for a cluster without any."""
    values, weights = cell_values.reshape(n_clusters, -1), weights.reshape(n_clusters, -1)
    total = weights.sum(axis=1)
    overall = float((values * weights).sum() / max(weights.sum(), 1e-9))
    return np.where(total > 0, (values * weights).sum(axis=1) / np.maximum(total, 1e-9), overall)
