"""Our forward pass against transformers' model code, on random models in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import EngineError
from atoll.local_backend.batch import Batch, Span
from atoll.local_backend.decoder import Decoder, is_supported
from atoll.local_backend.kv_slabs import KVSlabs, Row
from doubles.tiny_model import tiny_config, write_tiny_model

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3_ROPE},
    "no grouped heads": {"num_key_value_heads": 6},
}


def slabs_for(decoder: Decoder) -> KVSlabs:
    shape = decoder.config
    return KVSlabs(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=decoder.dtype,
        device=CPU,
        context_tokens=shape.context_tokens,
        budget_tokens=16_384,
    )


def run(decoder: Decoder, *parts: tuple[Row, list[int]]) -> torch.Tensor:
    """Logits after every token of every part, in order."""
    batch = Batch([Span(row, ids, wants_every_logit=True) for row, ids in parts], device=CPU, dtype=decoder.dtype)
    return decoder.logits(decoder.forward(batch)[batch.logit_places])[: batch.logit_count]


def taken(slabs: KVSlabs, tokens: int) -> Row:
    row = slabs.allocate(tokens)
    assert row is not None
    return row


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    """Our decoder and transformers' model of one checkpoint."""
    from transformers import AutoModelForCausalLM

    changes = VARIANTS[request.param]
    assert is_supported(tiny_config(**changes))
    folder = write_tiny_model(tmp_path_factory.mktemp("pair"), **changes)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Decoder.load(folder, torch.float32, CPU), reference


def expected_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def some_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def test_a_whole_prompt(pair: tuple[Decoder, Any]) -> None:
    decoder, reference = pair
    ids = some_ids(300, seed=1)
    logits = run(decoder, (taken(slabs_for(decoder), 300), ids))
    torch.testing.assert_close(logits, expected_logits(reference, ids), atol=2e-4, rtol=1e-4)


def test_any_way_of_cutting_and_mixing_gives_the_same(pair: tuple[Decoder, Any]) -> None:
    """Three sequences, in parts, side by side, moved to longer rows, and with a neighbour that leaves in between."""
    decoder, reference = pair
    slabs = slabs_for(decoder)
    texts = [some_ids(260, seed=2), some_ids(40, seed=3), some_ids(41, seed=4)]
    first, second, third = (taken(slabs, 40) for _ in texts)
    neighbour = taken(slabs, 10)
    got: list[list[torch.Tensor]] = [[], [], []]

    def step(*parts: tuple[int, int]) -> None:
        rows = (first, second, third)
        work = [(rows[which], texts[which][rows[which].used_tokens :][:count]) for which, count in parts]
        logits = run(decoder, *work)
        for (which, _), (_, ids) in zip(parts, work, strict=True):
            got[which].append(logits[: len(ids)])
            logits = logits[len(ids) :]

    run(decoder, (neighbour, [5, 6, 7]))
    step((0, 30))
    step((1, 20), (0, 1), (2, 39))
    slabs.free(neighbour)
    step((2, 1), (0, 1), (1, 1))
    step((1, 1), (0, 200))
    slabs.free(third)  # the last row of a slab stays where it is, one before it is filled
    assert slabs.grow(first, 300)
    while first.used_tokens < 260:
        step(*([(1, 1), (0, 1)] if second.used_tokens < 40 else [(0, 1)]))
    for which, ids in enumerate(texts):
        logits = torch.cat(got[which])
        expected = expected_logits(reference, ids[: len(logits)])
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


def test_single_tokens_of_some_rows_leave_the_others_alone(pair: tuple[Decoder, Any]) -> None:
    decoder, reference = pair
    slabs = slabs_for(decoder)
    texts = [some_ids(20, seed=place) for place in range(4)]
    rows = [taken(slabs, 20) for _ in texts]
    run(decoder, *((row, ids[:10]) for row, ids in zip(rows, texts, strict=True)))
    run(decoder, (rows[3], texts[3][10:11]), (rows[1], texts[1][10:11]))
    logits = run(decoder, *((row, ids[row.used_tokens :][:1]) for row, ids in zip(rows, texts, strict=True)))
    for place, length in enumerate([11, 12, 11, 12]):
        expected = expected_logits(reference, texts[place][:length])[-1]
        torch.testing.assert_close(logits[place], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"model_type": "mistral", "sliding_window": 128},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128},
        {"quantization_config": {"quant_method": "gptq"}},
        {"hidden_act": "gelu"},
    ],
)
def test_other_models_are_not_claimed(changes: dict[str, Any]) -> None:
    assert not is_supported(tiny_config(**changes))


def test_a_checkpoint_that_lacks_a_weight_says_which(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path)
    weights = load_file(str(folder / "model.safetensors"))
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, str(folder / "model.safetensors"))
    with pytest.raises(EngineError, match=r"model\.layers\.1\.mlp"):
        Decoder.load(folder, torch.float32, CPU)


def test_damaged_weights_are_told(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(EngineError, match="cannot be read"):
        Decoder.load(folder, torch.float32, CPU)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"no \*\.safetensors"):
        Decoder.load(folder, torch.float32, CPU)
