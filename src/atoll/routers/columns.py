"""What routers that keep one column per model have in common, so that each is only its idea.

A subclass says what it learns from a table and what it predicts for the models of that table. Here is the rest of the
contract: pools and names, models that come later, feedback, prompts far from everything, costs, and files.

    class MyRouter(ColumnRouter):
        name = "my"
        def __init__(self, *, seed: int = 0) -> None: ...       # only stores parameters
        def _learn(self, table): ...                            # any cell may be NaN, no column is empty
        def _predict(self, embeddings): return quality          # of shape (n, m), columns of the table
        def _state(self): return {"json": ...}, {"arrays": ...}
        def _restore(self, about, arrays): ...

A model that comes later (`add_candidate`, or one without outcomes in `fit`) starts with the profile of the pool, the
mean prediction over all models for a prompt, shifted to the level expected of it; outcomes then move it by group of
prompts (`corrections.py`). Methods that can admit models by themselves override `_admit`. Feedback about any model
moves it likewise; methods that learn online by themselves override `_observe`.
"""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, RouterError
from atoll.routers.artefact import Tensors, candidates_from_json, candidates_to_json, read_artefact, write_artefact
from atoll.routers.base import Embeddings, EstimateRow, Estimates, Router
from atoll.routers.corrections import Corrections
from atoll.routers.group_table import GroupTable
from atoll.routers.groups import Groups
from atoll.routers.names import match_name
from atoll.routers.parameters import Range, check_parameters
from atoll.routers.pool import Pool, check_pool
from atoll.routers.table import Matrix, OutcomeTable
from atoll.types import Candidate, Outcome

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Progress = Callable[[float], None]

N_GROUPS: Final = 32
_NEW_STD: Final = 0.2
"""Of the level of a model that nothing is known of."""


@dataclass(frozen=True, slots=True)
class Observations:
    """Feedback, one row per outcome."""

    embeddings: Matrix
    """Shape (n, d)."""
    columns: Ints
    """Which model, shape (n,), as in `_known_names`."""
    quality: Floats
    """Shape (n,), like all that follow; NaN where unknown."""
    output_tokens: Floats
    latency_s: Floats
    propensity: Floats
    prompt_tokens: Floats

    def __len__(self) -> int:
        return len(self.columns)


