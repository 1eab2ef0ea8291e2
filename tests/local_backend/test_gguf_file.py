"""Conversion of GGUF files, checked against what went into them and against transformers' own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.errors import EngineError
from atoll.local_backend.checkpoint import EMBEDDED_MODEL, locate
from atoll.local_backend.codec import Codec
from atoll.local_backend.decoder import Decoder
from atoll.local_backend.gguf_file import convert_gguf
from doubles.gguf_writer import write_gguf
from doubles.tiny_model import write_tiny_model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_come_back_in_their_places(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    model = write_tiny_model(tmp_path / "model", model_type=architecture, tie_word_embeddings=is_tied)
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(model, tmp_path / "m.gguf", architecture), tmp_path / "out")
    original, converted = (load_file(str(folder / "model.safetensors")) for folder in (model, tmp_path / "out"))
    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(converted[name], tensor.to(torch.bfloat16)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = json.loads((model / "config.json").read_text())
    assert {name: config[name] for name in wanted if name in config and name != "bos_token_id"} == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in wanted.items()
        if name in config and name != "bos_token_id"
    }


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out")
    theirs, ours = Codec.load(model), Codec.load(tmp_path / "out")
    text = ours.render([{"role": "user", "content": "Hello 👋"}])
    assert ours.encode(text) == theirs.encode(text)
    assert ours.end_ids == {0, 2}  # <|endoftext|> is a control token that ends an answer, too


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"pre": "made-up"}, "pre-tokenizer 'made-up'"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
    ],
)
def test_what_is_not_supported_is_told(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    with pytest.raises(EngineError, match=told):
        convert_gguf(write_gguf(model, tmp_path / "m.gguf", **changes), tmp_path / "out")


def test_a_file_that_is_no_gguf_is_told(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"not a model" * 100)
    with pytest.raises(EngineError, match="not a readable GGUF"):
        convert_gguf(source, tmp_path)


@pytest.mark.slow
def test_the_embedded_model_is_what_transformers_reads(smol_folder: Path, smol_codec: Codec) -> None:
    """Weights bit for bit (rounded to bfloat16), tokens, and logits in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from atoll.local_backend.batch import Batch, Span
    from atoll.local_backend.kv_slabs import KVSlabs

    source = locate(EMBEDDED_MODEL)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=reference)["tensors"]
    ours = load_file(str(smol_folder / "model.safetensors"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    text = "The year 2024: naïve “quotes”, def f(x):\n    return x**2  # 日本語 👋🏽"
    assert smol_codec.encode(text) == tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "Hi"}]
    assert smol_codec.render(messages) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )

    reference.load_state_dict({name: tensor.float() for name, tensor in ours.items()}, strict=False)
    ids = smol_codec.encode(smol_codec.render(messages) + text)
    decoder = Decoder.load(smol_folder, torch.float32, torch.device("cpu"))
    shape = decoder.config
    slabs = KVSlabs(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        context_tokens=1024,
        budget_tokens=4096,
    )
    row = slabs.allocate(len(ids))
    assert row is not None
    batch = Batch([Span(row, ids, wants_every_logit=True)], device=decoder.device, dtype=decoder.dtype)
    logits = decoder.logits(decoder.forward(batch)[batch.logit_places])[: batch.logit_count]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
