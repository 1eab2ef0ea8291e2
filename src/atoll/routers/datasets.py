"""Outcome tables from disk: a folder with `prompts.parquet` and `outcomes.parquet`.

`prompts.parquet` has `prompt_id` and `text` (what is embedded), and may have `domain`, `task`, `split`.
`outcomes.parquet` has one row per prompt and model: `prompt_id`, `model`, `quality` in [0, 1] and, where known,
`input_tokens`, `output_tokens`, `cost_usd`. A row of each:

    {"prompt_id": "mmlupro-70", "text": "Typical advertising …", "domain": "business", "task":
    "ori_mmlu:business_ethics"} {"prompt_id": "mmlupro-70", "model": "gemini-1.5-pro-002", "quality": 1.0,
    "input_tokens": 229, "output_tokens": 61}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError, MissingExtraError
from atoll.routers.table import Matrix, OutcomeTable
from atoll.types import TOKENS_PER_PRICE_UNIT, Candidate

PROMPTS_FILE: Final = "prompts.parquet"
OUTCOMES_FILE: Final = "outcomes.parquet"
HELD_OUT_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts and what every model made of them. Unknown cells are NaN."""

    name: str
    prompt_ids: tuple[str, ...]
    texts: tuple[str, ...]
    domains: tuple[str | None, ...]
    tasks: tuple[str | None, ...]
    models: tuple[str, ...]
    """Sorted."""
    quality: Matrix
    """Of shape (n_prompts, n_models), like the next three."""
    input_tokens: Matrix
    output_tokens: Matrix
    cost_usd: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def take(self, rows: npt.NDArray[np.int64]) -> Dataset:
        """Some of the prompts."""
        return Dataset(
            self.name,
            tuple(self.prompt_ids[row] for row in rows),
            tuple(self.texts[row] for row in rows),
            tuple(self.domains[row] for row in rows),
            tuple(self.tasks[row] for row in rows),
            self.models,
            self.quality[rows],
            self.input_tokens[rows],
            self.output_tokens[rows],
            self.cost_usd[rows],
        )


def load_dataset(folder: Path) -> Dataset:
    """Read one folder. Raises DataError that names the file, the column and the value that is wrong."""
    prompts = _columns(folder / PROMPTS_FILE, ("prompt_id", "text"), ("domain", "task"))
    outcomes = _columns(
        folder / OUTCOMES_FILE, ("prompt_id", "model", "quality"), ("input_tokens", "output_tokens", "cost_usd")
    )
    row_of = _rows_of(folder / PROMPTS_FILE, prompts)
    models = tuple(sorted(set(_strings(folder / OUTCOMES_FILE, "model", outcomes["model"]))))
    column_of = {model: column for column, model in enumerate(models)}
    try:
        rows = np.array([row_of[prompt] for prompt in outcomes["prompt_id"]], dtype=np.int64)
    except KeyError as error:
        raise DataError(f"{folder / OUTCOMES_FILE}: the prompt {error.args[0]!r} is not in {PROMPTS_FILE}") from None
    cells = rows, np.array([column_of[model] for model in outcomes["model"]], dtype=np.int64)
    _check_once(folder / OUTCOMES_FILE, cells, list(row_of), models)
    shape = len(row_of), len(models)
    quality = _matrix(folder, "quality", outcomes, cells, shape, at_most=1.0)
    if not np.isfinite(quality).any():
        raise DataError(f"{folder / OUTCOMES_FILE}: no row has a quality")
    return Dataset(
        name=folder.name,
        prompt_ids=tuple(row_of),
        texts=tuple(_strings(folder / PROMPTS_FILE, "text", prompts["text"])),
        domains=tuple(prompts["domain"]),
        tasks=tuple(prompts["task"]),
        models=models,
        quality=quality.astype(np.float32),
        input_tokens=_matrix(folder, "input_tokens", outcomes, cells, shape).astype(np.float32),
        output_tokens=_matrix(folder, "output_tokens", outcomes, cells, shape).astype(np.float32),
        cost_usd=_matrix(folder, "cost_usd", outcomes, cells, shape),
    )


def is_held_out(text: str) -> bool:
    """Whether nothing that ships may be fitted on this prompt: one in five, by the hash of its first 200 characters.

    Case and punctuation do not count, so one question that several datasets share is on the same side in all of them.
    """
    normal = re.sub(r"\W+", " ", text.lower()).strip()[:200]
    return int.from_bytes(hashlib.sha256(normal.encode()).digest()[:4], "big") < HELD_OUT_SHARE * 2**32


def joined(datasets: Sequence[Dataset], embeddings: Sequence[Matrix]) -> tuple[tuple[str, ...], OutcomeTable]:
    """Models (sorted) and one table of several datasets below each other; cells of models that a set lacks are NaN.

    `embeddings` has one array of shape (n_prompts, d) per dataset.
    """
    models = tuple(sorted({model for dataset in datasets for model in dataset.models}))
    n_prompts = sum(map(len, datasets))
    quality = np.full((n_prompts, len(models)), np.nan, dtype=np.float32)
    tokens = quality.copy()
    start = 0
    for dataset in datasets:
        columns = np.searchsorted(models, dataset.models)
        rows = slice(start, start + len(dataset))
        quality[rows, columns] = dataset.quality
        tokens[rows, columns] = dataset.output_tokens
        start += len(dataset)
    return models, OutcomeTable(np.concatenate(list(embeddings)), quality, tokens)


