"""Models for the tests: a tiny random one, and the embedded one converted once into `.cache/models`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.local_backend.checkpoint import EMBEDDED_MODEL, prepare
from atoll.local_backend.codec import Codec
from atoll.local_backend.torch_engine import EngineLimits, TorchEngine
from doubles.tiny_model import write_tiny_model

MODEL_CACHE = Path(__file__).parents[2] / ".cache" / "models"


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smol_folder() -> Path:
    """The embedded model, converted."""
    return prepare(EMBEDDED_MODEL, MODEL_CACHE)


@pytest.fixture(scope="session")
def smol_codec(smol_folder: Path) -> Codec:
    return Codec.load(smol_folder)


@pytest.fixture(scope="session")
def tiny_codec(tiny_folder: Path) -> Codec:
    return Codec.load(tiny_folder)


@pytest.fixture
async def make_engine(tiny_folder: Path, tiny_codec: Codec) -> AsyncIterator[Callable[..., TorchEngine]]:
    """Engines of the tiny model in float32, closed at the end."""
    engines: list[TorchEngine] = []

    def make(**limits: Any) -> TorchEngine:
        engine = TorchEngine.load(
            tiny_folder, model_name="tiny", codec=tiny_codec, dtype="float32", limits=EngineLimits(**limits)
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()
