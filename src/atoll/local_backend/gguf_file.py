"""Turning a GGUF file into a Hugging Face folder: bf16 safetensors, config, tokenizer and chat template.

llama.cpp renames tensors and, for the `llama` architecture, reorders the rows of the query and key projections so that
the two halves of a rotation stand side by side; here both are undone. Sources: llama.cpp `convert_hf_to_gguf.py`
(`LlamaModel.permute`), `docs/gguf.md`, and its pre-tokenizer expressions in `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from atoll.errors import EngineError

if TYPE_CHECKING:
    import torch

_TENSOR_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NOT_WEIGHTS: Final = frozenset({"rope_freqs"})
"""Tensors that hold constants which the config implies."""
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    "default": (_GPT2_SPLIT,),
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama3": (_LLAMA3_SPLIT,),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "llama-v3": (_LLAMA3_SPLIT,),
    "qwen2": (_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),),
}
"""How text is cut before byte pairs are merged, by llama.cpp's name; later expressions cut the pieces of earlier ones.

`smollm` cuts every digit off first, as the model was trained. transformers' GGUF loader does not, so it reads runs of
spaces before a digit differently.
"""
_TOKEN_CONTROL: Final = 3
_TOKEN_USER_DEFINED: Final = 4
_END_OF_ANSWER: Final = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end an answer whatever the file calls its EOS, as in llama.cpp."""


def convert_gguf(source: Path, folder: Path) -> None:
    """Write `source` into the existing, empty `folder` as a Hugging Face checkpoint.

    Raises EngineError if the file is no GGUF file, or of an architecture or tokenizer that is not supported.
    """
    model = _read(source)
    _write_json(folder / "config.json", _model_config(model))
    _write_tokenizer(model, folder)
    _write_weights(model, folder / "model.safetensors")


@dataclass(frozen=True, slots=True)
class _GGUF:
    source: Path
    fields: Mapping[str, Any]
    tensors: list[Any]

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"])

    def of_model(self, name: str, default: Any = None) -> Any:
        """A field of the architecture: `llama.block_count` for `block_count`."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def of_tokenizer(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"tokenizer.ggml.{name}", default)


def _read(source: Path) -> _GGUF:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise EngineError(f"{source}: not a readable GGUF file ({error})") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise EngineError(
            f"{source}: GGUF files of architecture {architecture!r} are not supported, only "
            f"{', '.join(_ARCHITECTURES)}. Name a folder with the model's Hugging Face checkpoint instead"
        )
    return _GGUF(source, fields, list(reader.tensors))


def _model_config(model: _GGUF) -> dict[str, Any]:
    heads = model.of_model("attention.head_count")
    hidden = model.of_model("embedding_length")
    names = {tensor.name for tensor in model.tensors}
    return {
        "architectures": [_ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "vocab_size": len(model.of_tokenizer("tokens")),
        "hidden_size": hidden,
        "intermediate_size": model.of_model("feed_forward_length"),
        "num_hidden_layers": model.of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.of_model("attention.head_count_kv", heads),
        "head_dim": model.of_model("attention.key_length", hidden // heads),
        "max_position_embeddings": model.of_model("context_length"),
        "rms_norm_eps": model.of_model("attention.layer_norm_rms_epsilon"),
        "rope_theta": model.of_model("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(model),
        "hidden_act": "silu",
        "attention_bias": model.architecture == "llama" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": model.of_tokenizer("bos_token_id"),
        "eos_token_id": model.of_tokenizer("eos_token_id"),
        "pad_token_id": model.of_tokenizer("padding_token_id"),
        "dtype": "bfloat16",
    }


def _rope_scaling(model: _GGUF) -> dict[str, Any] | None:
    """Only what a GGUF file states in numbers; Llama 3.1's factors live in a tensor and cannot be read back."""
    kind = model.of_model("rope.scaling.type")
    if any(tensor.name == "rope_freqs.weight" for tensor in model.tensors):
        raise EngineError(
            f"{model.source}: its rotary frequencies are rescaled (rope_freqs), which is not supported from GGUF. "
            "Name a folder with the model's Hugging Face checkpoint instead"
        )
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise EngineError(f"{model.source}: rope scaling {kind!r} is not supported from GGUF, only 'linear'")
    return {"rope_type": "linear", "factor": model.of_model("rope.scaling.factor", 1.0)}


