"""Any other causal language model of transformers, run with its own code but our attention over slabs.

transformers lets a model's attention be replaced by name (its `AttentionInterface`). Ours ignores masks and caches: who
attends to what, and where keys and values are kept, is in the batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from atoll.errors import EngineError, MissingExtraError
from atoll.local_backend.batch import Batch, Span
from atoll.local_backend.kv_slabs import KVSlabs

_ATTENTION: Final = "atoll_slabs"
_CHANGES_LOGITS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of models that do more to their logits than multiply with the head; not supported."""
_CHANGES_ATTENTION: Final = ("attn_logit_softcapping",)

_current = threading.local()
"""`_current.batch` is what the running forward pass of this thread computes."""


@dataclass(frozen=True, slots=True)
class _Shape:
    vocab_size: int
    hidden_size: int
    layers: int
    kv_heads: int
    head_size: int
    context_tokens: int


class TransformersModel:
    """A `CausalModel` around a transformers model. A model with a sliding window gets that window as its context."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model.eval()
        self._backbone = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self._head = model.get_output_embeddings()
        self.config = _shape_of(model.config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        _refuse(model.config, folder)
        self._try(folder)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> TransformersModel:
        """Read a Hugging Face folder; code that comes with a checkpoint is never run."""
        try:
            from transformers import AttentionInterface, AutoModelForCausalLM
        except ImportError:
            raise MissingExtraError(f"The model in {folder} (package 'transformers')", "local") from None
        AttentionInterface.register(_ATTENTION, _attend)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise EngineError(f"{folder}: transformers cannot load this model ({error})") from None
        return cls(model.to(device), folder)

    @property
    def parameters(self) -> int:
        count: int = self._model.num_parameters()
        return count

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        _current.batch = batch
        try:
            output = self._backbone(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
            )
        finally:
            _current.batch = None
        batch.finish()
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self._head(hidden)
        return scores

    def _try(self, folder: Path) -> None:
        """Two tokens, one after the other: what does not fit together shows now, not in a request."""
        shape = self.config
        slabs = KVSlabs(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            dtype=self.dtype,
            device=self.device,
            context_tokens=2,
            budget_tokens=2,
        )
        row = slabs.allocate(2)
        assert row is not None
        try:
            for token_id in (0, 1):
                batch = Batch([Span(row, [token_id])], device=self.device, dtype=self.dtype)
                scores = self.logits(self.forward(batch))
        except Exception as error:
            raise EngineError(f"{folder}: this model cannot be served ({type(error).__name__}: {error})") from error
        if not bool(torch.isfinite(scores).all()):
            raise EngineError(f"{folder}: this model computes no numbers in {self.dtype}; set `dtype: float32`")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: `query` has shape (1, heads, tokens, head size), the result (1, tokens, heads, size)."""
    batch: Batch = _current.batch
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    attended = batch.attend(layer, query, key, value, scale)
    return attended[None], None


def _shape_of(config: Any) -> _Shape:
    text = config.get_text_config()
    heads = text.num_attention_heads
    contexts = [getattr(text, "max_position_embeddings", None) or 2048, getattr(text, "sliding_window", None)]
    return _Shape(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        context_tokens=min(context for context in contexts if context),
    )


def _refuse(config: Any, folder: Path) -> None:
    text = config.get_text_config()
    for name in (*_CHANGES_LOGITS, *_CHANGES_ATTENTION):
        if getattr(text, name, None) not in (None, 1.0, 1):
            raise EngineError(f"{folder}: models of type {text.model_type!r} with {name!r} are not supported")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise EngineError(f"{folder}: layers of type {', '.join(sorted(kinds))} are not supported, only attention")
