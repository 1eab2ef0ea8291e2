"""SaveRouter: group means shrunk to an additive prior, and a ridge regression of what is left (arXiv 2609.37402).

Prompts are put into groups: tasks as somebody labelled them, told by a classifier on the embedding, else k-means. A
model's mean in a group is drawn to `level + group + model` with pseudo-counts tau; per model, a ridge regression on the
embedding explains the leave-one-out residuals; the length of answers is the group-model mean with the model's mean to
fall back on. tau and the number of groups are chosen on a part of the table that is held back.

Departures: labels are all that the table has (the paper buys them by a bandit, K passes of UCB); the classifier is a
ridge regression whose highest score decides; cost enters through the decision, as for every router here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from atoll.routers.additive import two_way
from atoll.routers.artefact import Tensors
from atoll.routers.clusters import find_clusters
from atoll.routers.columns import ColumnRouter
from atoll.routers.linear import ridge_by_model
from atoll.routers.parameters import Range
from atoll.routers.ridge import fit_ridge
from atoll.routers.table import Matrix, OutcomeTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TAUS: Final = (1.0, 4.0, 16.0, 64.0)
GROUP_NUMBERS: Final = (8, 16, 32, 64)
_VALIDATION_SHARE: Final = 0.2
_MOST_TASKS: Final = 256
_TOKEN_STRENGTH: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Fit:
    """For d dimensions, g groups and m models."""

    group_weights: Floats
    """Scores of groups, shape (d + 1, g): the highest decides."""
    means: Floats
    """Shape (g, m)."""
    residual_weights: Floats
    """Shape (d + 1, m)."""

    def groups(self, embeddings: Matrix) -> Ints:
        scores = embeddings @ self.group_weights[:-1] + self.group_weights[-1]
        return np.asarray(scores.argmax(axis=1), dtype=np.int64)

    def quality(self, embeddings: Matrix) -> Floats:
        residual = embeddings @ self.residual_weights[:-1] + self.residual_weights[-1]
        return np.asarray(np.clip(self.means[self.groups(embeddings)] + residual, 0.0, 1.0))


class SaveRouter(ColumnRouter):
    """Parameters: `tau` None and `n_groups` None are chosen on held-back prompts; with task labels the groups are these
    tasks."""

    name: ClassVar[str] = "save_router"
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {
        "tau": Range(0.0, 1e6, is_optional=True),
        "n_groups": Range(1, 4096, is_integer=True, is_optional=True),
        "seed": Range(0, 2**31 - 1, is_integer=True),
    }

    def __init__(self, *, tau: float | None = None, n_groups: int | None = None, seed: int = 0) -> None:
        self.tau = tau
        self.n_groups = n_groups
        self.seed = seed

    def _learn(self, table: OutcomeTable) -> None:
        tau, n_groups = self._chosen(table)
        group = self._grouping(table, n_groups)
        self._fit = _fit(table, group, tau)
        self._token_means = _token_means(table, group, self._fit.means.shape[0])

    def _predict(self, embeddings: Matrix) -> Floats:
        return self._fit.quality(embeddings)

    def _predict_tokens(self, embeddings: Matrix, memberships: Floats) -> Floats:
        return np.asarray(self._token_means[self._fit.groups(embeddings)])

    def _state(self) -> tuple[dict[str, Any], Tensors]:
        fit = self._fit
        return {}, {
            "group_weights": fit.group_weights,
            "means": fit.means,
            "residual_weights": fit.residual_weights,
            "token_means": self._token_means,
        }

    def _restore(self, about: Mapping[str, Any], arrays: Tensors) -> None:
        self._fit = _Fit(arrays["group_weights"], arrays["means"], arrays["residual_weights"])
        self._token_means = arrays["token_means"]

    # Inside

    def _grouping(self, table: OutcomeTable, n_groups: int) -> Ints:
        """A group for each prompt: tasks where there are labels, else k-means."""
        names = sorted({task for task in table.tasks or () if task is not None})
        if 2 <= len(names) <= min(_MOST_TASKS, len(table) // 2):
            column_of: dict[str | None, int] = {name: column for column, name in enumerate(names)}
            return np.array([column_of.get(task, len(names)) for task in table.tasks or ()], dtype=np.int64)
        return find_clusters(table.embeddings, max(1, min(n_groups, len(table) // 4)), self.seed)

    def _chosen(self, table: OutcomeTable) -> tuple[float, int]:
        """tau and the number of groups with the smallest squared error on prompts held back."""
        taus = TAUS if self.tau is None else (self.tau,)
        numbers = GROUP_NUMBERS if self.n_groups is None else (self.n_groups,)
        order = np.random.default_rng(self.seed).permutation(len(table))
        n_held = int(_VALIDATION_SHARE * len(table))
        held, rest = table.take(np.sort(order[:n_held])), table.take(np.sort(order[n_held:]))
        if n_held < 2 or len(taus) * len(numbers) == 1 or not np.isfinite(rest.quality).any(axis=0).all():
            return taus[-1], numbers[0]
        errors: dict[tuple[float, int], float] = {}
        for n_groups in numbers:
            group = self._grouping(rest, n_groups)
            for tau in taus:
                error = (_fit(rest, group, tau).quality(held.embeddings) - held.quality) ** 2
                errors[tau, n_groups] = float(np.nanmean(error)) if np.isfinite(error).any() else 0.0
            if rest.tasks is not None and len(set(rest.tasks)) > 1:
                break
        return min(errors, key=lambda choice: errors[choice])


def _fit(table: OutcomeTable, group: Ints, tau: float) -> _Fit:
    known = np.isfinite(table.quality)
    values = np.nan_to_num(table.quality).astype(np.float64)
    n_groups = int(group.max()) + 1
    belongs = np.eye(n_groups)[group]
    prior = _additive_prior(belongs, values, known)
    count, total = belongs.T @ known, belongs.T @ (values * known)
    means = (total + tau * prior) / np.maximum(count + tau, 1e-9)
    # Leave-one-out: the mean of a prompt's group without the prompt.
    others = (total[group] - values + tau * prior[group]) / np.maximum(count[group] - 1.0 + tau, 1e-9)
    residual = np.where(known, values - others, 0.0)
    embeddings = table.embeddings.astype(np.float64)
    classifier = fit_ridge(embeddings, belongs)
    weights, intercept = ridge_by_model(embeddings, np.where(known, residual, np.nan))
    return _Fit(
        np.vstack([classifier.weights, classifier.intercept]),
        means,
        np.vstack([weights, intercept]),
    )


def _additive_prior(belongs: Floats, values: Floats, known: npt.NDArray[np.bool_]) -> Floats:
    """`level + group + model`, of shape (g, m), by two-way analysis of the groups' means."""
    count = belongs.T @ known
    means = (belongs.T @ (values * known)) / np.maximum(count, 1.0)
    model, group = two_way(means, count)
    return model + group[:, None]


def _token_means(table: OutcomeTable, group: Ints, n_groups: int) -> Floats:
    """Output tokens by group and model, of shape (g, m), backing off to the model's mean."""
    known = np.isfinite(table.output_tokens)
    values = np.nan_to_num(table.output_tokens).astype(np.float64)
    overall = values.sum() / max(known.sum(), 1) if known.any() else 300.0
    model = (values.sum(axis=0) + _TOKEN_STRENGTH * overall) / (known.sum(axis=0) + _TOKEN_STRENGTH)
    belongs = np.eye(n_groups)[group]
    return np.asarray((belongs.T @ values + _TOKEN_STRENGTH * model) / (belongs.T @ known + _TOKEN_STRENGTH))
