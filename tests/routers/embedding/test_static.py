"""The static embedder with the table that ships."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from atoll.errors import DataError
from atoll.routers.embedding.static import ABOUT_FILE, SHIPPED_TABLE, TABLE_FILE, StaticEmbedder


@pytest.fixture(scope="module")
def embedder() -> StaticEmbedder:
    return StaticEmbedder()


def test_what_ships_is_under_eight_megabytes() -> None:
    assert sum(file.stat().st_size for file in SHIPPED_TABLE.iterdir()) < 8_000_000


def test_the_space_is_named_for_the_table() -> None:
    about = json.loads((SHIPPED_TABLE / ABOUT_FILE).read_text("utf-8"))
    tensors = load_file(SHIPPED_TABLE / TABLE_FILE)
    content = tensors["rows"].tobytes() + tensors["scales"].tobytes() + json.dumps(about["tokens"]).encode()
    assert about["space"] == f"static-256-{hashlib.sha256(content).hexdigest()[:8]}"
    assert len(about["tokens"]) == len(tensors["rows"]) == len(tensors["scales"])


def test_shape_and_type(embedder: StaticEmbedder) -> None:
    vectors = embedder.embed(["one", "two words", "three more words"])
    assert vectors.shape == (3, embedder.dimension) == (3, 256)
    assert vectors.dtype == np.float32
    assert embedder.embed([]).shape == (0, 256)


@given(text=st.text(st.characters(), max_size=300))
def test_any_text_has_a_unit_vector(text: str, embedder: StaticEmbedder) -> None:
    assert np.linalg.norm(embedder.embed([text])[0]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("nothing", ["", " ", "\n\t", "\x00\x01", "\u200b"])
def test_nothing_has_one_fixed_vector(nothing: str, embedder: StaticEmbedder) -> None:
    assert np.array_equal(embedder.embed([nothing]), embedder.embed([""]))


def test_a_text_has_the_same_vector_alone_and_among_others(embedder: StaticEmbedder) -> None:
    texts = ["Solve x^2 = 2.", "", "def f(): pass", "Who wrote Faust?"]
    together = embedder.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(embedder.embed([text])[0], vector)


def test_threads_agree(embedder: StaticEmbedder) -> None:
    texts = [f"question {number} about subject {number % 7}" for number in range(200)]
    expected = StaticEmbedder().embed(texts)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(np.array_equal(embedder.embed(texts), expected)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


RELATED = [
    ("How do I reverse a list in Python?", "Write Python code that reverses an array."),
    ("What is the derivative of sin(x)?", "Differentiate the sine function."),
    ("Who was the first president of the United States?", "George Washington and the founding of America"),
    ("Which drug treats high blood pressure?", "Medication for hypertension"),
]


def test_related_texts_are_nearer_than_unrelated(embedder: StaticEmbedder) -> None:
    left = embedder.embed([pair[0] for pair in RELATED])
    right = embedder.embed([pair[1] for pair in RELATED])
    assert (left @ right.T).argmax(axis=1).tolist() == list(range(len(RELATED)))


def test_only_both_ends_of_a_long_text_count(embedder: StaticEmbedder) -> None:
    ends = ("alpha " * 64, "omega " * 64)
    short = embedder.embed([f"{ends[0]}{ends[1]}"])
    assert np.array_equal(embedder.embed([f"{ends[0]}{'middle ' * 50}{ends[1]}"]), short)
    assert np.array_equal(embedder.embed([f"{ends[0]}{'middle ' * 700_000}{ends[1]}"]), short)


def test_a_broken_table_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="distil_static_table"):
        StaticEmbedder(tmp_path)
    shutil.copy(SHIPPED_TABLE / ABOUT_FILE, tmp_path)
    (tmp_path / TABLE_FILE).write_bytes(b"not a table")
    with pytest.raises(DataError, match="cannot be read"):
        StaticEmbedder(tmp_path)
    (tmp_path / ABOUT_FILE).write_text('{"space": "static-x"}')
    shutil.copy(SHIPPED_TABLE / TABLE_FILE, tmp_path)
    with pytest.raises(DataError, match="tokens"):
        StaticEmbedder(tmp_path)


def test_needs_no_model_library() -> None:
    code = (
        "import sys; from atoll.routers.embedding.static import StaticEmbedder; StaticEmbedder().embed(['x']);"
        "assert not {'torch', 'transformers', 'tokenizers', 'sentence_transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
