"""MiniLM with int8 weights in ONNX Runtime: the fast choice where a processor has no bfloat16.

Weights are rounded per output channel, activations at run time (onnxruntime's dynamic quantisation).
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from atoll.errors import ConfigError, MissingExtraError
from atoll.routers.embedding.base import Vectors
from atoll.routers.embedding.bert_config import BertConfig
from atoll.routers.embedding.minilm import WEIGHTS_DISTRIBUTION, Backend, Tokens

DEFAULT_CACHE = Path("~/.cache/atoll")
_RECIPE = "v1"
"""Of graph and rounding: a new one makes a new file and a new space."""


class OnnxBackend(Backend):
    """Makes the int8 form in `cache_dir` when it is not there, which takes some seconds."""

    space = f"minilm-int8-384-{_RECIPE}"

    def __init__(self, folder: Path, cache_dir: Path | None, threads: int | None) -> None:
        for package in ("onnx", "onnxruntime"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtraError("the int8 MiniLM embedder", "onnx")
        self._session = _session(_int8_file(folder, cache_dir or DEFAULT_CACHE.expanduser()), threads)

    def sentence_vectors(self, ids: Tokens, mask: Tokens) -> Vectors:
        # One text at a time: activations are rounded by the range of the whole input, so a batch would make a text's
        # vector depend on its neighbours; and batches are no faster here.
        rows = [
            self._session.run(None, {"ids": ids[row : row + 1, :length], "mask": mask[row : row + 1, :length]})[0]
            for row, length in enumerate(mask.sum(axis=1))
        ]
        return np.concatenate(rows)


def _session(file: Path, threads: int | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _int8_file(folder: Path, cache_dir: Path) -> Path:
    file = cache_dir / f"minilm-int8-{version(WEIGHTS_DISTRIBUTION)}-{_RECIPE}.onnx"
    if file.exists():
        return file
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            rounded = _write_int8(folder, Path(scratch))
            rounded.chmod(0o644)
            os.replace(rounded, file)  # noqa: PTH105 - atomic, so that several workers may make it at once
    except OSError as error:
        raise ConfigError(
            f"the int8 MiniLM embedder keeps its weights in {str(cache_dir)!r}, which cannot be written ({error}); "
            "set data_dir to a folder that can, or choose another dtype"
        ) from error
    return file


def _write_int8(folder: Path, scratch: Path) -> Path:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from atoll.routers.embedding.bert_onnx import sentence_vector_graph

    full, rounded = scratch / "float32.onnx", scratch / "int8.onnx"
    model = sentence_vector_graph(BertConfig.read(folder), load_file(folder / "model.safetensors"))
    # Without this mark onnxruntime warns that the graph was not simplified first, which ours needs not.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    onnx.save(model, full)
    quantize_dynamic(full, rounded, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8)
    return rounded
