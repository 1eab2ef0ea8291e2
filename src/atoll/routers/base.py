"""The contract of every router, and the arrays it answers with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, overload

import numpy as np
import numpy.typing as npt

from atoll.errors import RouterError
from atoll.routers.table import OutcomeTable
from atoll.routers.utility import score_table
from atoll.types import Candidate, Estimate, Outcome

Floats = npt.NDArray[np.float64]
Embeddings = Mapping[str, npt.NDArray[np.float32]]
"""Unit vectors of shape (d,) by prompt id."""


class EstimateRow(Sequence[Estimate]):
    """One prompt's predictions, in the order of the pool: arrays of shape (n_candidates,).

    As a sequence it holds plain objects, made when somebody looks at them: most decisions only need the arrays.
    """

    __slots__ = ("cost_usd", "names", "output_tokens", "quality", "quality_std")

    def __init__(
        self, names: tuple[str, ...], quality: Floats, quality_std: Floats, output_tokens: Floats, cost_usd: Floats
    ) -> None:
        self.names = names
        self.quality = quality
        self.quality_std = quality_std
        self.output_tokens = output_tokens
        self.cost_usd = cost_usd

    @classmethod
    def of(cls, estimates: Sequence[Estimate]) -> EstimateRow:
        """The same predictions, whatever sequence they came in."""
        if isinstance(estimates, EstimateRow):
            return estimates
        fields = ("quality", "quality_std", "output_tokens", "cost_usd")
        arrays = (np.array([getattr(each, name) for each in estimates], dtype=np.float64) for name in fields)
        return cls(tuple([each.candidate for each in estimates]), *arrays)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Estimate: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Estimate, ...]: ...

    def __getitem__(self, index: int | slice) -> Estimate | tuple[Estimate, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Estimate(
            self.names[index],
            float(self.quality[index]),
            float(self.quality_std[index]),
            float(self.output_tokens[index]),
            float(self.cost_usd[index]),
        )

    def __iter__(self) -> Iterator[Estimate]:
        arrays = (self.quality, self.quality_std, self.output_tokens, self.cost_usd)
        return map(Estimate, self.names, *(array.tolist() for array in arrays))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"EstimateRow{tuple(self)!r}"


@dataclass(frozen=True, slots=True)
class Estimates:
    """Predictions for a batch of prompts: arrays of shape (n_prompts, n_candidates), columns as in `candidates_`."""

    quality: Floats
    """In [0, 1]."""
    quality_std: Floats
    output_tokens: Floats
    cost_usd: Floats
    """Of one call: input price x prompt tokens + output price x predicted output tokens."""

    def row(self, index: int, candidates: Sequence[Candidate]) -> EstimateRow:
        """One prompt's predictions, for `decide`."""
        names = tuple([candidate.name for candidate in candidates])
        return EstimateRow(
            names, self.quality[index], self.quality_std[index], self.output_tokens[index], self.cost_usd[index]
        )