def candidates_of(datasets: Sequence[Dataset]) -> tuple[Candidate, ...]:
    """One candidate per model, sorted by name, with the prices that its costs and tokens imply (0 where none are)."""
    prices: dict[str, tuple[float, float]] = {}
    for dataset in datasets:
        for column, model in enumerate(dataset.models):
            if prices.get(model, (0.0, 0.0)) == (0.0, 0.0):
                prices[model] = _implied_prices(dataset, column)
    return tuple(
        Candidate(model, model, "", input_usd_per_mtok=prices[model][0], output_usd_per_mtok=prices[model][1])
        for model in sorted(prices)
    )


def _implied_prices(dataset: Dataset, column: int) -> tuple[float, float]:
    """US dollars per million input and output tokens, by least squares."""
    tokens = np.stack([dataset.input_tokens[:, column], dataset.output_tokens[:, column]], axis=1).astype(np.float64)
    cost = dataset.cost_usd[:, column]
    known = np.isfinite(tokens).all(axis=1) & np.isfinite(cost)
    if not known.any():
        return 0.0, 0.0
    prices, *_ = np.linalg.lstsq(tokens[known], cost[known] * TOKENS_PER_PRICE_UNIT, rcond=None)
    if (prices < 0).any():
        # Not told apart by this data: one price for both.
        total = tokens[known].sum(axis=1)
        prices = np.full(2, (total @ cost[known]) / max(total @ total, 1.0) * TOKENS_PER_PRICE_UNIT)
    return round(float(prices[0]), 6), round(float(prices[1]), 6)


def _columns(path: Path, needed: Sequence[str], optional: Sequence[str]) -> dict[str, list[Any]]:
    """Columns as lists; an optional one that is missing is all None."""
    try:
        import pyarrow.parquet
        from pyarrow import ArrowException
    except ImportError:
        raise MissingExtraError("reading outcome tables", "train") from None
    if not path.is_file():
        raise DataError(f"there is no {str(path)!r}; a data folder holds {PROMPTS_FILE} and {OUTCOMES_FILE}")
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        there = ", ".join(map(str, table.column_names)) or "none"
        raise DataError(f"{path}: the column {missing[0]!r} is missing; there are {there}")
    if table.num_rows == 0:
        raise DataError(f"{path}: there are no rows")
    absent = [None] * table.num_rows
    return {name: table[name].to_pylist() if name in table.column_names else absent for name in (*needed, *optional)}


def _rows_of(path: Path, prompts: dict[str, list[Any]]) -> dict[str, int]:
    ids = _strings(path, "prompt_id", prompts["prompt_id"])
    row_of = {prompt: row for row, prompt in enumerate(ids)}
    if len(row_of) < len(ids):
        twice = next(prompt for row, prompt in enumerate(ids) if row_of[prompt] != row)
        raise DataError(f"{path}: the prompt_id {twice!r} comes twice")
    return row_of


def _strings(path: Path, name: str, values: list[Any]) -> list[str]:
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"{path}: row {row} has {value!r} for {name!r}; expected a text")
    return values


def _check_once(
    path: Path, cells: tuple[npt.NDArray[np.int64], ...], prompts: Sequence[str], models: Sequence[str]
) -> None:
    flat = cells[0] * len(models) + cells[1]
    unique, counts = np.unique(flat, return_counts=True)
    if len(unique) < len(flat):
        prompt, model = divmod(int(unique[counts.argmax()]), len(models))
        raise DataError(f"{path}: prompt {prompts[prompt]!r} and model {models[model]!r} come together more than once")


def _matrix(
    folder: Path,
    name: str,
    outcomes: dict[str, list[Any]],
    cells: tuple[npt.NDArray[np.int64], ...],
    shape: tuple[int, int],
    at_most: float = np.inf,
) -> npt.NDArray[np.float64]:
    try:
        values = np.array([np.nan if value is None else value for value in outcomes[name]], dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{folder / OUTCOMES_FILE}: {name!r} holds something else than numbers") from None
    wrong = np.flatnonzero(~(np.isnan(values) | ((values >= 0.0) & (values <= at_most) & np.isfinite(values))))
    if len(wrong):
        allowed = "[0, 1]" if at_most == 1.0 else "0 or more"
        prompt = outcomes["prompt_id"][wrong[0]]
        raise DataError(
            f"{folder / OUTCOMES_FILE}: prompt {prompt!r} has {name} {float(values[wrong[0]])!r}; allowed: {allowed}"
        )
    matrix = np.full(shape, np.nan)
    matrix[cells] = values
    return matrix
