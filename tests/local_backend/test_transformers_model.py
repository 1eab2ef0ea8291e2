"""Models that are not Llama-shaped, through transformers' code with our attention."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import EngineError
from atoll.local_backend.codec import Codec
from atoll.local_backend.engine import GenerateRequest, Sampling
from atoll.local_backend.model import load_model
from atoll.local_backend.torch_engine import TorchEngine
from atoll.local_backend.transformers_model import TransformersModel
from doubles.tiny_model import TINY_VOCAB, write_tiny_tokenizer

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 128},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
}


def write_model(folder: Path, family: str, **changes: Any) -> Any:
    """Save a random model of any family; returns transformers' own model of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_answers_are_transformers_own(tmp_path: Path, family: str) -> None:
    reference = write_model(tmp_path, family, **FAMILIES[family])
    model = load_model(tmp_path, torch.float32, CPU)
    assert isinstance(model, TransformersModel)
    prompts = [[5 + number, 9, 30, *range(40, 60 + 7 * number)] for number in range(4)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=-1
        )
        expected.append(out[0, len(prompt) :].tolist())
    engine = TorchEngine(model, Codec.load(tmp_path), model_name=family)

    async def answer(prompt: list[int]) -> list[int]:
        request = GenerateRequest(
            prompt, max_tokens=12, sampling=Sampling(temperature=0), top_logprobs=0, ignore_end=True
        )
        return [token.token_id async for event in engine.generate(request) for token in event.tokens]

    assert await asyncio.gather(*(answer(prompt) for prompt in prompts)) == expected
    await engine.close()


def test_a_sliding_window_is_the_context(tmp_path: Path) -> None:
    write_model(tmp_path, "mistral", **FAMILIES["mistral"])
    assert load_model(tmp_path, torch.float32, CPU).config.context_tokens == 128


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 8}, "softcapping"),
        ("granite", {"num_key_value_heads": 2, "logits_scaling": 8.0}, "logits_scaling"),
        ("mamba", {"state_size": 4}, "not supported|cannot be served"),
    ],
)
def test_what_would_be_wrong_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], told: str) -> None:
    write_model(tmp_path, family, **changes)
    with pytest.raises(EngineError, match=told):
        load_model(tmp_path, torch.float32, CPU)


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    with pytest.raises(EngineError, match="transformers cannot load"):
        load_model(tmp_path, torch.float32, CPU)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json cannot be read"):
        load_model(tmp_path, torch.float32, CPU)