def _write_weights(model: _GGUF, path: Path) -> None:
    from safetensors.torch import save_file

    heads = model.of_model("attention.head_count")
    key_heads = model.of_model("attention.head_count_kv", heads)
    weights: dict[str, torch.Tensor] = {}
    for tensor in model.tensors:
        stem = tensor.name.removesuffix(".weight").removesuffix(".bias")
        if stem in _NOT_WEIGHTS:
            continue
        value = _dequantise(tensor)
        if model.architecture == "llama" and stem.endswith((".attn_q", ".attn_k")):
            value = _unpermute(value, heads if stem.endswith("_q") else key_heads)
        weights[_tensor_name(tensor.name, model.source)] = value
    save_file(weights, str(path), metadata={"format": "pt"})


def _tensor_name(name: str, source: Path) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if layer and layer[2] in _TENSOR_NAMES:
        return f"model.layers.{layer[1]}.{_TENSOR_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    if not layer and stem in _TENSOR_NAMES:
        return f"{_TENSOR_NAMES[stem]}.{kind}"
    raise EngineError(f"{source}: no place is known for its tensor {name!r}; name a Hugging Face folder instead")


def _dequantise(tensor: Any) -> torch.Tensor:
    import torch
    from gguf import dequantize

    values = np.require(
        dequantize(tensor.data, tensor.tensor_type), requirements="W"
    )  # torch wants to be able to write
    return torch.from_numpy(values).to(torch.bfloat16)


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from llama.cpp's pairs (x0 y0 x1 y1 …) back to halves (x0 x1 … y0 y1 …), for each head; biases too."""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _write_tokenizer(model: _GGUF, folder: Path) -> None:
    kind = model.of_tokenizer("model")
    builder = {"gpt2": _byte_level_tokenizer}.get(kind, _tokenizer_of_transformers)
    tokenizer = builder(model)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = model.of_tokenizer("tokens")
    special = {
        name: tokens[token_id]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (token_id := model.of_tokenizer(f"{key}_token_id")) is not None
    }
    _write_json(folder / "tokenizer_config.json", special)
    _write_json(folder / "generation_config.json", {"eos_token_id": _end_ids(model)})
    template = model.fields.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _end_ids(model: _GGUF) -> list[int]:
    tokens, kinds = model.of_tokenizer("tokens"), model.of_tokenizer("token_type", [])
    ids = {tokens.index(token) for token in _END_OF_ANSWER if token in tokens}
    ids = {token_id for token_id in ids if not kinds or kinds[token_id] == _TOKEN_CONTROL}
    named = (model.of_tokenizer("eos_token_id"), model.of_tokenizer("eot_token_id"))
    return sorted(ids | {token_id for token_id in named if token_id is not None})


def _byte_level_tokenizer(model: _GGUF) -> Any:
    """Byte-level BPE with llama.cpp's splits, and its control tokens kept whole."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = model.of_tokenizer("tokens")
    merges = [tuple(merge.split(" ")) for merge in model.of_tokenizer("merges")]
    name = model.of_tokenizer("pre", "default")
    if name not in _SPLITS:
        raise EngineError(
            f"{model.source}: its pre-tokenizer {name!r} is not supported, only {', '.join(_SPLITS)}. "
            "Name a folder with the model's Hugging Face checkpoint instead"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name.startswith("llama")))
    except Exception as error:  # tokenizers raises nothing more specific
        raise EngineError(f"{model.source}: its vocabulary and merges do not fit together ({error})") from None
    cuts: list[Any] = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in _SPLITS[name]]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, model, tokens)
    if model.of_tokenizer("add_bos_token", False):
        _prepend_token(tokenizer, tokens, model.of_tokenizer("bos_token_id"))
    return tokenizer


def _add_tokens(tokenizer: Any, model: _GGUF, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    kinds = model.of_tokenizer("token_type", [])
    add: dict[int, Callable[[list[Any]], Any]] = {
        _TOKEN_CONTROL: tokenizer.add_special_tokens,
        _TOKEN_USER_DEFINED: tokenizer.add_tokens,
    }
    for kind, method in add.items():
        is_special = kind == _TOKEN_CONTROL
        chosen = [token for token, token_kind in zip(tokens, kinds, strict=False) if token_kind == kind]
        method([AddedToken(token, normalized=False, special=is_special) for token in chosen])


def _prepend_token(tokenizer: Any, tokens: list[str], token_id: int | None) -> None:
    from tokenizers import processors

    if token_id is not None:
        token = tokens[token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
        )


def _tokenizer_of_transformers(model: _GGUF) -> Any:
    """Every other kind of vocabulary (sentencepiece, say), as transformers reads it."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model.source.parent), gguf_file=model.source.name)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise EngineError(f"{model.source}: its tokenizer cannot be read ({error})") from None
    return tokenizer.backend_tokenizer


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(
        json.dumps({key: value for key, value in data.items() if value is not None}, indent=1), encoding="utf-8"
    )
