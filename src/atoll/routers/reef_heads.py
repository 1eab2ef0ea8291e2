"""The estimates that `reef` averages, all linear in one kernel's features, and how they are served in two products.

- *task*: a ridge classifier tells which tasks a prompt may belong to, and a model is there as good as its
  empirical-Bayes mean in them (`interactions.group_effects`).
- *neighbours*: a smooth average over like prompts, learned for the principal components of models
  (`interactions.fit_interactions`).

Each is made twice, without and with the prompt's length among the features: length tells difficulty, and sometimes
misleads. Answer lengths are predicted in the same ways, their square root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from atoll.routers.artefact import Tensors
from atoll.routers.features import Landmarks, Lengths
from atoll.routers.group_table import DEFAULT_OUTPUT_TOKENS
from atoll.routers.interactions import Parts, fit_interactions, group_effects
from atoll.routers.ridge import fit_ridge
from atoll.routers.table import Matrix, OutcomeTable

Floats = npt.NDArray[np.float64]

N_HEADS: Final = 4
"""Task, task with length, neighbours, neighbours with length."""
_TOKEN_QUANTILES: Final = (0.01, 0.99)
"""Of a model's answer lengths, that predictions stay within."""
_TASK_STRENGTH: Final = 10.0
"""Answers that a model's mean length counts for in a task."""


@dataclass(frozen=True, slots=True)
class Heads:
    """For m models and t tasks; rows of weights are p features of the landmarks, 6 of the length, and 1."""

    landmarks: Landmarks
    lengths: Lengths
    tasks: tuple[Floats, Floats]
    """Scores of tasks, each of shape (p + 7, t)."""
    effects: Floats
    """Quality by task, shape (t, m)."""
    neighbours: tuple[Floats, Floats]
    """Quality, each of shape (p + 7, m)."""
    centre: float
    """Mean of all models' levels."""

    @classmethod
    def fit(cls, table: OutcomeTable, labels: Floats, *, n_landmarks: int, width: float, seed: int) -> Self:
        """`labels` are memberships in tasks, of shape (n, t)."""
        landmarks = Landmarks.fit(table.embeddings, n_landmarks, width, seed)
        lengths = Lengths.fit(table.prompt_tokens)
        plain, longer = _features(landmarks, lengths, table)
        parts = Parts.of(table.quality)
        tasks, neighbours = [], []
        for features in (plain, longer):
            classifier = fit_ridge(features, labels)
            tasks.append(_rows(classifier.weights, classifier.intercept, plain.shape[1]))
            neighbours.append(_rows(*fit_interactions(parts, features), plain.shape[1]))
        effects = group_effects(parts, labels)
        return cls(
            landmarks, lengths, (tasks[0], tasks[1]), effects, (neighbours[0], neighbours[1]), float(parts.level.mean())
        )

    def predictions(self, embeddings: Matrix, prompt_tokens: npt.NDArray[Any]) -> list[Floats]:
        """Four of shape (n, m): what is averaged."""
        inputs = self._inputs(embeddings, prompt_tokens)
        by_task = [shares(inputs @ weights) @ self.effects for weights in self.tasks]
        return [*by_task, *(inputs @ weights for weights in self.neighbours)]

    def _inputs(self, embeddings: Matrix, prompt_tokens: npt.NDArray[Any]) -> Floats:
        parts = [self.landmarks.features(embeddings), self.lengths.features(prompt_tokens)]
        return np.concatenate([*parts, np.ones((len(embeddings), 1))], axis=1)


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """Answer lengths: by task, and the square roots of lengths, relative to the model's mean, by neighbours.

    Roots lie between lengths, whose long tail would rule a least-squares fit, and logarithms, in which a line runs
    away.
    """

    by_task: Floats
    """Output tokens, shape (t, m)."""
    neighbours: tuple[Floats, Floats]
    """Roots of relative lengths, each of shape (p + 7, m)."""
    low: Floats
    high: Floats
    """Of the roots, shape (m,): predictions stay within."""
    scale: tuple[Floats, Floats]
    """Output tokens to a squared root, so that means are right; each of shape (m,)."""

    @classmethod
    def fit(cls, table: OutcomeTable, labels: Floats, heads: Heads) -> Self:
        tokens = _all_tokens(table)
        known = np.isfinite(tokens)
        values = np.nan_to_num(tokens)
        level = np.maximum(values.sum(axis=0) / known.sum(axis=0), 1.0)
        size = labels.T @ known.astype(np.float64)
        by_task = (labels.T @ values + _TASK_STRENGTH * level) / (size + _TASK_STRENGTH)
        roots = np.sqrt(tokens / level)
        low, high = np.nanquantile(roots, _TOKEN_QUANTILES, axis=0)
        parts = Parts.of(roots)
        plain, longer = _features(heads.landmarks, heads.lengths, table)
        neighbours, scale = [], []
        for features in (plain, longer):
            weights, intercept = fit_interactions(parts, features)
            squares = np.clip(features @ weights + intercept, low, high) ** 2
            scale.append(values.sum(axis=0) / np.maximum((squares * known).sum(axis=0), 1e-9))
            neighbours.append(_rows(weights, intercept, plain.shape[1]))
        return cls(by_task, (neighbours[0], neighbours[1]), low, high, (scale[0], scale[1]))


