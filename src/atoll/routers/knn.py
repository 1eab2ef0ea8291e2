"""The k-nearest-neighbours router: a candidate is as good on a prompt as it was on the prompts most like it.

After "When simple kNN beats complex learned routers" (Li, arXiv 2505.12601) and the kNN variant of CARROT (arXiv
2502.03261): separate neighbour averages of quality and of output tokens, cost from predicted tokens and prices. Where
it departs: neighbours are weighted by distance, every average is drawn to the candidate's own mean by a prior strength
(so that a candidate with few outcomes near a prompt is not believed blindly), and the more so the farther away the
prompt is from everything seen; k, bandwidth and prior strength come from one leave-one-out cross-validation.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, RouterError
from atoll.routers.additive import adjusted_means
from atoll.routers.artefact import candidates_from_json, candidates_to_json, read_artefact, write_artefact
from atoll.routers.base import Embeddings, Estimates, Router
from atoll.routers.kernel import Kernel
from atoll.routers.kernel_cv import K_GRID, CrossValidation, Progress, cross_validate
from atoll.routers.names import match_name
from atoll.routers.nearest import NearestPrompts
from atoll.routers.parameters import Range, check_parameters
from atoll.routers.pool import Pool, check_pool
from atoll.routers.table import Matrix, OutcomeTable
from atoll.types import Candidate, Outcome

Floats = npt.NDArray[np.float64]

DEFAULT_OUTPUT_TOKENS: Final = 300.0
"""Of an answer, where no outcome ever told."""
_MEAN_STRENGTH: Final = 5.0
"""Outcomes that the pool's mean counts for in a candidate's mean."""
_FIRST_VARIANCE: Final = 0.2
"""Of the quality of one answer, where no outcome tells: a little under a fair coin's."""
_CHUNK: Final = 256


