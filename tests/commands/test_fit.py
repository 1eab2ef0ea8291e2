"""`atoll fit`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from atoll.cli import atoll
from atoll.routers import KNNRouter, load_router
from atoll.routers.embedding.static import StaticEmbedder
from atoll.routers.registry import ROUTERS

SUMS = [f"What is {a} plus {a * 7}? Show the steps of the addition." for a in range(60)]
POEMS = [f"Write a short poem about {thing} in the {season}." for thing in
         ("rain", "snow", "a cat", "the sea", "an old house", "bread", "a train", "my sister", "the moon", "ivy")
         for season in ("spring", "summer", "autumn", "winter", "morning", "evening")]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """`counter` can add, `poet` can write, and neither the other's."""
    folder = tmp_path / "mine"
    folder.mkdir()
    texts = SUMS + POEMS
    ids = [f"p{row}" for row in range(len(texts))]
    pq.write_table(pa.table({"prompt_id": ids, "text": texts}), folder / "prompts.parquet")
    is_sum = np.arange(len(texts)) < len(SUMS)
    outcomes = {
        "prompt_id": ids * 2,
        "model": ["counter"] * len(ids) + ["poet"] * len(ids),
        "quality": np.concatenate([is_sum, ~is_sum]).astype(float).tolist(),
        "output_tokens": [20] * len(ids) + [80] * len(ids),
    }
    pq.write_table(pa.table(outcomes), folder / "outcomes.parquet")
    return folder


def fit(*arguments: object) -> Result:
    return CliRunner().invoke(atoll, ["fit", "knn", *map(str, arguments)])


@pytest.mark.parametrize("out", ["router", "router.safetensors", "new/folder/router"])
def test_a_router_is_trained_and_can_be_served(data: Path, tmp_path: Path, out: str) -> None:
    result = fit("--data", data, "--out", tmp_path / out)
    assert result.exit_code == 0, result.output
    assert "240 outcomes of 2 models on 120 prompts (mine)" in result.output
    assert "best single model 0.5000, random 0.5000, oracle 1.0000" in result.output
    router = load_router(tmp_path / out)
    assert isinstance(router, KNNRouter)
    embedder = StaticEmbedder()
    assert router.space_ == embedder.space
    sum_, poem = embedder.embed(["What is 12 plus 99?", "Write a poem about fog in the autumn."])
    assert [each.quality > 0.5 for each in router.estimate_one(sum_, 10)] == [True, False]
    assert [each.quality > 0.5 for each in router.estimate_one(poem, 10)] == [False, True]
    assert router.estimate_one(poem, 10)[1].output_tokens == pytest.approx(80, rel=0.2)


def test_json_for_programs(data: Path, tmp_path: Path) -> None:
    result = fit("--data", data, "--out", tmp_path / "router", "--k", 7, "--seed", 3, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert summary["kernel"]["k"] == 7
    assert (summary["prompts"], summary["candidates"], summary["datasets"]) == (120, 2, ["mine"])
    assert summary["quality_of_choice"]["router"] > 0.95
    assert summary["squared_error"] < summary["squared_error_of_means"]


def test_the_same_seed_trains_the_same_router(data: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert fit("--data", data, "--out", tmp_path / name).exit_code == 0
    assert load_router(tmp_path / "one").version == load_router(tmp_path / "two").version


def test_a_folder_that_is_no_data_is_told(tmp_path: Path) -> None:
    result = fit("--data", tmp_path, "--out", tmp_path / "router")
    assert result.exit_code == 1
    assert "prompts.parquet" in result.output
    assert not (tmp_path / "router").exists()


def test_something_else_is_not_written_over(data: Path, tmp_path: Path) -> None:
    result = fit("--data", data, "--out", data)
    assert result.exit_code == 1
    assert "left alone" in result.output
    assert (data / "prompts.parquet").exists()


def test_an_unknown_embedder_lists_the_known_ones(data: Path, tmp_path: Path) -> None:
    result = fit("--data", data, "--out", tmp_path / "router", "--embedder", "bert")
    assert result.exit_code == 2
    assert "'static', 'minilm'" in result.output


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_router_of_the_registry_is_fitted_and_read_again(data: Path, tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(atoll, ["fit", name, "--data", str(data), "--out", str(tmp_path / "router"), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert (summary["router"], summary["outcomes"]) == (name, 240)
    assert load_router(tmp_path / "router").version == summary["version"]


def test_parameters_are_set_and_checked(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "router"
    assert fit("--data", data, "--out", out, "--set", "k=5", "--json").exit_code == 0
    for assignment, message in (("k=0", "from 1 to"), ("k=x", "from 1 to"), ("neighbours=3", "k, cv_prompts")):
        result = fit("--data", data, "--out", tmp_path / "other", "--set", assignment)
        assert result.exit_code == 1
        assert message in result.output
    assert not (tmp_path / "other").exists()


def test_evaluation_data_is_refused(data: Path, tmp_path: Path) -> None:
    folder = data.rename(tmp_path / "routerarena-sub10")
    result = fit("--data", folder, "--out", tmp_path / "router")
    assert result.exit_code == 1
    assert "evaluation only" in result.output


def test_an_unknown_router_lists_the_known_ones() -> None:
    result = CliRunner().invoke(atoll, ["fit", "nearest"])
    assert result.exit_code == 2
    assert "knn, prior" in result.output
