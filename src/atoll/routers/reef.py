"""Atoll's own router: the kind of task decides first, neighbours decide the rest, models share what they have in
common, and every number is drawn to its level by as much as it is uncertain.

Four estimates of quality (`reef_heads.py`) are averaged with weights stacked on predictions of prompts left out
(`stacking.py`). It stands on: hierarchical shrinkage from task to model (SaveRouter, arXiv 2609.37402; "most of the
LLM routing gap is task type", arXiv 2608.23023), neighbours (arXiv 2505.12601), low rank across models (EmbedLLM),
separate heads for quality and answer length (CARROT, arXiv 2502.03261). Everything is linear after one kernel, so a
decision costs two small matrix products, however many prompts it was fitted on.

Online, feedback moves a model by group of prompts, weighted by the inverse of the probability with which it had been
chosen: the doubly robust correction of the fitted estimate, self-normalised. Old feedback fades, so that a model that
silently changes is known anew. A new model is admitted from its first outcomes as a mixture of the known ones: a
Bayesian regression of its outcomes on what they would reach for the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from atoll.routers.artefact import Tensors
from atoll.routers.columns import ColumnRouter, Observations
from atoll.routers.parameters import Range
from atoll.routers.reef_heads import N_HEADS, Heads, Served, TokenHeads
from atoll.routers.stacking import contenders, stack
from atoll.routers.table import Matrix, OutcomeTable
from atoll.types import Candidate

Floats = npt.NDArray[np.float64]

MOST_TASKS: Final = 256
"""More labels than that are no kinds of tasks; groups are found instead."""
_FEWEST_TO_STACK: Final = 100
"""Prompts; with fewer the estimates are averaged evenly."""
_STRETCHES: Final = (0.5, 2.0)
_LEVEL_STD: Final = 0.25
"""Of a new model's quality around the average of the others."""
_SLOPE_STD: Final = 0.5
"""Of how much more than the others it suffers from difficult prompts."""
_NOISE: Final = 0.15
"""Variance of one answer's quality around its expectation."""
_MOST_COMPONENTS: Final = 16
_LARGEST_WEIGHT: Final = 10.0
"""Of one piece of feedback: one answer that had hardly ever been chosen must not speak for all others."""


