"""When two names mean the same model.

Providers, tables and people write one model in many ways: `openai/gpt-4-1106-preview`, `Meta-Llama-3_1-8B-Instruct`,
`llama3.1:8b`, `accounts/fireworks/models/llama-v3p1-8b-instruct`. Names are brought into one spelling, and compared in
steps from strict to lenient; snapshots with different dates, and a base model and its tuned form, stay different
models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from atoll.types import Candidate

SAME_MODEL: Final = {
    "command-r": "c4ai-command-r-v01",
    "command-r-03-2024": "c4ai-command-r-v01",
    "gemini-1.5-flash": "gemini-1.5-flash-002",
    "gemini-1.5-flash-latest": "gemini-1.5-flash-002",
    "gemini-1.5-pro": "gemini-1.5-pro-002",
    "gemini-1.5-pro-latest": "gemini-1.5-pro-002",
    "jamba-1-5-large": "jamba-1.5-large",
    "jamba-large-1.5": "jamba-1.5-large",
    "llama-3.1-70b-versatile": "llama-3.1-70b-instruct",
    "llama-3.1-8b-instant": "llama-3.1-8b-instruct",
    "mathstral-7b-v0.1": "mathstral-7b",
    "mixtral-8x7b": "mixtral-8x7b-instruct-v0.1",
    "mixtral-8x7b-32768": "mixtral-8x7b-instruct-v0.1",
    "mixtral-8x7b-instruct": "mixtral-8x7b-instruct-v0.1",
    "open-mixtral-8x7b": "mixtral-8x7b-instruct-v0.1",
}
"""Names under which providers serve a model that is published under another. Spelled as `canonical_name` gives them."""

_VENDOR: Final = re.compile(
    r"^(?:(?:us|eu|apac|global)\.)?(?:ai21|amazon|anthropic|cohere|deepseek|meta|mistral|qwen)\."
)
_REVISION: Final = re.compile(r"-v\d+:\d+$")
_VARIANT: Final = re.compile(r":(?:free|nitro|floor|extended|online|thinking|latest)$")
_FORMAT: Final = re.compile(
    r"-(?:hf|awq|gptq|gguf|fp8|fp16|bf16|int4|int8|q\d[_a-z0-9]*)$|(?<=-instruct)-(?:turbo|lite)$"
)
_DATE: Final = re.compile(r"-(?:20\d{6}|20\d\d-\d\d-\d\d)$")
_TUNED: Final = re.compile(r"-(?:instruct|chat|it)(?=-|$)")
_SIZE: Final = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])")
_ACTIVE: Final = re.compile(r"-a(\d+(?:\.\d+)?)b(?![a-z0-9])")
_ACTIVE_EXPERTS: Final = 2
"""Of a model called `8x7b`."""


@cache
def canonical_name(name: str) -> str:
    """One spelling: lower case, no provider, no file format, `llama-3.1` for `Llama3_1` and `llama-v3p1`."""
    text = name.strip().lower().rsplit("/", 1)[-1]
    text = _VENDOR.sub("", text)
    text = _VARIANT.sub("", _REVISION.sub("", text))
    text = text.replace(":", "-").replace(" ", "-").replace("@", "-")
    text = re.sub(r"(?<=\d)[_p](?=\d)", ".", text).replace("_", "-")
    text = re.sub(r"^(?:meta-)?(llama)-?v?(?=\d)", r"\1-", text)
    text = re.sub(r"^([a-z]{2,})(?=\d)", r"\1-", text)
    while (shorter := _FORMAT.sub("", text)) != text:
        text = shorter
    return SAME_MODEL.get(text, text)


def undated_name(name: str) -> str:
    """`canonical_name` without the date of a snapshot: `claude-3-opus` for `claude-3-opus-20240229`."""
    return _DATE.sub("", canonical_name(name))


def untuned_name(name: str) -> str:
    """`undated_name` without `-instruct`, `-chat` or `-it`."""
    return _TUNED.sub("", undated_name(name))


def match_name(candidate: Candidate, known: Iterable[str]) -> str | None:
    """Which of the `known` models this candidate is, by its name, its upstream's name for it or an alias; None for
    none.

    As strictly as possible: the same text, the same spelling, the same but for a date that only one of them has, and
    last a candidate whose name says nothing of tuning for a known tuned model (what APIs serve is tuned).
    """
    names = (candidate.name, candidate.model, *candidate.aliases)
    known = tuple(known)
    for name in names:
        if name in known:
            return name
    return (
        _first_tuned([name for name in names if _is_tag(name)], known)
        or _first(names, known, canonical_name)
        or _first_undated(names, known)
        or _first_tuned(names, known)
    )


def size_in_name(name: str) -> float | None:
    """Billions of parameters that a name tells, None where it tells none: 8 for `llama3.1:8b`, 0.135 for `…-135m`.

    Of a mixture of experts the geometric mean of all and of active parameters, which is about the size of a dense model
    that is as good.
    """
    text = canonical_name(name)
    found = _SIZE.search(text)
    if found is None:
        return None
    experts, size, unit = found.groups()
    billions = float(size) / (1000.0 if unit == "m" else 1.0)
    active = _ACTIVE.search(text)
    if active is not None:
        return math.sqrt(billions * float(active[1]))
    if experts is not None:
        return billions * math.sqrt(int(experts) * _ACTIVE_EXPERTS)
    return billions


def _first(names: Iterable[str], known: Iterable[str], spelled: Callable[[str], str]) -> str | None:
    by_spelling: dict[str, str] = {}
    for name in known:
        by_spelling.setdefault(spelled(name), name)
    return next((found for name in names if (found := by_spelling.get(spelled(name)))), None)


def _first_undated(names: Iterable[str], known: Iterable[str]) -> str | None:
    """Two different dates are two different models; a name without a date is any snapshot."""
    for name in names:
        has_date = _DATE.search(canonical_name(name)) is not None
        others = [other for other in known if (_DATE.search(canonical_name(other)) is not None) != has_date]
        found = _first([name], others, undated_name)
        if found is not None:
            return found
    return None


def _first_tuned(names: Iterable[str], known: Iterable[str]) -> str | None:
    return _first(
        [name for name in names if not _TUNED.search(canonical_name(name))],
        [name for name in known if _TUNED.search(canonical_name(name)) and not _DATE.search(canonical_name(name))],
        untuned_name,
    )


def _is_tag(name: str) -> bool:
    """Whether it is written as Ollama does: `llama3.1:8b`."""
    text = name.lower().rsplit("/", 1)[-1]
    return ":" in _VARIANT.sub("", _REVISION.sub("", text))
