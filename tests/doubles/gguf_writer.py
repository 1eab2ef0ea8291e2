"""Writing a tiny model's folder as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from doubles.tiny_model import TINY_SPECIAL, TINY_TEMPLATE

OUR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's converter."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(model: Path, target: Path, architecture: str = "llama", pre: str = "gpt-2", **fields: Any) -> Path:
    """A GGUF file of a tiny model's folder, as llama.cpp's converter would write it."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(target, architecture)
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in TINY_SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["H i"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TINY_TEMPLATE)
    for name, value in fields.items():
        writer.add_key_value(name.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name, tensor in load_file(str(model / "model.safetensors")).items():
        stem, _, kind = name.rpartition(".")
        layer = stem.removeprefix("model.layers.") if stem.startswith("model.layers.") else None
        array = tensor.numpy()
        if layer is not None:
            index, _, part = layer.partition(".")
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                array = llama_cpp_permute(array, heads if "q_proj" in part else key_heads)
            writer.add_tensor(f"blk.{index}.{OUR_NAMES[part]}.{kind}", array)
        else:
            writer.add_tensor(f"{OUR_NAMES[stem]}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