class ReefRouter(ColumnRouter):
    """Parameters: `n_landmarks` and `width` are those of the kernel, `n_folds` of the stacking (0 averages evenly)."""

    name: ClassVar[str] = "reef"
    half_life: ClassVar[float | None] = 500.0
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {
        "n_landmarks": Range(1, 4096, is_integer=True),
        "width": Range(0.1, 100.0),
        "n_folds": Range(0, 100, is_integer=True),
        "seed": Range(0, 2**31 - 1, is_integer=True),
    }

    weights_: Floats
    """Of the four estimates: task, task with length, neighbours, neighbours with length."""
    stretch_: float
    """By which the prompts' difficulty is stretched (`Served.of`)."""
    _mean_weights: dict[int, tuple[float, int]]
    """Of feedback, by model: their sum and number."""

    def __init__(self, *, n_landmarks: int = 256, width: float = 5.0, n_folds: int = 5, seed: int = 0) -> None:
        self.n_landmarks = n_landmarks
        self.width = width
        self.n_folds = n_folds
        self.seed = seed

    def _learn(self, table: OutcomeTable) -> None:
        labels = self._labels(table)
        self.weights_, self.stretch_ = self._stacked(table, labels)
        heads = self._heads(table, labels)
        self._served = Served.of(heads, TokenHeads.fit(table, labels, heads), self.weights_, self.stretch_)
        quality = self._served.predict(table.embeddings, _lengths(table))[0].astype(np.float64)
        self._centre = float(quality.mean())
        self._learn_components(quality)
        self._progress(1.0)

    def _predict(self, embeddings: Matrix) -> Floats:
        return self._predict_at(embeddings, np.full(len(embeddings), np.nan))

    def _predict_at(self, embeddings: Matrix, prompt_tokens: npt.NDArray[Any]) -> Floats:
        return self._served.predict(embeddings, prompt_tokens)[0].astype(np.float64)

    def _predict_both(
        self, embeddings: Matrix, memberships: Floats, prompt_tokens: npt.NDArray[Any]
    ) -> tuple[Floats, Floats]:
        quality, tokens = self._served.predict(embeddings, prompt_tokens)
        return quality.astype(np.float64), tokens.astype(np.float64)

    def _observe(self, seen: Observations) -> None:
        """The doubly robust estimate is prediction + (outcome - prediction) / propensity; weights average to 1."""
        weights = np.minimum(1.0 / np.where(np.isfinite(seen.propensity), seen.propensity, 1.0), _LARGEST_WEIGHT)
        for row, column in enumerate(seen.columns.tolist()):
            mean = self._mean_weights.get(column, (0.0, 0))
            total, count = mean[0] + float(weights[row]), mean[1] + 1
            self._mean_weights[column] = total, count
            weights[row] *= count / total
        self._correct(seen, weights)

    def _admit(self, column: int, candidate: Candidate, seen: Observations) -> None:
        """Outcomes of a new model, explained by a level, the prompts' difficulty and the known models' components."""
        told = np.isfinite(seen.quality)
        if told.any():
            known = self._predict_at(seen.embeddings[told], seen.prompt_tokens[told])
            m = known.shape[1]
            mean = known.mean(axis=1)
            apart = (known - mean[:, None] - self._offsets) @ self._components
            inputs = np.concatenate([np.ones((len(known), 1)), mean[:, None] - self._centre, apart], axis=1)
            prior = np.concatenate([[_LEVEL_STD, _SLOPE_STD], np.full(apart.shape[1], 1.0 / np.sqrt(m))])
            later = column - self._n_fitted
            expected = mean + self._offset[later]
            precision = inputs.T @ inputs / _NOISE + np.diag(prior**-2.0)
            found = np.linalg.solve(precision, inputs.T @ (seen.quality[told] - expected) / _NOISE)
            level, slope, loadings = found[0], found[1], found[2:]
            # As weights of the known models' predictions, which is what is kept of a later model.
            apart_weights = self._components @ loadings
            self._mix[later] += slope / m + apart_weights - apart_weights.mean()
            self._offset[later] += level - slope * self._centre - self._offsets @ apart_weights
        self._correct(seen, is_stream=False)

    def _state(self) -> tuple[dict[str, Any], Tensors]:
        about, arrays = self._served.state()
        about |= {
            "weights": self.weights_.tolist(),
            "stretch": self.stretch_,
            "centre": self._centre,
            "mean_weights": [[column, *mean] for column, mean in self._mean_weights.items()],
        }
        return about, arrays | {"components": self._components, "offsets": self._offsets}

    def _restore(self, about: Mapping[str, Any], arrays: Tensors) -> None:
        self._served = Served.restore(about, arrays)
        self.weights_ = np.array(about["weights"])
        self.stretch_, self._centre = float(about["stretch"]), float(about["centre"])
        self._components, self._offsets = arrays["components"], arrays["offsets"]
        self._mean_weights = {int(column): (float(total), int(n)) for column, total, n in about["mean_weights"]}

    # Inside

    def _heads(self, table: OutcomeTable, labels: Floats) -> Heads:
        return Heads.fit(table, labels, n_landmarks=self.n_landmarks, width=self.width, seed=self.seed)

    def _labels(self, table: OutcomeTable) -> Floats:
        """Memberships of shape (n, t): tasks as somebody labelled them, else groups."""
        names = sorted({task for task in table.tasks or () if task is not None})
        if not 2 <= len(names) <= min(MOST_TASKS, len(table) // 2):
            memberships = self.groups_.memberships(table.embeddings)
            return np.asarray(np.eye(memberships.shape[1])[memberships.argmax(axis=1)])
        column_of: dict[str | None, int] = {name: column for column, name in enumerate(names)}
        columns = [column_of.get(task, len(names)) for task in table.tasks or ()]
        return np.asarray(np.eye(max(columns) + 1)[columns])

    def _stacked(self, table: OutcomeTable, labels: Floats) -> tuple[Floats, float]:
        """Weights of the estimates, and by how much difficulty is to be stretched, from prompts left out."""
        even = np.full(N_HEADS, 1.0 / N_HEADS)
        if self.n_folds < 2 or len(table) < max(_FEWEST_TO_STACK, self.n_folds):
            return even, 1.0
        fold = np.random.default_rng(self.seed).permutation(len(table)) % self.n_folds
        left_out = [np.zeros(table.quality.shape) for _ in range(N_HEADS)]
        lengths = _lengths(table)
        for index in range(self.n_folds):
            inside, outside = np.flatnonzero(fold != index), np.flatnonzero(fold == index)
            part = table.take(inside)
            if not np.isfinite(part.quality).any(axis=0).all():
                return even, 1.0
            predictions = self._heads(part, labels[inside]).predictions(table.embeddings[outside], lengths[outside])
            for estimate, prediction in zip(left_out, predictions, strict=True):
                estimate[outside] = prediction
            self._progress((index + 1) / (self.n_folds + 1))
        input_usd, output_usd = self.prices_
        chosen = contenders(table.quality, input_usd + output_usd)
        weights = stack([each[:, chosen] for each in left_out], table.quality[:, chosen])
        return weights, _stretch(np.tensordot(weights, np.stack(left_out), axes=1), table.quality)

    def _learn_components(self, quality: Floats) -> None:
        """Directions in which the known models' predictions differ, for models that come later."""
        apart = quality - quality.mean(axis=1, keepdims=True)
        self._offsets = apart.mean(axis=0)
        _, _, directions = np.linalg.svd(apart - self._offsets, full_matrices=False)
        self._components = directions[:_MOST_COMPONENTS].T.copy()
        self._mean_weights = {}


def _lengths(table: OutcomeTable) -> npt.NDArray[Any]:
    return np.full(len(table), np.nan) if table.prompt_tokens is None else table.prompt_tokens


def _stretch(predicted: Floats, quality: npt.NDArray[np.floating]) -> float:
    """Slope of the prompts' mean quality on its prediction, over known cells."""
    known = np.isfinite(quality)
    count = known.sum(axis=1)
    told = count > 0
    mean = np.where(known, predicted, 0.0).sum(axis=1)[told] / count[told]
    truth = np.where(known, np.nan_to_num(quality), 0.0).sum(axis=1)[told] / count[told]
    spread = mean - mean.mean()
    slope = float((spread * (truth - truth.mean())).sum() / max((spread**2).sum(), 1e-9))
    return min(max(slope, _STRETCHES[0]), _STRETCHES[1])
