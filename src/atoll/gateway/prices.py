"""The price table: litellm's, read from its file without importing the library.

litellm keeps it current for some five thousand models; its import takes seconds, the file milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import orjson

from atoll.errors import DataError

_TABLE: Final = "model_prices_and_context_window_backup.json"
_CAPABILITIES: Final = {
    "supports_function_calling": "tools",
    "supports_vision": "vision",
    "supports_response_schema": "json_schema",
}


@dataclass(frozen=True, slots=True)
class PriceEntry:
    """What the table says of one model; prices in US dollars per million tokens, None where it says nothing."""

    input_usd_per_mtok: float
    output_usd_per_mtok: float
    cached_input_usd_per_mtok: float | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    capabilities: frozenset[str]
    is_reasoning: bool
    mode: str | None


def lookup(model: str, provider: str | None = None) -> PriceEntry | None:
    """The entry of `provider/model` or of `model`; None where the table does not know it."""
    table = _table()
    names = [f"{provider}/{model}", model] if provider else [model]
    for name in names:
        entry = table.get(name)
        if isinstance(entry, dict) and "input_cost_per_token" in entry:
            return _entry(entry)
    return None


@cache
def _table() -> Mapping[str, Any]:
    """The whole table (some 20 ms to read). Raises DataError where it is missing."""
    spec = find_spec("litellm")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        path = Path(place) / _TABLE
        if path.is_file():
            table = orjson.loads(path.read_bytes())
            assert isinstance(table, dict)
            return table
    raise DataError("litellm's price table was not found. Reinstall it: pip install --force-reinstall litellm")


def _entry(entry: Mapping[str, Any]) -> PriceEntry:
    capabilities = {name for flag, name in _CAPABILITIES.items() if entry.get(flag)}
    if entry.get("mode") == "embedding":
        capabilities.add("embeddings")
    return PriceEntry(
        input_usd_per_mtok=_per_million(entry.get("input_cost_per_token")) or 0.0,
        output_usd_per_mtok=_per_million(entry.get("output_cost_per_token")) or 0.0,
        cached_input_usd_per_mtok=_per_million(entry.get("cache_read_input_token_cost")),
        max_input_tokens=_tokens(entry.get("max_input_tokens") or entry.get("max_tokens")),
        max_output_tokens=_tokens(entry.get("max_output_tokens")),
        capabilities=frozenset(capabilities),
        is_reasoning=bool(entry.get("supports_reasoning")),
        mode=entry.get("mode"),
    )


def _per_million(usd_per_token: Any) -> float | None:
    # Rounded, since 1.5e-07 * 1e6 is 0.15 only almost.
    return round(usd_per_token * 1e6, 9) if isinstance(usd_per_token, int | float) else None


def _tokens(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value > 0 else None
