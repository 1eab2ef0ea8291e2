"""Outcomes as arrays: prompts down, candidates across, NaN where nobody looked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, RouterError
from atoll.types import Outcome

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """What is known of n prompts and m candidates. Missing cells are NaN, never zero."""

    embeddings: Matrix
    """Unit vectors, of shape (n, d)."""
    quality: Matrix
    """In [0, 1], of shape (n, m)."""
    output_tokens: Matrix
    """Of shape (n, m)."""
    tasks: tuple[str | None, ...] | None = None
    """What each prompt is about, where somebody labelled them: known while learning only, never of a new prompt."""
    prompt_tokens: npt.NDArray[np.float32] | None = None
    """Length of each prompt, shape (n,), NaN where unknown; None where of none. Known of new prompts too."""

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def n_outcomes(self) -> int:
        """Cells with a quality."""
        return int(np.isfinite(self.quality).sum())

    def take(self, rows: npt.NDArray[np.int64]) -> OutcomeTable:
        tasks = None if self.tasks is None else tuple(self.tasks[row] for row in rows)
        lengths = None if self.prompt_tokens is None else self.prompt_tokens[rows]
        return OutcomeTable(self.embeddings[rows], self.quality[rows], self.output_tokens[rows], tasks, lengths)

    def of_columns(self, columns: npt.NDArray[np.int64]) -> OutcomeTable:
        """Some of the candidates."""
        return replace(self, quality=self.quality[:, columns], output_tokens=self.output_tokens[:, columns])

    @classmethod
    def from_outcomes(
        cls,
        outcomes: Sequence[Outcome],
        embeddings: Mapping[str, npt.NDArray[np.float32]],
        candidates: Sequence[str],
    ) -> Self:
        """One row per prompt id, in order of appearance; several outcomes of one cell are averaged.

        Raises RouterError for a candidate not in `candidates`, DataError for a prompt without a vector or a quality
        outside [0, 1].
        """
        column_of = {name: column for column, name in enumerate(candidates)}
        row_of: dict[str, int] = {}
        for outcome in outcomes:
            _check(outcome, column_of, embeddings)
            row_of.setdefault(outcome.prompt, len(row_of))
        sums = np.zeros((4, len(row_of), len(candidates)), dtype=np.float64)
        lengths = np.zeros((2, len(row_of)))
        for outcome in outcomes:
            cell = row_of[outcome.prompt], column_of[outcome.candidate]
            if outcome.quality is not None:
                sums[0][cell] += outcome.quality
                sums[1][cell] += 1
            if outcome.completion_tokens is not None:
                sums[2][cell] += outcome.completion_tokens
                sums[3][cell] += 1
            if outcome.prompt_tokens is not None:
                lengths[:, cell[0]] += outcome.prompt_tokens, 1
        vectors = [embeddings[prompt] for prompt in row_of]
        return cls(
            np.stack(vectors).astype(np.float32) if vectors else np.empty((0, 0), dtype=np.float32),
            _mean(sums[0], sums[1]),
            _mean(sums[2], sums[3]),
            prompt_tokens=_mean(lengths[0], lengths[1]) if lengths[1].any() else None,
        )


def _check(outcome: Outcome, column_of: Mapping[str, int], embeddings: Mapping[str, npt.NDArray[np.float32]]) -> None:
    if outcome.candidate not in column_of:
        raise RouterError(
            f"an outcome names the candidate {outcome.candidate!r}, which this router does not know (it knows "
            f"{', '.join(column_of) or 'none'}). Add it first: add_candidate"
        )
    if outcome.prompt not in embeddings:
        raise DataError(f"there is no vector for the prompt {outcome.prompt!r}")
    if outcome.quality is not None and not 0.0 <= outcome.quality <= 1.0:
        raise DataError(f"a quality of {outcome.quality!r} (prompt {outcome.prompt!r}) is outside [0, 1]")


def _mean(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> Matrix:
    means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return np.asarray(means, dtype=np.float32)