class KNNRouter(Router):
    """Parameters: `k` None chooses it by cross-validation on at most `cv_prompts` prompts drawn with `seed`.
    `recent_capacity` bounds the memory of `update`: the newest so many prompts are kept beside those of `fit`.

    >>> import numpy as np
    >>> from atoll.types import Candidate, Outcome
    >>> east, north = np.eye(2, dtype=np.float32)
    >>> outcomes = [Outcome("east", "a", 1.0), Outcome("east", "b", 0.0)]
    >>> outcomes += [Outcome("north", "a", 0.0), Outcome("north", "b", 1.0)]
    >>> pool = [Candidate(name, name, "somewhere") for name in "ab"]
    >>> router = KNNRouter(k=1).fit(outcomes, {"east": east, "north": north}, pool, space="plane")
    >>> a, b = router.estimate_one(east, prompt_tokens=10)
    >>> a.quality > b.quality
    True
    """

    name: ClassVar[str] = "knn"
    _parameter_constraints: ClassVar[Mapping[str, Range]] = {
        "k": Range(1, 100_000, is_integer=True, is_optional=True),
        "cv_prompts": Range(1, 1_000_000, is_integer=True),
        "recent_capacity": Range(1, 10_000_000, is_integer=True),
        "seed": Range(0, 2**32 - 1, is_integer=True),
    }

    kernel_: Kernel
    validation_: CrossValidation | None = None
    """How cross-validation went; None after `load`."""

    def __init__(
        self, k: int | None = None, *, cv_prompts: int = 2000, recent_capacity: int = 10_000, seed: int = 0
    ) -> None:
        self.k = k
        self.cv_prompts = cv_prompts
        self.recent_capacity = recent_capacity
        self.seed = seed
        self._lock = threading.Lock()

    def fit_table(
        self,
        table: OutcomeTable,
        candidates: Sequence[Candidate],
        *,
        space: str,
        progress: Progress = lambda share: None,
    ) -> Self:
        check_parameters(self, self._parameter_constraints)
        if table.n_outcomes == 0:
            raise DataError("there is no outcome with a quality to learn from")
        self.space_ = space
        self._known_names = [candidate.name for candidate in candidates]
        self._pool = Pool(candidates, np.arange(len(candidates)))
        self.candidates_ = self._pool.candidates
        self._learn_means(table)
        self._nearest = NearestPrompts(table.embeddings, self.recent_capacity)
        self._store_cells(table.quality, table.output_tokens)
        rng = np.random.default_rng(self.seed)
        rows = np.sort(rng.permutation(len(table))[: self.cv_prompts])
        self.validation_ = cross_validate(
            table,
            self._quality_means,
            self._nearest,
            rows=rows,
            k_grid=K_GRID if self.k is None else (self.k,),
            progress=progress,
        )
        self.kernel_ = self.validation_.kernel
        self._variance = np.where(
            np.isfinite(self.validation_.residual_variance), self.validation_.residual_variance, _FIRST_VARIANCE
        )
        self._n_updates = 0
        self._digest = _digest(table.embeddings, table.quality, table.output_tokens)
        return self

    def update(self, outcomes: Sequence[Outcome], embeddings: Embeddings, *, space: str | None = None) -> Self:
        table = OutcomeTable.from_outcomes(outcomes, embeddings, self._all_names())
        if len(table) == 0:
            return self
        self._check_space(table.embeddings, self._nearest.dimension, space)
        with self._lock:
            self._remember(table, self._pool.columns)
            self._n_updates += 1
        return self

    def add_candidate(
        self,
        candidate: Candidate,
        outcomes: Sequence[Outcome] = (),
        embeddings: Embeddings | None = None,
    ) -> Self:
        if any(candidate.name == known.name for known in self.candidates_):
            raise RouterError(f"there is a candidate {candidate.name!r} already; teach it with update")
        with self._lock:
            self._set_pool([*self.candidates_, candidate])
        return self.update(outcomes, embeddings or {})

    def set_candidates(self, candidates: Sequence[Candidate]) -> Self:
        check_pool(candidates)
        with self._lock:
            self._set_pool(candidates)
        return self

    def estimate(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], *, space: str | None = None
    ) -> Estimates:
        self._check_space(embeddings, self._nearest.dimension, space)
        embeddings = np.ascontiguousarray(embeddings, dtype=np.float32)
        columns = self._pool.columns
        shape = len(embeddings), len(columns)
        quality, std, tokens = np.empty(shape), np.empty(shape), np.empty(shape)
        for start in range(0, len(embeddings), _CHUNK):
            part = slice(start, start + _CHUNK)
            with self._lock:
                quality[part], std[part], tokens[part] = self._average(embeddings[part], columns)
        return Estimates(quality, std, tokens, self._pool.cost_usd(prompt_tokens, tokens))

    def save(self, path: Path) -> None:
        with self._lock:
            n_rows = self._nearest.n_rows
            tensors: dict[str, npt.NDArray[Any]] = {
                "embeddings": self._nearest.fixed(),
                "recent": self._nearest.recent(),
                "quality": np.where(self._has_quality[:n_rows], self._quality[:n_rows], np.nan).astype(np.float32),
                "output_tokens": np.where(self._has_tokens[:n_rows], self._tokens[:n_rows], np.nan).astype(np.float32),
                "quality_means": self._quality_means,
                "token_means": self._token_means,
                "mean_counts": self._mean_counts,
                "variance": self._variance,
                "columns": self._pool.columns,
            }
            if self._nearest.centroids is not None:
                tensors["centroids"] = self._nearest.centroids
            about = {
                "space": self.space_,
                "known_names": self._known_names,
                "candidates": candidates_to_json(self.candidates_),
                "kernel": asdict(self.kernel_),
                "parameters": {name: getattr(self, name) for name in self._parameter_constraints},
                "pool_mean": self._pool_mean,
                "next_slot": self._nearest.next_slot,
                "n_updates": self._n_updates,
                "digest": self._digest,
            }
        write_artefact(path, self.name, about, tensors)

    @classmethod
    def load(cls, path: Path) -> Self:
        about, tensors = read_artefact(path, cls.name)
        try:
            router = cls(**about["parameters"])
            router._restore(about, tensors)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"the kNN router in {str(path)!r} is damaged ({error!r}). Make it anew: atoll fit knn"
            ) from error
        return router

    @property
    def version(self) -> str:
        return f"{self._digest}-{self._n_updates}"

    def summary(self) -> dict[str, Any]:
        return super().summary() | {"prompts": self._nearest.n_rows, "kernel": asdict(self.kernel_)}

    @property
    def quality_means_(self) -> Floats:
        """Each candidate's own mean quality, of shape (n_candidates,)."""
        return np.asarray(self._quality_means[self._pool.columns])

    # Learning

    def _learn_means(self, table: OutcomeTable) -> None:
        known = np.isfinite(table.quality)
        means = adjusted_means(np.nan_to_num(table.quality), known)
        counts = known.sum(axis=0).astype(np.float64)
        self._pool_mean = float(np.average(means[counts > 0], weights=counts[counts > 0]))
        means = np.where(counts > 0, means, self._pool_mean)
        self._quality_means = np.clip(_drawn(means, counts, self._pool_mean), 0.0, 1.0)
        has_tokens = np.isfinite(table.output_tokens)
        token_counts = has_tokens.sum(axis=0).astype(np.float64)
        token_means = np.nan_to_num(adjusted_means(np.nan_to_num(table.output_tokens), has_tokens))
        told = token_counts > 0
        typical = float(token_means[told].mean()) if told.any() else DEFAULT_OUTPUT_TOKENS
        self._token_means = np.maximum(_drawn(token_means, token_counts, typical), 1.0)
        self._mean_counts = np.stack([counts, token_counts])

    def _store_cells(self, quality: Matrix, tokens: Matrix) -> None:
        """Values and masks apart, so that averages are plain matrix products."""
        self._has_quality = np.isfinite(quality).astype(np.float32)
        self._quality = np.nan_to_num(quality)
        self._has_tokens = np.isfinite(tokens).astype(np.float32)
        self._tokens = np.nan_to_num(tokens)

    def _remember(self, table: OutcomeTable, columns: npt.NDArray[np.int64]) -> None:
        rows = self._nearest.add(table.embeddings)
        self._make_room(int(rows.max()) + 1)
        for cells, mask, values in (
            (self._quality, self._has_quality, table.quality),
            (self._tokens, self._has_tokens, table.output_tokens),
        ):
            # A slot that is used again forgets what it held, for every candidate.
            cells[rows] = 0.0
            mask[rows] = 0.0
            cells[rows[:, None], columns] = np.nan_to_num(values)
            mask[rows[:, None], columns] = np.isfinite(values)
        for means, counts, values in (
            (self._quality_means, self._mean_counts[0], table.quality),
            (self._token_means, self._mean_counts[1], table.output_tokens),
        ):
            n = np.isfinite(values).sum(axis=0)
            total = np.nansum(values, axis=0, dtype=np.float64)
            before = counts[columns] + _MEAN_STRENGTH
            means[columns] = (before * means[columns] + total) / (before + n)
            counts[columns] += n

    def _make_room(self, n_rows: int) -> None:
        """Grow by doubling, at most to the ring's end."""
        have = len(self._quality)
        if n_rows <= have:
            return
        n_fixed = self._nearest.n_fixed
        wanted = n_fixed + min(max(2 * (have - n_fixed), n_rows - n_fixed, 64), self.recent_capacity)
        more = ((0, wanted - have), (0, 0))
        self._quality, self._has_quality = np.pad(self._quality, more), np.pad(self._has_quality, more)
        self._tokens, self._has_tokens = np.pad(self._tokens, more), np.pad(self._has_tokens, more)

    # The pool

    def _all_names(self) -> list[str]:
        return [candidate.name for candidate in self.candidates_]

    def _set_pool(self, candidates: Sequence[Candidate]) -> None:
        columns: list[int] = []
        for candidate in candidates:
            known = match_name(candidate, self._known_names)
            column = self._new_column(candidate) if known is None else self._known_names.index(known)
            # The same model at two efforts: each learns by itself from here on.
            columns.append(self._copied_column(candidate, column) if column in columns else column)
        self._pool = Pool(candidates, np.array(columns, dtype=np.int64))
        self.candidates_ = self._pool.candidates

    def _new_column(self, candidate: Candidate) -> int:
        prior = self._pool_mean if candidate.quality_prior is None else candidate.quality_prior
        self._known_names.append(candidate.name)
        more = ((0, 0), (0, 1))
        self._quality, self._has_quality = np.pad(self._quality, more), np.pad(self._has_quality, more)
        self._tokens, self._has_tokens = np.pad(self._tokens, more), np.pad(self._has_tokens, more)
        self._quality_means = np.append(self._quality_means, prior)
        self._token_means = np.append(self._token_means, self._token_means.mean())
        self._mean_counts = np.pad(self._mean_counts, more)
        self._variance = np.append(self._variance, _FIRST_VARIANCE)
        return len(self._known_names) - 1

    def _copied_column(self, candidate: Candidate, source: int) -> int:
        column = self._new_column(candidate)
        for array in (self._quality, self._has_quality, self._tokens, self._has_tokens, self._mean_counts):
            array[:, column] = array[:, source]
        for array in (self._quality_means, self._token_means, self._variance):
            array[column] = array[source]
        return column

    # Predicting

    def _average(self, embeddings: Matrix, columns: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Quality, its standard deviation and output tokens, each of shape (n, len(columns))."""
        kernel = self.kernel_
        similarity, rows = self._nearest.search(embeddings, kernel.k)
        weights = kernel.weights(similarity).astype(np.float32)[:, None, :]
        cells = rows[:, :, None], columns
        has_quality = self._has_quality[cells]
        mass = (weights @ has_quality)[:, 0].astype(np.float64)
        total = (weights @ self._quality[cells])[:, 0]
        strength = kernel.prior_strength
        quality = (strength * self._quality_means[columns] + total) / (strength + mass)
        std = np.sqrt(self._variance[columns] / (strength + mass))
        token_mass = (weights @ self._has_tokens[cells])[:, 0]
        token_total = (weights @ self._tokens[cells])[:, 0]
        tokens = (strength * self._token_means[columns] + token_total) / (strength + token_mass)
        return np.clip(quality, 0.0, 1.0), std, tokens

    # On disk

    def _restore(self, about: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self.space_ = str(about["space"])
        self._known_names = list(about["known_names"])
        self._pool = Pool(candidates_from_json(about["candidates"]), tensors["columns"].copy())
        self.candidates_ = self._pool.candidates
        self.kernel_ = Kernel(**about["kernel"])
        self._pool_mean = float(about["pool_mean"])
        self._quality_means = tensors["quality_means"].copy()
        self._token_means = tensors["token_means"].copy()
        self._mean_counts = tensors["mean_counts"].copy()
        self._variance = tensors["variance"].copy()
        self._nearest = NearestPrompts(
            tensors["embeddings"], self.recent_capacity, centroids=tensors.get("centroids"), recent=tensors["recent"]
        )
        self._nearest.next_slot = int(about["next_slot"])
        self._store_cells(tensors["quality"], tensors["output_tokens"])
        self._n_updates = int(about["n_updates"])
        self._digest = str(about["digest"])
        if self._quality.shape != (self._nearest.n_rows, len(self._known_names)):
            raise ValueError(f"{self._quality.shape} outcomes for {self._nearest.n_rows} prompts")


def _drawn(means: Floats, counts: Floats, to: float) -> Floats:
    return np.asarray((means * counts + to * _MEAN_STRENGTH) / (counts + _MEAN_STRENGTH))


def _digest(*arrays: Matrix) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:12]
