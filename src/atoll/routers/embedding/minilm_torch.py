"""MiniLM in torch."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from atoll.routers.embedding.base import Vectors
from atoll.routers.embedding.bert import BertEncoder
from atoll.routers.embedding.bert_config import BertConfig
from atoll.routers.embedding.minilm import Backend, Tokens

MIN_COSINE = 0.999
"""That bfloat16 must keep to float32 to be chosen by itself."""
_PROBE_TOKENS = (16, 64, 130)
_PROBE_ROUNDS = 3


class TorchBackend(Backend):
    """float32 or bfloat16; `auto` measures which is faster here (a quarter of a second)."""

    space = "minilm-384-v1"

    def __init__(self, folder: Path, dtype: str, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        full = load_encoder(folder, torch.float32)
        if dtype == "float32":
            self._encoder = full
        else:
            brief = load_encoder(folder, torch.bfloat16)
            self._encoder = brief if dtype == "bfloat16" or _is_better(brief, full) else full
        self.dtype = "bfloat16" if self._encoder is not full else "float32"

    def sentence_vectors(self, ids: Tokens, mask: Tokens) -> Vectors:
        with torch.inference_mode():
            attends = None if mask.all() else torch.from_numpy(mask).bool()
            vectors: Vectors = self._encoder.sentence_vectors(torch.from_numpy(ids), attends).numpy()
        return vectors


def load_encoder(folder: Path, dtype: torch.dtype) -> BertEncoder:
    weights = load_file(folder / "model.safetensors")
    return BertEncoder(
        BertConfig.read(folder),
        {name: weight.to(dtype) for name, weight in weights.items() if weight.is_floating_point()},
    )


def _is_better(brief: BertEncoder, full: BertEncoder) -> bool:
    """Whether `brief` gives `full`'s vectors in less time, over short and long probes."""
    seconds = {brief: 0.0, full: 0.0}
    with torch.inference_mode():
        for tokens in _PROBE_TOKENS:
            # Any tokens will do: 1,996 is the first word after the vocabulary's single characters.
            ids = torch.arange(1996, 1996 + 40 * tokens, 40)[None]
            cosine = (brief.sentence_vectors(ids, None) * full.sentence_vectors(ids, None)).sum().item()
            if cosine < MIN_COSINE:
                return False
            for encoder in seconds:
                seconds[encoder] += min(_timed(encoder, ids) for _ in range(_PROBE_ROUNDS))
    return seconds[brief] < seconds[full]


def _timed(encoder: BertEncoder, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    encoder.sentence_vectors(ids, None)
    return time.perf_counter() - start
