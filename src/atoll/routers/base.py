"""The contract of every router, and the arrays it answers with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from atoll.types import Candidate, Outcome

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimates:
    """Predictions for a batch of prompts, each array of shape (n_prompts, n_candidates), columns as in `candidates_`."""

    quality: Floats
    """In [0, 1]."""
    quality_std: Floats
    output_tokens: Floats
    cost_usd: Floats
    """Of one call: input price x prompt tokens + output price x predicted output tokens."""


class Router(ABC):
    """Learns from outcomes which candidate answers which prompt how well, in the manner of scikit-learn.

    `__init__` only stores hyper-parameters, `fit` returns self, learned attributes end in `_`, randomness comes from a
    `seed`. Prompts are seen as embeddings of one space (`space_`); `fit` takes them beside the outcomes.
    """

    name: ClassVar[str]
    """The registry's key: `knn`."""
    version: str
    """Changes whenever what was learned changes; stored with every decision."""
    space_: str
    candidates_: tuple[Candidate, ...]

    @abstractmethod
    def fit(
        self,
        outcomes: Sequence[Outcome],
        embeddings: dict[str, npt.NDArray[np.float32]],
        candidates: Sequence[Candidate],
        *,
        space: str,
    ) -> Self:
        """Learn from scratch. `embeddings` maps each outcome's prompt id to its vector."""

    @abstractmethod
    def update(self, outcomes: Sequence[Outcome], embeddings: dict[str, npt.NDArray[np.float32]]) -> Self:
        """Learn online from further outcomes, one or many; raises RouterError for a candidate it does not know."""

    @abstractmethod
    def add_candidate(
        self,
        candidate: Candidate,
        outcomes: Sequence[Outcome] = (),
        embeddings: dict[str, npt.NDArray[np.float32]] | None = None,
    ) -> Self:
        """Admit a new model, knowing as little as `outcomes`, without refitting the others."""

    @abstractmethod
    def estimate(self, embeddings: npt.NDArray[np.float32], prompt_tokens: npt.NDArray[np.int64]) -> Estimates:
        """Predict for unit vectors of shape (n_prompts, d) and prompt lengths of shape (n_prompts,)."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write a folder with safetensors and JSON; never pickle."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises DataError for anything else."""
