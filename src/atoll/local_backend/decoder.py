"""The forward pass of Llama-shaped models (Llama, Mistral, Qwen2, Qwen3; SmolLM2 is one), written for serving.

Same mathematics and same checkpoint as transformers' `modeling_llama.py`, `modeling_qwen2.py` and `modeling_qwen3.py`,
with which the tests compare it. Written anew because it starts in a second instead of four (transformers need not be
imported), runs a step with half the operators (fused projections, fused norms, rotations looked up), and because
attention reads our slabs of keys and values in place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as functional

from atoll.errors import EngineError
from atoll.local_backend.batch import Batch

_MODEL_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3"})


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a model, from its `config.json`."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    context_tokens: int
    norm_epsilon: float
    rope: Mapping[str, Any]
    is_tied: bool

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DecoderConfig:
        heads = data["num_attention_heads"]
        return cls(
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            layers=data["num_hidden_layers"],
            heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_size=data.get("head_dim") or data["hidden_size"] // heads,
            context_tokens=data.get("max_position_embeddings", 2048),
            norm_epsilon=data.get("rms_norm_eps", 1e-6),
            rope=_rope(data),
            is_tied=bool(data.get("tie_word_embeddings", False)),
        )


def is_supported(data: Mapping[str, Any]) -> bool:
    """Whether `Decoder` computes the model of this `config.json`."""
    windowed = data.get("sliding_window") and data.get("use_sliding_window", data.get("model_type") == "mistral")
    return (
        data.get("model_type") in _MODEL_TYPES
        and data.get("hidden_act", "silu") == "silu"
        and _rope(data).get("rope_type", "default") in _ROPE_TYPES
        and not windowed
        and not data.get("quantization_config")
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer. `qkv` and `gate_up` are several projections in one matrix."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """A model that is ready to run. `forward` may be called by one thread at a time."""

    def __init__(self, config: DecoderConfig, weights: dict[str, torch.Tensor]) -> None:
        """Takes the tensors out of `weights`, named as in a Hugging Face checkpoint, all of one dtype and device."""
        self.config = config
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._layers = [_take_layer(weights, f"model.layers.{index}") for index in range(config.layers)]
        self._norm = weights.pop("model.norm.weight")
        head = weights.pop("lm_head.weight", None)
        self._head = self._embedding if config.is_tied or head is None else head
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._cos, self._sin = _rotations(config, self.dtype, self.device)
        self._scale = config.head_size**-0.5

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Read a Hugging Face folder. Raises EngineError if its weights are missing or not of this shape."""
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        try:
            return cls(DecoderConfig.from_json(data), _read_weights(folder, dtype, device))
        except KeyError as error:
            raise EngineError(f"{folder}: the checkpoint has no {error.args[0]!r}") from None

    @property
    def parameters(self) -> int:
        """How many weights a token is multiplied with."""
        per_layer = sum(part.numel() for part in (self._layers[0].qkv, self._layers[0].out)) + sum(
            part.numel() for part in (self._layers[0].gate_up, self._layers[0].down)
        )
        return per_layer * len(self._layers) + self._head.numel()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states after the last norm, shape (tokens, hidden size). Fills the rows of `batch`."""
        config = self.config
        hidden = functional.embedding(batch.token_ids, self._embedding)
        cos, sin = self._cos[batch.positions][:, None], self._sin[batch.positions][:, None]
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(hidden, (config.hidden_size,), layer.input_norm, config.norm_epsilon)
            hidden = hidden + self._attention(index, layer, normed, cos, sin, batch)
            normed = functional.rms_norm(hidden, (config.hidden_size,), layer.mlp_norm, config.norm_epsilon)
            gate, up = functional.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        batch.finish()
        return functional.rms_norm(hidden, (config.hidden_size,), self._norm, config.norm_epsilon)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token to come next, shape (…, vocabulary)."""
        return functional.linear(hidden, self._head)

    def _attention(
        self, index: int, layer: _Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
        mixed = functional.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, size)
        turning, value = mixed[:, : heads + kv_heads], mixed[:, heads + kv_heads :]
        if layer.query_norm is not None:
            query = functional.rms_norm(turning[:, :heads], (size,), layer.query_norm, config.norm_epsilon)
            key = functional.rms_norm(turning[:, heads:], (size,), layer.key_norm, config.norm_epsilon)
            turning = torch.cat((query, key), dim=1)
        turned = turning * cos
        half = size // 2
        turned[..., :half].addcmul_(turning[..., half:], sin[..., :half], value=-1)
        turned[..., half:].addcmul_(turning[..., :half], sin[..., half:])
        attended = batch.attend(index, turned[:, :heads], turned[:, heads:], value, self._scale)
        return functional.linear(attended.reshape(-1, heads * size), layer.out, layer.out_bias)


def _take_layer(weights: dict[str, torch.Tensor], prefix: str) -> _Layer:
    def fused(*names: str, kind: str) -> torch.Tensor | None:
        parts = [weights.pop(f"{prefix}.{name}.{kind}", None) for name in names]
        present = [part for part in parts if part is not None]
        if not present and kind == "bias":
            return None
        if len(present) != len(names):
            raise KeyError(f"{prefix}.{names[0]}.{kind}")
        return torch.cat(present) if len(present) > 1 else present[0]

    def needed(*names: str) -> torch.Tensor:
        weight = fused(*names, kind="weight")
        assert weight is not None
        return weight

    attention, mlp = "self_attn", "mlp"
    qkv = tuple(f"{attention}.{part}_proj" for part in "qkv")
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    return _Layer(
        input_norm=needed("input_layernorm"),
        qkv=needed(*qkv),
        qkv_bias=fused(*qkv, kind="bias"),
        query_norm=weights.pop(f"{prefix}.{attention}.q_norm.weight", None),
        key_norm=weights.pop(f"{prefix}.{attention}.k_norm.weight", None),
        out=needed(f"{attention}.o_proj"),
        out_bias=fused(f"{attention}.o_proj", kind="bias"),
        mlp_norm=needed("post_attention_layernorm"),
        gate_up=needed(*gate_up),
        gate_up_bias=fused(*gate_up, kind="bias"),
        down=needed(f"{mlp}.down_proj"),
        down_bias=fused(f"{mlp}.down_proj", kind="bias"),
    )


def _read_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder}: no *.safetensors; save the model there with model.save_pretrained()")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            loaded = load_file(str(file), device=str(device))
        except SafetensorError as error:
            raise EngineError(f"{file}: cannot be read ({error}); get the file anew") from None
        weights.update((name, tensor.to(dtype)) for name, tensor in loaded.items())
    return weights


def _rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of new checkpoints, `rope_theta` and `rope_scaling` of older ones."""
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", data.get("rope_theta", 10_000.0))
    return rope


def _rotations(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for every position, each of shape (context tokens, head size), computed in float32."""
    size = config.head_size
    frequencies = 1.0 / (config.rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if config.rope["rope_type"] == "linear":
        frequencies = frequencies / config.rope["factor"]
    elif config.rope["rope_type"] == "llama3":
        frequencies = _llama3_frequencies(frequencies, config.rope)
    angles = torch.outer(torch.arange(config.context_tokens, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


def _llama3_frequencies(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's rescaling: slow rotations are stretched by `factor`, fast ones kept, those between interpolated."""
    old_context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = old_context * frequencies / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    rescaled: torch.Tensor = frequencies * (share_kept + (1 - share_kept) / factor)
    return rescaled