class ColumnRouter(Router):
    """See the module. All parameters of a subclass are in `_parameter_constraints`.

    A later model is a mixture of the fitted ones: `fitted @ mix + offset` in quality, `fitted @ share` in length. It
    starts as their average, as a copy, or as whatever `_admit` makes of it.
    """

    _parameter_constraints: ClassVar[Mapping[str, Range]] = {}
    half_life: ClassVar[float | None] = None
    """Of feedback, in outcomes of one model; None never forgets."""

    n_labels_: int
    """Cells with a quality that were looked at: what the labels of `fit` cost."""
    prices_: tuple[Floats, Floats]
    """During `fit`: input and output USD per token of the table's columns."""

    # What a subclass says

    @abstractmethod
    def _learn(self, table: OutcomeTable) -> None:
        """Learn from scratch. Every column of `table` has a quality somewhere; any other cell may be NaN.

        `self.groups_` and `self.prices_` are there already; `self._progress(share)` may be told how far it is.
        """

    def _predict(self, embeddings: Matrix) -> Floats:
        """Quality of the table's models, of shape (n, m); by default their means by group. numpy only, no torch."""
        return self.group_table_.quality(self.groups_.memberships(embeddings))

    def _predict_at(self, embeddings: Matrix, prompt_tokens: npt.NDArray[Any]) -> Floats:
        """`_predict` for methods that look at the length of the prompt too; NaN where it is not known."""
        return self._predict(embeddings)

    def _predict_std(self, embeddings: Matrix, memberships: Floats) -> Floats:
        """How unsure `_predict` is, of shape (n, m)."""
        return self.group_table_.quality_std(memberships)

    def _predict_tokens(self, embeddings: Matrix, memberships: Floats) -> Floats:
        """Output tokens, of shape (n, m)."""
        return self.group_table_.output_tokens(memberships)

    def _predict_both(
        self, embeddings: Matrix, memberships: Floats, prompt_tokens: npt.NDArray[Any]
    ) -> tuple[Floats, Floats]:
        """Quality and output tokens, each of shape (n, m), for methods that make both at once."""
        return self._predict_at(embeddings, prompt_tokens), self._predict_tokens(embeddings, memberships)

    def _state(self) -> tuple[dict[str, Any], Tensors]:
        """What `_restore` needs beyond the parameters: JSON and arrays."""
        return {}, {}

    def _restore(self, about: Mapping[str, Any], arrays: Tensors) -> None:
        """The inverse of `_state`. May raise KeyError, TypeError or ValueError for what it did not write."""

    def _revealed(self, table: OutcomeTable) -> OutcomeTable:
        """What of the table was looked at; methods of partial feedback return it with the rest NaN, after `_learn`."""
        return table

    def _observe(self, seen: Observations) -> None:
        """Learn online. Called under the lock, with models of the fit and later ones."""
        self._correct(seen)

    def _admit(self, column: int, candidate: Candidate, seen: Observations) -> None:
        """Learn a model that came later from its first outcomes. Called under the lock, once per `add_candidate`."""
        self._correct(seen, is_stream=False)

    # The contract

    def fit_table(
        self,
        table: OutcomeTable,
        candidates: Sequence[Candidate],
        *,
        space: str,
        progress: Progress = lambda share: None,
    ) -> Self:
        check_parameters(self, self._parameter_constraints)
        check_pool(candidates)
        if table.n_outcomes == 0:
            raise DataError("there is no outcome with a quality to learn from")
        self.space_ = space
        self._progress = progress
        self._lock = threading.Lock()
        told = np.flatnonzero(np.isfinite(table.quality).any(axis=0))
        fitted = [candidates[column] for column in told.tolist()]
        known = table.of_columns(told)
        self._dimension = table.embeddings.shape[1]
        self._known_names = [candidate.name for candidate in fitted]
        self._n_fitted = len(fitted)
        self._mix = np.zeros((0, self._n_fitted))
        self._share = np.zeros((0, self._n_fitted))
        self._offset = np.zeros(0)
        self.groups_ = Groups.fit(table.embeddings, N_GROUPS, getattr(self, "seed", 0))
        costs = Pool(fitted, np.arange(len(fitted)))
        self.prices_ = costs.input_usd, costs.output_usd
        self._learn(known)
        revealed = self._revealed(known)
        self.n_labels_ = revealed.n_outcomes
        self.group_table_ = GroupTable.fit(revealed, self.groups_.memberships(table.embeddings))
        lengths = np.full(len(table), np.nan) if table.prompt_tokens is None else table.prompt_tokens.astype(np.float64)
        self._profile_mean = float(self._predict_at(table.embeddings[:2048], lengths[:2048]).mean())
        self._corrections = Corrections(self._n_fitted, len(self.groups_), self.half_life)
        self._n_updates = 0
        self._digest = _digest(self, table)
        self._set_pool(candidates)
        return self

    def update(self, outcomes: Sequence[Outcome], embeddings: Embeddings, *, space: str | None = None) -> Self:
        table = OutcomeTable.from_outcomes(outcomes, embeddings, [each.name for each in self.candidates_])
        if len(table) == 0:
            return self
        self._check_space(table.embeddings, self._dimension, space)
        with self._lock:
            self._observe(self._observations(outcomes, embeddings))
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
        names = [*(each.name for each in self.candidates_), candidate.name]
        table = OutcomeTable.from_outcomes(outcomes, embeddings or {}, names)
        if len(table):
            self._check_space(table.embeddings, self._dimension, None)
        with self._lock:
            self._set_pool([*self.candidates_, candidate])
            if len(table):
                seen = self._observations(outcomes, embeddings or {})
                self._admit(int(self._pool.columns[-1]), candidate, seen)
                self._n_updates += 1
        return self

    def set_candidates(self, candidates: Sequence[Candidate]) -> Self:
        check_pool(candidates)
        with self._lock:
            self._set_pool(candidates)
        return self

    def estimate(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], *, space: str | None = None
    ) -> Estimates:
        self._check_space(embeddings, self._dimension, space)
        embeddings = np.ascontiguousarray(embeddings, dtype=np.float32)
        memberships = self.groups_.memberships(embeddings)
        with self._lock:
            pool = self._pool
            quality, tokens = self._all_columns(embeddings, memberships, prompt_tokens)
            std = self._all_shared(self._predict_std(embeddings, memberships), _NEW_STD)
            if self._corrections.is_told:
                quality = quality + self._corrections.quality(memberships)
                tokens = tokens * self._corrections.token_factor()
                std = std * self._corrections.certainty(memberships)
        if not pool.is_whole(quality.shape[1]):
            quality, std, tokens = (array[:, pool.columns] for array in (quality, std, tokens))
        # np.clip takes three times as long on one prompt.
        quality = np.minimum(np.maximum(quality, 0.0), 1.0)
        tokens = np.maximum(tokens, 1.0)
        return Estimates(quality, std, tokens, pool.cost_usd(prompt_tokens, tokens))

    def estimate_one(
        self, embedding: npt.NDArray[np.float32], prompt_tokens: int, *, space: str | None = None
    ) -> EstimateRow:
        estimates = self.estimate(embedding[None], np.array([prompt_tokens], dtype=np.int64), space=space)
        return EstimateRow(
            self._pool.names,
            estimates.quality[0],
            estimates.quality_std[0],
            estimates.output_tokens[0],
            estimates.cost_usd[0],
        )

    def save(self, path: Path) -> None:
        with self._lock:
            about, arrays = self._state()
            tensors = {f"own.{name}": array for name, array in arrays.items()}
            tensors |= {f"table.{name}": array for name, array in self.group_table_.arrays().items()}
            tensors |= {f"corrections.{name}": array for name, array in self._corrections.arrays().items()}
            tensors |= {"centres": self.groups_.centres, "mix": self._mix, "share": self._share}
            tensors |= {"offset": self._offset}
            tensors["columns"] = self._pool.columns
            about = {
                "space": self.space_,
                "dimension": self._dimension,
                "known_names": self._known_names,
                "n_fitted": self._n_fitted,
                "near_similarity": self.groups_.near_similarity,
                "candidates": candidates_to_json(self.candidates_),
                "parameters": {name: getattr(self, name) for name in self._parameter_constraints},
                "profile_mean": self._profile_mean,
                "n_labels": self.n_labels_,
                "n_updates": self._n_updates,
                "digest": self._digest,
                "own": about,
            }
        write_artefact(path, self.name, about, tensors)

    @classmethod
    def load(cls, path: Path) -> Self:
        about, tensors = read_artefact(path, cls.name)
        try:
            router = cls(**about["parameters"])
            router._restore_all(about, tensors)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"the {cls.name} router in {str(path)!r} is damaged ({error!r}). Make it anew: atoll fit {cls.name}"
            ) from error
        return router

    @property
    def version(self) -> str:
        return f"{self._digest}-{self._n_updates}"

    # Inside

    def _all_columns(
        self, embeddings: Matrix, memberships: Floats, prompt_tokens: npt.NDArray[Any]
    ) -> tuple[Floats, Floats]:
        """Quality and output tokens of fitted and later models, before corrections.

        Quality is drawn to the models' means far from everything that was seen.
        """
        predicted, tokens = self._predict_both(embeddings, memberships, prompt_tokens)
        mean = self.group_table_.mean
        near = memberships @ np.ones((memberships.shape[1], 1))
        fitted: Floats = mean + near * (predicted - mean)
        if len(self._mix):
            fitted = np.concatenate([fitted, fitted @ self._mix.T + self._offset], axis=1)
        return fitted, self._all_shared(tokens, 0.0)

    def _all_shared(self, fitted: Floats, offset: float) -> Floats:
        """Lengths or uncertainties: those of later models are averages of the models they are like."""
        if not len(self._share):
            return fitted
        return np.concatenate([fitted, fitted @ self._share.T + offset], axis=1)

    def _observations(self, outcomes: Sequence[Outcome], embeddings: Embeddings) -> Observations:
        column_of = {each.name: int(column) for each, column in zip(self.candidates_, self._pool.columns, strict=True)}
        return Observations(
            np.stack([embeddings[outcome.prompt] for outcome in outcomes]).astype(np.float32),
            np.array([column_of[outcome.candidate] for outcome in outcomes], dtype=np.int64),
            _values([outcome.quality for outcome in outcomes]),
            _values([outcome.completion_tokens for outcome in outcomes]),
            _values([outcome.latency_s for outcome in outcomes]),
            _values([outcome.propensity for outcome in outcomes]),
            _values([outcome.prompt_tokens for outcome in outcomes]),
        )

    def _correct(self, seen: Observations, weights: Floats | None = None, *, is_stream: bool = True) -> None:
        """Feedback moves a model by group of prompts; `weights` of shape (n,) average to about 1.

        In a stream old feedback fades (`half_life`).
        """
        memberships = self.groups_.memberships(seen.embeddings)
        row = np.arange(len(seen))
        quality, lengths = self._all_columns(seen.embeddings, memberships, seen.prompt_tokens)
        expected, tokens = quality[row, seen.columns], lengths[row, seen.columns]
        token_log = np.log(np.maximum(seen.output_tokens, 1.0) / np.maximum(tokens, 1.0))
        self._corrections.learn(
            seen.columns, memberships, seen.quality - np.clip(expected, 0.0, 1.0), token_log, weights
        )

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
        prior = candidate.quality_prior
        average = np.full(self._n_fitted, 1.0 / self._n_fitted)
        return self._append(candidate, average, average, 0.0 if prior is None else prior - self._profile_mean)

    def _copied_column(self, candidate: Candidate, source: int) -> int:
        later = source - self._n_fitted
        if later < 0:
            same = np.eye(self._n_fitted)[source]
            column = self._append(candidate, same, same, 0.0)
        else:
            column = self._append(candidate, self._mix[later], self._share[later], float(self._offset[later]))
        self._corrections.copy_model(source, column)
        return column

    def _append(self, candidate: Candidate, mix: Floats, share: Floats, offset: float) -> int:
        self._known_names.append(candidate.name)
        self._mix = np.vstack([self._mix, mix])
        self._share = np.vstack([self._share, share])
        self._offset = np.append(self._offset, offset)
        self._corrections.add_model()
        return len(self._known_names) - 1

    def _restore_all(self, about: Mapping[str, Any], tensors: Tensors) -> None:
        self.space_ = str(about["space"])
        self._lock = threading.Lock()
        self._dimension = int(about["dimension"])
        self._known_names = list(about["known_names"])
        self._n_fitted = int(about["n_fitted"])
        self._mix, self._share, self._offset = (tensors[name].copy() for name in ("mix", "share", "offset"))
        self._profile_mean = float(about["profile_mean"])
        self.n_labels_ = int(about["n_labels"])
        self._n_updates, self._digest = int(about["n_updates"]), str(about["digest"])
        self.groups_ = Groups(tensors["centres"], float(about["near_similarity"]))
        self.group_table_ = GroupTable(**_under("table.", tensors))
        self._corrections = Corrections(len(self._known_names), len(self.groups_), self.half_life)
        self._corrections.restore(_under("corrections.", tensors))
        self._pool = Pool(candidates_from_json(about["candidates"]), tensors["columns"].copy())
        self.candidates_ = self._pool.candidates
        self._restore(about["own"], _under("own.", tensors))
        if len(self._corrections.count) != len(self._known_names) or self.groups_.centres.shape[1] != self._dimension:
            raise ValueError(f"{self._corrections.count.shape} corrections for {len(self._known_names)} models")


def _values(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _under(prefix: str, tensors: Tensors) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def _digest(router: ColumnRouter, table: OutcomeTable) -> str:
    digest = hashlib.sha256(repr([getattr(router, name) for name in router._parameter_constraints]).encode())
    for array in (table.embeddings, table.quality, table.output_tokens):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:12]
