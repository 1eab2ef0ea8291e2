"""The embedder that needs no model: one vector per token, summed.

A table of token vectors distilled from all-MiniLM-L6-v2 by `scripts/distil_static_table.py`. A text's vector is the
sum of its tokens' rows, scaled to unit length; how much a token counts is the length of its row. A short prompt costs
some tens of microseconds, so it is done in line. After model2vec (Tulkens and van Dongen 2024), but with rows trained
so that sums match the teacher's sentence vectors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError
from atoll.routers.embedding.base import Embedder, Vectors
from atoll.routers.embedding.ends import text_ends, token_ends
from atoll.routers.embedding.wordpiece import WordPiece

SHIPPED_TABLE = Path(__file__).parent / "data"
TABLE_FILE = "static_table.safetensors"
ABOUT_FILE = "static_table.json"


class StaticEmbedder(Embedder):
    """Embeds with the shipped table, or with another one in `folder`. Raises DataError when it cannot be read."""

    def __init__(self, folder: Path = SHIPPED_TABLE) -> None:
        about, tensors = _read(folder)
        self.space = about["space"]
        self._rows: npt.NDArray[np.int8] = tensors["rows"]
        self._scales: npt.NDArray[np.float32] = tensors["scales"].astype(np.float32)
        self.dimension = self._rows.shape[1]
        self._tokenizer = WordPiece({token: row for row, token in enumerate(about["tokens"])})
        self._empty: npt.NDArray[np.float32] = tensors["empty"]

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        for index, text in enumerate(texts):
            vectors[index] = self._sum(token_ends(self._tokenizer.ids(text_ends(text))))
        return vectors

    def _sum(self, ids: list[int]) -> npt.NDArray[np.float32]:
        if not ids:
            return self._empty
        total: npt.NDArray[np.float32] = self._scales[ids] @ self._rows[ids].astype(np.float32)
        length = float(np.sqrt(total @ total))
        return total / length if length > 0 else self._empty


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / TABLE_FILE)
        if absent := {"space", "tokens"} - about.keys() | {"rows", "scales", "empty"} - tensors.keys():
            raise ValueError(f"it has no {', '.join(sorted(absent))}")
        if not len(about["tokens"]) == len(tensors["rows"]) == len(tensors["scales"]):
            raise ValueError("it has not one row and one scale for each token")
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"the token table in {str(folder)!r} cannot be read ({error}). It ships with Atoll; reinstall it, or make "
            "one with scripts/distil_static_table.py"
        ) from error
    return about, tensors
