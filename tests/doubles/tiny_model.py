"""A random model that answers in no time: a Hugging Face folder of half a megabyte with a byte-level tokenizer.

Every byte is a token (and `Hi` is one), so its answers are random bytes, whole characters and cut ones. Nothing is
downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_END = 2
"""The id of `<|im_end|>`."""
TINY_VOCAB = 256 + len(TINY_SPECIAL) + 1
"""Every byte, the special tokens, and one merged token, `Hi`."""


def tiny_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A `config.json` of any Llama-shaped model type."""
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [names.get(model_type, "LlamaForCausalLM")],
        "model_type": model_type,
        "vocab_size": TINY_VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": TINY_END,
        "bos_token_id": 1,
    } | changes


def write_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write config, random weights, tokenizer and chat template into `folder`; returns it."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, shape, generator) for name, shape in _shapes(config).items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*TINY_SPECIAL, *alphabet, "Hi"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("H", "i")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in TINY_SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    (folder / "chat_template.jinja").write_text(TINY_TEMPLATE)


def _random(name: str, shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    if "norm" in name:
        return torch.rand(shape, generator=generator) + 0.5
    if "embed" in name or "lm_head" in name:
        return torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * 0.3


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen2":
            layer |= {f"self_attn.{part}_proj.bias": (query if part == "q" else key,) for part in "qkv"}
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
