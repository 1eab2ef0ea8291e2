"""Which router the configuration names, and what is told when it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.config import Settings, parse_settings
from atoll.errors import ConfigError
from atoll.gateway.catalog import build_catalog
from atoll.gateway.router_file import open_router
from atoll.routers import KNNRouter
from atoll.routers.base import Router
from atoll.routers.embedding.static import StaticEmbedder
from atoll.routers.prior import PriorRouter
from atoll.types import Candidate, Outcome

SPACE = "plane"


def fitted(path: Path, *names: str, space: str = SPACE) -> Path:
    east, north = np.eye(2, dtype=np.float32)
    outcomes = [Outcome(prompt, name, 1.0) for prompt in ("east", "north") for name in names]
    candidates = [Candidate(name, name, "up") for name in names]
    KNNRouter(k=1).fit(outcomes, {"east": east, "north": north}, candidates, space=space).save(path)
    return path


def settings_with(router: Any) -> Settings:
    text = f"""upstreams:
  up: {{kind: openai, base_url: 'http://127.0.0.1:9/v1'}}
candidates:
  - {{name: a, upstream: up, prices: {{input: 1, output: 1}}}}
  - {{name: b, upstream: up, prices: {{input: 1, output: 1}}}}
routing:
  router: {json.dumps(router)}
"""
    return parse_settings(text, "atoll.yaml", {})


def opened(router: Any) -> Router:
    settings = settings_with(router)
    return open_router(settings, build_catalog(settings, {}), SPACE)


def told(router: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        opened(router)
    message = str(raised.value)
    assert message.startswith("atoll.yaml:7: routing.router: ")
    return message


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_a_path_with_or_without_its_name(tmp_path: Path, suffix: str) -> None:
    path = str(fitted(tmp_path / f"mine{suffix}", "a", "b"))
    for given in (path, {"path": path}, {"name": "knn", "path": path}):
        assert isinstance(opened(given), KNNRouter)


@pytest.mark.parametrize("given", ["prior", {"name": "prior"}])
def test_the_one_that_ships_needs_no_path(given: Any) -> None:
    settings = settings_with(given)
    router = open_router(settings, build_catalog(settings, {}), StaticEmbedder().space)
    assert isinstance(router, PriorRouter)


def test_a_name_without_a_path_says_how_to_fit_it() -> None:
    assert "atoll fit knn" in told({"name": "knn"})


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    path = str(fitted(tmp_path / "mine", "a", "b"))
    for given in ({"name": "nearest"}, {"name": "nearest", "path": path}):
        message = told(given)
        assert "'nearest'" in message
        assert "knn, " in message


def test_another_router_than_named(tmp_path: Path) -> None:
    assert "'knn' router, not 'reef'" in told({"name": "reef", "path": str(fitted(tmp_path / "mine", "a"))})


def test_a_path_where_nothing_is(tmp_path: Path) -> None:
    assert "nowhere" in told(str(tmp_path / "nowhere"))


def test_a_file_of_another_version(tmp_path: Path) -> None:
    about = fitted(tmp_path / "mine", "a", "b") / "router.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
    assert "format 1" in told(str(tmp_path / "mine"))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_artefact(tmp_path: Path, share: float) -> None:
    file = fitted(tmp_path / "mine", "a", "b") / "router.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert "mine" in told(str(tmp_path / "mine"))


def test_another_space_than_the_embedder(tmp_path: Path) -> None:
    message = told(str(fitted(tmp_path / "mine", "a", "b", space="sphere")))
    assert "sphere" in message
    assert "plane" in message


def test_models_of_which_it_knows_none(tmp_path: Path) -> None:
    message = told(str(fitted(tmp_path / "mine", "x", "y")))
    assert "none of the models that may be chosen (a, b)" in message


def test_a_model_that_it_does_not_know_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    router = opened(str(fitted(tmp_path / "mine", "a", "x")))
    assert [each.name for each in router.candidates_] == ["a", "b"]
    assert "learned nothing of b" in caplog.text


@pytest.mark.parametrize("given", [3, ["prior"], {"nam": "prior"}])
def test_what_is_no_router_at_all(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"atoll.yaml:7: routing\.router"):
        settings_with(given)
