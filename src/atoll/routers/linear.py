"""Ridge regression of each model's quality on the embedding: the control that every learned method should beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from atoll.routers.artefact import Tensors
from atoll.routers.columns import ColumnRouter
from atoll.routers.parameters import Range
from atoll.routers.ridge import fit_ridge
from atoll.routers.table import Matrix, OutcomeTable

Floats = npt.NDArray[np.float64]


class RidgeRouter(ColumnRouter):
    """One regression per model, each with the penalty that predicts best when a prompt is left out."""

    name: ClassVar[str] = "ridge"
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {"seed": Range(0, 2**31 - 1, is_integer=True)}

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def _learn(self, table: OutcomeTable) -> None:
        self._weights, self._intercept = ridge_by_model(table.embeddings.astype(np.float64), table.quality)

    def _predict(self, embeddings: Matrix) -> Floats:
        return np.asarray(embeddings @ self._weights + self._intercept)

    def _state(self) -> tuple[dict[str, Any], Tensors]:
        return {}, {"weights": self._weights, "intercept": self._intercept}

    def _restore(self, about: Mapping[str, Any], arrays: Tensors) -> None:
        self._weights, self._intercept = arrays["weights"], arrays["intercept"]


def ridge_by_model(features: Floats, targets: npt.NDArray[np.floating]) -> tuple[Floats, Floats]:
    """Weights (p, m) and intercepts (m,) of one regression per column of `targets`, each on the rows that it knows."""
    known = np.isfinite(targets)
    values = np.nan_to_num(targets).astype(np.float64)
    if known.all():
        ridge = fit_ridge(features, values)
        return ridge.weights, ridge.intercept
    fits = [fit_ridge(features[rows], values[rows, column, None]) for column, rows in enumerate(known.T)]
    return np.concatenate([fit.weights for fit in fits], axis=1), np.concatenate([fit.intercept for fit in fits])
