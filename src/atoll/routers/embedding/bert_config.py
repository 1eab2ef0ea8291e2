"""The numbers of a BERT checkpoint that its encoder needs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Named as in the checkpoint's `config.json`."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> Self:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(**{field.name: config[field.name] for field in fields(cls)})
