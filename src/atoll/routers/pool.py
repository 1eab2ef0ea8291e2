"""The candidates a router answers for: where each stands in what was learned, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atoll.errors import RouterError
from atoll.types import TOKENS_PER_PRICE_UNIT, Candidate

Floats = npt.NDArray[np.float64]


def check_pool(candidates: Sequence[Candidate]) -> None:
    """Raises RouterError for an empty pool or a name that comes twice."""
    names = [candidate.name for candidate in candidates]
    if not names:
        raise RouterError("a router needs at least one candidate")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RouterError(f"two candidates are called {twice!r}; names are unique")


class Pool:
    """Immutable: routers replace it as a whole, so that an estimate under way keeps the one it began with."""

    def __init__(self, candidates: Sequence[Candidate], columns: npt.NDArray[np.int64]) -> None:
        """`columns[i]` is where the router keeps what it knows of `candidates[i]`. RouterError as `check_pool`."""
        check_pool(candidates)
        self.candidates = tuple(candidates)
        self.names = tuple(candidate.name for candidate in candidates)
        self.columns = columns
        self._is_in_order = bool((columns == np.arange(len(columns))).all())
        self.input_usd = np.array([each.input_usd_per_mtok for each in candidates]) / TOKENS_PER_PRICE_UNIT
        self.output_usd = np.array([each.output_usd_per_mtok for each in candidates]) / TOKENS_PER_PRICE_UNIT

    def cost_usd(self, prompt_tokens: npt.NDArray[np.int64], output_tokens: Floats) -> Floats:
        """Of one call each, for prompt lengths of shape (n,) and answers of shape (n, n_candidates)."""
        return np.asarray(prompt_tokens[:, None] * self.input_usd + output_tokens * self.output_usd)

    def is_whole(self, n_columns: int) -> bool:
        """Whether the pool is just what `n_columns` columns are, in their order: then nothing has to be picked."""
        return self._is_in_order and len(self.columns) == n_columns