class Router(ABC):
    """Learns from outcomes which candidate answers which prompt how well, in the manner of scikit-learn.

    `__init__` only stores hyper-parameters, `fit` returns self, learned attributes end in `_`, randomness comes from a
    `seed`. Prompts are seen as embeddings of one space (`space_`); `fit` takes them beside the outcomes.

    `update` may run in one thread while others call `estimate`; no other method may run beside them.
    `checks.py` holds the list of checks that every router passes.
    """

    name: ClassVar[str]
    """The registry's key: `knn`."""
    is_policy: ClassVar[bool] = False
    """Whether it ranks candidates by `score` rather than by its estimates; these then only explain and price."""
    is_contextual: ClassVar[bool] = True
    """Whether it looks at the prompt at all; some baselines do not."""
    space_: str
    candidates_: tuple[Candidate, ...]

    @property
    @abstractmethod
    def version(self) -> str:
        """Changes whenever what was learned changes; stored with every decision."""

    def fit(
        self,
        outcomes: Sequence[Outcome],
        embeddings: Embeddings,
        candidates: Sequence[Candidate],
        *,
        space: str,
    ) -> Self:
        """Learn from scratch. `embeddings` maps each outcome's prompt id to its vector."""
        table = OutcomeTable.from_outcomes(outcomes, embeddings, [candidate.name for candidate in candidates])
        return self.fit_table(table, candidates, space=space)

    @abstractmethod
    def fit_table(self, table: OutcomeTable, candidates: Sequence[Candidate], *, space: str) -> Self:
        """Learn from scratch. The columns of `table` are `candidates`. DataError for an empty table."""

    @abstractmethod
    def update(self, outcomes: Sequence[Outcome], embeddings: Embeddings, *, space: str | None = None) -> Self:
        """Learn online from further outcomes, one or many, with vectors of `space` (None for `space_`).

        An outcome without a quality still teaches how long answers are. Raises RouterError for a candidate, a space or
        a dimension that the router does not know, DataError for a quality outside [0, 1]; then nothing is learned.
        """

    @abstractmethod
    def add_candidate(
        self,
        candidate: Candidate,
        outcomes: Sequence[Outcome] = (),
        embeddings: Embeddings | None = None,
    ) -> Self:
        """Admit a new model, knowing as little as `outcomes`, without refitting the others.

        Raises RouterError when there is a candidate of that name already.
        """

    @abstractmethod
    def set_candidates(self, candidates: Sequence[Candidate]) -> Self:
        """Answer for exactly this pool from now on, columns in this order, with these prices.

        Candidates are found by name or alias among what the router has learned (`names.py`); others start as
        `add_candidate` would have it. What was learned about models outside the pool is kept.
        """

    @abstractmethod
    def estimate(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], *, space: str | None = None
    ) -> Estimates:
        """Predict for unit vectors of shape (n_prompts, d) and prompt lengths of shape (n_prompts,).

        `space` is where the vectors lie, None for `space_`. Raises RouterError for a space or a dimension that the
        router was not fitted in.
        """

    def estimate_one(
        self, embedding: npt.NDArray[np.float32], prompt_tokens: int, *, space: str | None = None
    ) -> EstimateRow:
        """`estimate` for one vector of shape (d,)."""
        batch = self.estimate(embedding[None], np.array([prompt_tokens], dtype=np.int64), space=space)
        return batch.row(0, self.candidates_)

    def score(
        self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64], preference: float
    ) -> Floats:
        """What candidates are ranked by, of shape (n_prompts, n_candidates), for a preference in [0, 1].

        By default quality against normalised cost (`utility.py`); policy routers, which rank without estimating,
        override it.
        """
        estimates = self.estimate(embeddings, prompt_tokens)
        return score_table(estimates.quality, estimates.cost_usd, preference)

    def score_one(self, embedding: npt.NDArray[np.float32], prompt_tokens: int, preference: float) -> Floats:
        """`score` for one vector of shape (d,): of shape (n_candidates,)."""
        scores = self.score(embedding[None], np.array([prompt_tokens], dtype=np.int64), preference)
        return np.asarray(scores[0])

    @property
    def spaces(self) -> tuple[str, ...]:
        """Every space whose vectors `estimate` and `update` take; the first is `space_`."""
        return (self.space_,)

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write a folder with safetensors and JSON; never pickle. A folder that stands there is replaced as a whole."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises DataError for anything else."""

    def summary(self) -> dict[str, Any]:
        """What was learned in a few numbers, for people and JSON."""
        return {"router": self.name, "version": self.version, "space": self.space_, "candidates": len(self.candidates_)}

    def _check_space(self, embeddings: npt.NDArray[np.float32], dimension: int, space: str | None) -> None:
        if space is not None and space not in self.spaces:
            raise RouterError(
                f"this {self.name} router knows vectors of {', '.join(self.spaces)}, not of {space!r}. Use the "
                "embedder that it was fitted with, or fit it again with this one"
            )
        if embeddings.ndim != 2 or embeddings.shape[1] != dimension:
            raise RouterError(f"expected vectors of shape (n, {dimension}), found {embeddings.shape}")
