"""Outcome tables from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.errors import DataError
from atoll.routers.datasets import candidates_of, joined, load_dataset

PROMPTS: dict[str, list[Any]] = {"prompt_id": ["p1", "p2"], "text": ["one", "two"], "domain": ["a", "b"]}
OUTCOMES: dict[str, list[Any]] = {
    "prompt_id": ["p1", "p1", "p2"],
    "model": ["x", "y", "x"],
    "quality": [1.0, 0.5, 0.0],
    "input_tokens": [100, 100, 200],
    "output_tokens": [10, None, 30],
    "cost_usd": [100 * 2e-6 + 10 * 8e-6, None, 200 * 2e-6 + 30 * 8e-6],
}


def written(folder: Path, prompts: dict[str, list[Any]] = PROMPTS, outcomes: dict[str, list[Any]] = OUTCOMES) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(prompts), folder / "prompts.parquet")
    pq.write_table(pa.table(outcomes), folder / "outcomes.parquet")
    return folder


def test_a_table_is_read_with_unknown_cells_as_nan(tmp_path: Path) -> None:
    dataset = load_dataset(written(tmp_path / "set"))
    assert (dataset.name, dataset.prompt_ids, dataset.texts) == ("set", ("p1", "p2"), ("one", "two"))
    assert (dataset.models, dataset.domains, dataset.tasks) == (("x", "y"), ("a", "b"), (None, None))
    np.testing.assert_array_equal(dataset.quality, [[1.0, 0.5], [0.0, np.nan]])
    np.testing.assert_array_equal(dataset.output_tokens, [[10, np.nan], [30, np.nan]])


def test_prices_are_what_costs_and_tokens_imply(tmp_path: Path) -> None:
    x, y = candidates_of([load_dataset(written(tmp_path))])
    assert (x.name, x.input_usd_per_mtok, x.output_usd_per_mtok) == ("x", pytest.approx(2.0), pytest.approx(8.0))
    assert (y.input_usd_per_mtok, y.output_usd_per_mtok) == (0.0, 0.0)


def test_sets_are_joined_below_each_other(tmp_path: Path) -> None:
    other = {"prompt_id": ["q"], "model": ["z"], "quality": [0.25]}
    sets = [
        load_dataset(written(tmp_path / "one")),
        load_dataset(written(tmp_path / "two", {"prompt_id": ["q"], "text": ["three"]}, other)),
    ]
    models, table = joined(sets, [np.zeros((2, 3), np.float32), np.ones((1, 3), np.float32)])
    assert models == ("x", "y", "z")
    np.testing.assert_array_equal(
        table.quality, [[1.0, 0.5, np.nan], [0.0, np.nan, np.nan], [np.nan, np.nan, np.float32(0.25)]]
    )
    assert table.embeddings.shape == (3, 3)
    assert table.n_outcomes == 4


def without(table: dict[str, list[Any]], column: str) -> dict[str, list[Any]]:
    return {name: values for name, values in table.items() if name != column}


@pytest.mark.parametrize(
    ("prompts", "outcomes", "message"),
    [
        (
            without(PROMPTS, "text"),
            OUTCOMES,
            r"prompts.parquet: the column 'text' is missing; there are prompt_id, domain",
        ),
        (PROMPTS, without(OUTCOMES, "quality"), "the column 'quality' is missing"),
        (PROMPTS | {"prompt_id": ["p1", "p1"]}, OUTCOMES, "the prompt_id 'p1' comes twice"),
        (PROMPTS | {"text": ["one", None]}, OUTCOMES, "row 1 has None for 'text'"),
        (PROMPTS, OUTCOMES | {"prompt_id": ["p1", "p1", "p9"]}, "the prompt 'p9' is not in prompts.parquet"),
        (PROMPTS, OUTCOMES | {"model": ["x", "x", "x"]}, "prompt 'p1' and model 'x' come together more than once"),
        (PROMPTS, OUTCOMES | {"quality": [1.0, 2.0, 0.0]}, r"prompt 'p1' has quality 2\.0; allowed: \[0, 1\]"),
        (PROMPTS, OUTCOMES | {"quality": [None, None, None]}, "no row has a quality"),
        (PROMPTS, OUTCOMES | {"cost_usd": [1.0, -1.0, 0.0]}, r"cost_usd -1\.0; allowed: 0 or more"),
        (PROMPTS, OUTCOMES | {"output_tokens": ["many", "few", "some"]}, "holds something else than numbers"),
        ({"prompt_id": [], "text": []}, OUTCOMES, "there are no rows"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, prompts: dict[str, list[Any]], outcomes: dict[str, list[Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset(written(tmp_path, prompts, outcomes))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*prompts\.parquet"):
        load_dataset(tmp_path)
    written(tmp_path)
    (tmp_path / "outcomes.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"outcomes\.parquet: cannot be read as parquet"):
        load_dataset(tmp_path)
