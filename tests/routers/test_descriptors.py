"""Descriptors of models: what they measure, and their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.errors import DataError
from atoll.routers.descriptors import (
    Descriptors,
    logit_footprint,
    mix,
    normalised,
    perplexity_fingerprint,
    read_descriptors,
    write_descriptors,
)


def test_a_footprint_is_the_mean_of_probabilities_at_unit_length() -> None:
    probabilities = np.array([[[0.2, 0.0], [0.4, 0.8]], [[0.6, 0.8], [0.0, 0.0]]])
    np.testing.assert_allclose(logit_footprint(probabilities), [0.6, 0.8])


def test_steps_after_the_end_of_an_answer_are_left_out_of_a_footprint() -> None:
    probabilities = np.array([[[0.3, 0.4], [np.nan, np.nan]]])
    np.testing.assert_allclose(logit_footprint(probabilities), [0.6, 0.8])
    with pytest.raises(DataError, match="no step"):
        logit_footprint(np.full((2, 3, 4), np.nan))


def test_a_fingerprint_is_centred_and_of_unit_variance_by_model() -> None:
    rows = perplexity_fingerprint(np.array([[1.0, 2.0, 3.0, 2.0], [10.0, 30.0, np.nan, 20.0], [5.0, 5.0, 5.0, 5.0]]))
    np.testing.assert_allclose(rows.mean(axis=1), 0.0, atol=1e-12)
    np.testing.assert_allclose(rows.std(axis=1), [1.0, 1.0, 0.0])
    np.testing.assert_allclose(rows[0], rows[1][[0, 2, 1, 3]])


def test_both_kinds_share_an_index_only_with_one_dimension() -> None:
    logit = Descriptors("logit", ("a", "b"), normalised(np.array([[1.0, 0.0], [0.0, 1.0]])))
    other = Descriptors("perplexity", ("b", "c"), normalised(np.array([[1.0, 1.0], [-1.0, 1.0]])))
    both = mix(logit, other)
    assert (both.kind, both.names) == ("mixed", ("a", "b", "c"))
    np.testing.assert_allclose(both.of("b"), [0.0, 1.0])
    np.testing.assert_allclose(np.linalg.norm(both.vectors, axis=1), 1.0)
    with pytest.raises(DataError, match="N = K"):
        mix(logit, Descriptors("perplexity", ("c",), np.ones((1, 3))))


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "models.safetensors"
    names = ("openai/gpt", "b")
    write_descriptors(path, Descriptors("perplexity", names, np.array([[3.0, 4.0], [1.0, 0.0]]), {"probes": 2}))
    again = read_descriptors(path)
    assert (again.kind, again.names, again.about) == ("perplexity", names, {"probes": 2})
    np.testing.assert_allclose(again.of("openai/gpt"), [0.6, 0.8], rtol=1e-6)
    assert again.of("nobody") is None


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_any_other_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "models.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="holds no descriptors"):
        read_descriptors(path)
    with pytest.raises(DataError, match="holds no descriptors"):
        read_descriptors(tmp_path / "nothing")


def test_what_is_no_descriptor_is_refused() -> None:
    for kind, names, vectors in (
        ("smell", ("a",), np.ones((1, 2))),
        ("logit", ("a", "b"), np.ones((1, 2))),
        ("logit", ("a", "a"), np.ones((2, 2))),
        ("logit", ("a",), np.array([[np.nan, 1.0]])),
    ):
        with pytest.raises(DataError):
            Descriptors(kind, names, vectors)
