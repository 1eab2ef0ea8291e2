"""Embedders by name."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from atoll.config import EmbedderSettings
from atoll.errors import ConfigError
from atoll.routers.embedding.base import Embedder

KINDS: tuple[str, ...] = get_args(EmbedderSettings.model_fields["kind"].annotation)
DTYPES: tuple[str, ...] = get_args(EmbedderSettings.model_fields["dtype"].annotation)


def load_embedder(
    kind: str = "static", *, dtype: str = "auto", cache_dir: Path | None = None, threads: int | None = None
) -> Embedder:
    """The embedder called `kind` (`static` or `minilm`), ready for use. Blocks: `minilm` takes seconds to load.

    The rest is for `minilm` only: `cache_dir` is where its int8 form is kept; `threads` is how many compute (torch's is
    one number for the whole process). Raises ConfigError for an unknown name, MissingExtraError where a part is not
    installed.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no embedder {kind!r}; choose one of {', '.join(KINDS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"there is no embedder dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if kind == "static":
        from atoll.routers.embedding.static import StaticEmbedder

        return StaticEmbedder()
    from atoll.routers.embedding.minilm import MiniLMEmbedder

    return MiniLMEmbedder(dtype=dtype, cache_dir=cache_dir, threads=threads)
