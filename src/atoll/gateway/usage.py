"""Token counts of an answer, whatever the provider's convention.

| | prompt | cached part of it | where reasoning is |
| --- | --- | --- | --- |
| OpenAI | `prompt_tokens`, cached included | `prompt_tokens_details.cached_tokens` | in `completion_tokens` |
| OpenAI responses | `input_tokens`, cached included | `input_tokens_details.cached_tokens` | in `output_tokens` |
| Anthropic | `input_tokens`, cached **not** included | `cache_read_input_tokens`, and `cache_creation_…` | – |
| DeepSeek | `prompt_tokens`, cached included | `prompt_cache_hit_tokens` | in `completion_tokens` |
| Gemini's and xAI's OpenAI endpoints | as OpenAI | as OpenAI | only in `total_tokens`: **not** in `completion_tokens` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.types import Usage


def usage_from(usage: Any) -> Usage | None:
    """The counts in an answer's `usage` member; None where it counts nothing. Odd values count as zero, never raise."""
    if not isinstance(usage, Mapping):
        return None
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        prompt_tokens = _count(usage, "prompt_tokens")
        completion_tokens = _count(usage, "completion_tokens")
        cached_tokens = _count(_details(usage, "prompt_tokens_details"), "cached_tokens") or _count(
            usage, "prompt_cache_hit_tokens"
        )
        reasoning_tokens = _count(_details(usage, "completion_tokens_details"), "reasoning_tokens")
        unlisted_tokens = _count(usage, "total_tokens") - prompt_tokens - completion_tokens
        if unlisted_tokens > 0 and "completion_tokens" in usage:
            # Thought, and billed as output.
            completion_tokens += unlisted_tokens
            reasoning_tokens = max(reasoning_tokens, unlisted_tokens)
    elif "input_tokens" in usage or "output_tokens" in usage:
        prompt_tokens = _count(usage, "input_tokens")
        completion_tokens = _count(usage, "output_tokens")
        cached_tokens = _count(_details(usage, "input_tokens_details"), "cached_tokens")
        reasoning_tokens = _count(_details(usage, "output_tokens_details"), "reasoning_tokens")
        if "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage:
            cached_tokens = _count(usage, "cache_read_input_tokens")
            prompt_tokens += cached_tokens + _count(usage, "cache_creation_input_tokens")
    else:
        return None
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=min(cached_tokens, prompt_tokens),
        completion_tokens=completion_tokens,
        reasoning_tokens=min(reasoning_tokens, completion_tokens),
    )


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = usage.get(name)
    return details if isinstance(details, Mapping) else {}


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**53:
        return int(value)
    return 0
