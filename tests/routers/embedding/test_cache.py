"""The cache of vectors."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.routers.embedding.cache import VectorCache


def vector(value: float = 1.0) -> np.ndarray:
    return np.full(4, value, dtype=np.float32)


def test_gives_back_what_was_put() -> None:
    cache = VectorCache(10, 10_000)
    cache.put("a", vector(1))
    cache.put("a", vector(2))
    assert cache.get("b") is None
    assert np.array_equal(cache.get("a"), vector(2))
    assert len(cache) == 1


def test_vectors_are_read_only() -> None:
    cache = VectorCache(10, 10_000)
    cache.put("a", vector())
    kept = cache.get("a")
    assert kept is not None
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 5


def test_the_least_recently_used_goes_first() -> None:
    cache = VectorCache(2, 10_000)
    cache.put("a", vector())
    cache.put("b", vector())
    cache.get("a")
    cache.put("c", vector())
    assert [cache.get(text) is not None for text in "abc"] == [True, False, True]


def test_bytes_are_bounded() -> None:
    cache = VectorCache(1000, 10_000)
    for number in range(100):
        cache.put(f"{number:04}" + "x" * 500, vector())
        assert cache.size_bytes <= 10_000
    assert 5 < len(cache) < 20
    for number in range(100, 200):
        cache.put(f"{number}", vector())
    assert cache.size_bytes == sum(len(text) + 16 + 300 for text in cache._vectors)


def test_a_text_too_large_is_not_kept() -> None:
    cache = VectorCache(10, 1_000)
    cache.put("a", vector())
    cache.put("x" * 2_000, vector())
    assert cache.get("x" * 2_000) is None
    assert cache.get("a") is not None


def test_no_entries_keep_nothing() -> None:
    cache = VectorCache(0, 10_000)
    cache.put("a", vector())
    assert cache.get("a") is None
