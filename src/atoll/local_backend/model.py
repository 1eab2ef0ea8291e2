"""What the engine needs of a model, and which of our two ways to run it fits a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from atoll.errors import EngineError

if TYPE_CHECKING:
    import torch

    from atoll.local_backend.batch import Batch


class ModelShape(Protocol):
    """Sizes that the engine plans with."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...


class CausalModel(Protocol):
    """A loaded model. One thread at a time may call it."""

    @property
    def config(self) -> ModelShape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def parameters(self) -> int:
        """How many weights a token is multiplied with."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states after the last norm, shape (tokens, hidden size). Fills the rows of `batch` and finishes it."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token to come next, shape (…, vocabulary)."""


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> CausalModel:
    """Read a Hugging Face folder: Llama-shaped models into our own decoder, others through transformers' model code.

    Raises EngineError if it cannot be read or served.
    """
    from atoll.local_backend import decoder

    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if decoder.is_supported(data):
        return decoder.Decoder.load(folder, dtype, device)
    from atoll.local_backend.transformers_model import TransformersModel

    return TransformersModel.load(folder, dtype, device)