@dataclass(frozen=True, slots=True)
class Served:
    """Heads, weighted and folded together: everything in float32, for t tasks and m models."""

    landmarks: Matrix
    width: float
    lengths: Lengths
    products: Matrix
    """From similarities to [task scores, task scores with length, quality, two roots of lengths]: (l, 2t + 3m)."""
    additions: Matrix
    """From [length features, 1] to the same, shape (7, 2t + 3m)."""
    effects: Matrix
    """From both heads' task shares to [weighted quality, a third of output tokens], shape (2t, 2m)."""
    token_low: Matrix
    token_high: Matrix
    token_scale: Matrix
    """Of the two roots, each of shape (2m,); what is averaged is a third of it."""

    @classmethod
    def of(cls, heads: Heads, tokens: TokenHeads, weights: Floats, stretch: float) -> Self:
        """`weights` of the four heads, summing to 1.

        The mean over models is stretched around its own mean over prompts: averages of cautious estimates are too
        cautious about how difficult a prompt is. That is the same for all models, so it changes no ranking.
        """
        p, m = heads.landmarks.whitening.shape[1], heads.effects.shape[1]
        turn = np.eye(m) + (stretch - 1.0) / m
        quality = (weights[2] * heads.neighbours[0] + weights[3] * heads.neighbours[1]) @ turn
        quality[-1] -= (stretch - 1.0) * heads.centre
        rows = np.concatenate([*heads.tasks, quality, *tokens.neighbours], axis=1)
        by_task = np.concatenate(
            [
                np.concatenate([weights[0] * heads.effects @ turn, tokens.by_task / 3.0], axis=1),
                np.concatenate([weights[1] * heads.effects @ turn, np.zeros_like(tokens.by_task)], axis=1),
            ]
        )
        return cls(
            landmarks=heads.landmarks.vectors,
            width=heads.landmarks.width,
            lengths=heads.lengths,
            products=(heads.landmarks.whitening @ rows[:p]).astype(np.float32),
            additions=rows[p:].astype(np.float32),
            effects=by_task.astype(np.float32),
            token_low=np.tile(tokens.low, 2).astype(np.float32),
            token_high=np.tile(tokens.high, 2).astype(np.float32),
            token_scale=(np.concatenate(tokens.scale) / 3.0).astype(np.float32),
        )

    def predict(self, embeddings: Matrix, prompt_tokens: npt.NDArray[Any]) -> tuple[Matrix, Matrix]:
        """Quality and output tokens, each of shape (n, m)."""
        m = self.effects.shape[1] // 2
        n, both = len(embeddings), len(self.effects)
        similarities = embeddings @ self.landmarks.T
        similarities -= np.float32(1.0)
        similarities *= np.float32(self.width)
        np.exp(similarities, out=similarities)
        outputs = similarities @ self.products
        outputs += self.lengths.features(prompt_tokens).astype(np.float32) @ self.additions[:-1] + self.additions[-1]
        by_task = shares(outputs[:, :both].reshape(2 * n, both // 2)).reshape(n, both) @ self.effects
        quality = outputs[:, both : both + m] + by_task[:, :m]
        roots = np.minimum(np.maximum(outputs[:, both + m :], self.token_low), self.token_high)
        by_neighbours = roots * roots * self.token_scale
        tokens = by_task[:, m:] + by_neighbours[:, :m] + by_neighbours[:, m:]
        return quality.astype(np.float32, copy=False), tokens.astype(np.float32, copy=False)

    def state(self) -> tuple[dict[str, Any], Tensors]:
        lengths = {name: getattr(self.lengths, name) for name in ("mean", "std", "low", "high")}
        arrays = {name: getattr(self, name) for name in _SERVED_ARRAYS}
        return {"width": self.width, "lengths": lengths}, arrays | {"knots": self.lengths.knots}

    @classmethod
    def restore(cls, about: Mapping[str, Any], arrays: Tensors) -> Self:
        lengths = Lengths(**about["lengths"], knots=arrays["knots"])
        named = {name: arrays[name] for name in _SERVED_ARRAYS}
        return cls(width=float(about["width"]), lengths=lengths, **named)


_SERVED_ARRAYS: Final = (
    "landmarks",
    "products",
    "additions",
    "effects",
    "token_low",
    "token_high",
    "token_scale",
)


def shares(scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scores of a ridge classifier as memberships: what is negative is zero, rows sum to 1."""
    positive = np.maximum(scores, 1e-6)
    return np.asarray(positive / positive.sum(axis=1, keepdims=True))


def _features(landmarks: Landmarks, lengths: Lengths, table: OutcomeTable) -> tuple[Floats, Floats]:
    """Without and with length."""
    plain = landmarks.features(table.embeddings)
    tokens = np.full(len(table), np.nan) if table.prompt_tokens is None else table.prompt_tokens
    return plain, np.concatenate([plain, lengths.features(tokens)], axis=1)


def _all_tokens(table: OutcomeTable) -> Floats:
    """Output tokens of shape (n, m). A model of which no length is known writes as the others do."""
    tokens = table.output_tokens.astype(np.float64)
    known = np.isfinite(tokens)
    told = known.any(axis=0)
    if not told.any():
        return np.full(tokens.shape, DEFAULT_OUTPUT_TOKENS)
    count = known.sum(axis=1)
    overall = tokens[known].mean()
    usual = np.where(count > 0, np.where(known, tokens, 0.0).sum(axis=1) / np.maximum(count, 1), overall)
    return np.where(told, tokens, usual[:, None])


def _rows(weights: Floats, intercept: Floats, n_plain: int) -> Floats:
    """Weights over [plain features, length features, 1], zero for lengths where they were no features."""
    lengths = np.zeros((Lengths.N_FEATURES, weights.shape[1]))
    lengths[: len(weights) - n_plain] = weights[n_plain:]
    return np.concatenate([weights[:n_plain], lengths, intercept[None]])
