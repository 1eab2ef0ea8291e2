"""BERT's encoder in plain torch, for MiniLM: what transformers' `BertModel` computes, without importing transformers.

Devlin et al. 2018; weights named as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, scaled_dot_product_attention

from atoll.routers.embedding.bert_config import BertConfig


class BertEncoder:
    """Sentence vectors of token ids. Holds its weights in the dtype they are given in."""

    def __init__(self, config: BertConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = dict(weights)
        self._query_key_value = [self._fused(layer) for layer in range(config.num_hidden_layers)]

    def sentence_vectors(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Mean of the last hidden states at unit length, float32 of shape (n, hidden_size).

        `ids` has shape (n, tokens), special tokens included; `mask`, boolean of that shape, is False at padding, None
        where there is none.
        """
        hidden = self.hidden_states(ids, mask).float()
        mean = hidden.mean(1) if mask is None else (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return normalize(mean, dim=1)

    def hidden_states(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        weights = self._weights
        hidden = weights["embeddings.word_embeddings.weight"][ids]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        hidden = hidden + weights["embeddings.token_type_embeddings.weight"][0]
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        attention_mask = None if mask is None else mask[:, None, None, :]
        for layer in range(self._config.num_hidden_layers):
            hidden = self._layer(hidden, attention_mask, layer)
        return hidden

    def _layer(self, hidden: Tensor, mask: Tensor | None, layer: int) -> Tensor:
        name = f"encoder.layer.{layer}"
        attended = self._linear(self._attend(hidden, mask, layer), f"{name}.attention.output.dense")
        hidden = self._norm(attended + hidden, f"{name}.attention.output.LayerNorm")
        inner = gelu(self._linear(hidden, f"{name}.intermediate.dense"))
        return self._norm(self._linear(inner, f"{name}.output.dense") + hidden, f"{name}.output.LayerNorm")

    def _attend(self, hidden: Tensor, mask: Tensor | None, layer: int) -> Tensor:
        n, tokens, width = hidden.shape
        heads = self._config.num_attention_heads
        projected = linear(hidden, *self._query_key_value[layer])
        query, key, value = projected.view(n, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1 / math.sqrt(width // heads))
        return mixed.transpose(1, 2).reshape(n, tokens, width)

    def _fused(self, layer: int) -> tuple[Tensor, Tensor]:
        """Query, key and value projections as one matrix."""
        names = [f"encoder.layer.{layer}.attention.self.{part}" for part in ("query", "key", "value")]
        return (
            torch.cat([self._weights.pop(f"{name}.weight") for name in names]),
            torch.cat([self._weights.pop(f"{name}.bias") for name in names]),
        )

    def _linear(self, hidden: Tensor, name: str) -> Tensor:
        return linear(hidden, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return layer_norm(
            hidden,
            (self._config.hidden_size,),
            self._weights[f"{name}.weight"],
            self._weights[f"{name}.bias"],
            self._config.layer_norm_eps,
        )
