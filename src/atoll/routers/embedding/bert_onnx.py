"""BERT's encoder as an ONNX graph that gives sentence vectors: `bert.py`, written down node by node.

Built by hand, so that no exporter and no torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from atoll.routers.embedding.bert_config import BertConfig

Weights = Mapping[str, npt.NDArray[np.float32]]
OPSET = 17
_IR_VERSION = 9
_MASKED = -1e9
"""Added to the attention scores of padding."""


def sentence_vector_graph(config: BertConfig, weights: Weights) -> Any:
    """A model with inputs `ids` and `mask`, int64 of shape (n, tokens), and the output `vectors`, (n, hidden_size)."""
    graph = _Graph(config, weights)
    graph.pool(graph.encode())
    shape = ("n", "tokens")
    proto = helper.make_graph(
        graph.nodes,
        "sentence_vectors",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ("n", config.hidden_size))],
        graph.constants,
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    return model


class _Graph:
    """Collects nodes. Every method takes and gives names of values."""

    def __init__(self, config: BertConfig, weights: Weights) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._config = config
        self._weights = weights

    def encode(self) -> str:
        hidden = self._embeddings()
        padding = self._op("Sub", self._float(1), self._op("Cast", "mask", to=TensorProto.FLOAT))
        bias = self._op("Unsqueeze", self._op("Mul", padding, self._float(_MASKED)), self._ints(1, 2))
        for layer in range(self._config.num_hidden_layers):
            hidden = self._layer(hidden, bias, f"encoder.layer.{layer}")
        return hidden

    def pool(self, hidden: str) -> None:
        """The mean over the tokens that are no padding, at unit length."""
        shares = self._op("Unsqueeze", self._op("Cast", "mask", to=TensorProto.FLOAT), self._ints(2))
        # Dividing by their number would be undone by the next step.
        total = self._op("ReduceSum", self._op("Mul", hidden, shares), self._ints(1), keepdims=0)
        self._op("LpNormalization", total, axis=1, p=2, output="vectors")

    def _embeddings(self) -> str:
        words = self._op("Gather", self._weight("embeddings.word_embeddings.weight"), "ids")
        tokens = self._op("Gather", self._op("Shape", "ids"), self._ints(1))
        positions = self._weight("embeddings.position_embeddings.weight")
        here = self._op("Slice", positions, self._ints(0), tokens, self._ints(0))
        first_type = self._constant(self._weights["embeddings.token_type_embeddings.weight"][0])
        return self._norm(self._op("Add", self._op("Add", words, here), first_type), "embeddings.LayerNorm")

    def _layer(self, hidden: str, bias: str, name: str) -> str:
        attended = self._linear(self._attend(hidden, bias, f"{name}.attention.self"), f"{name}.attention.output.dense")
        hidden = self._norm(self._op("Add", attended, hidden), f"{name}.attention.output.LayerNorm")
        inner = self._gelu(self._linear(hidden, f"{name}.intermediate.dense"))
        outer = self._op("Add", self._linear(inner, f"{name}.output.dense"), hidden)
        return self._norm(outer, f"{name}.output.LayerNorm")

    def _attend(self, hidden: str, bias: str, name: str) -> str:
        query, key, value = (self._heads(self._linear(hidden, f"{name}.{part}")) for part in ("query", "key", "value"))
        width = self._config.hidden_size // self._config.num_attention_heads
        scores = self._op("MatMul", query, self._op("Transpose", key, perm=(0, 1, 3, 2)))
        scores = self._op("Add", self._op("Mul", scores, self._float(1 / math.sqrt(width))), bias)
        mixed = self._op("MatMul", self._op("Softmax", scores, axis=-1), value)
        return self._op(
            "Reshape", self._op("Transpose", mixed, perm=(0, 2, 1, 3)), self._ints(0, 0, self._config.hidden_size)
        )

    def _heads(self, projected: str) -> str:
        """(n, tokens, width) to (n, heads, tokens, width / heads)."""
        heads = self._config.num_attention_heads
        split = self._op("Reshape", projected, self._ints(0, 0, heads, self._config.hidden_size // heads))
        return self._op("Transpose", split, perm=(0, 2, 1, 3))

    def _gelu(self, inner: str) -> str:
        error = self._op("Erf", self._op("Div", inner, self._float(math.sqrt(2))))
        return self._op("Mul", self._op("Mul", inner, self._op("Add", error, self._float(1))), self._float(0.5))

    def _linear(self, hidden: str, name: str) -> str:
        product = self._op("MatMul", hidden, self._constant(self._weights[f"{name}.weight"].T))
        return self._op("Add", product, self._weight(f"{name}.bias"))

    def _norm(self, hidden: str, name: str) -> str:
        parts = (self._weight(f"{name}.weight"), self._weight(f"{name}.bias"))
        return self._op("LayerNormalization", hidden, *parts, axis=-1, epsilon=self._config.layer_norm_eps)

    def _weight(self, name: str) -> str:
        return self._constant(self._weights[name])

    def _float(self, value: float) -> str:
        return self._constant(np.array(value, dtype=np.float32))

    def _ints(self, *values: int) -> str:
        return self._constant(np.array(values, dtype=np.int64))

    def _constant(self, array: npt.NDArray[Any]) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _op(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        output = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"node_{len(self.nodes)}", **attributes))
        return output
