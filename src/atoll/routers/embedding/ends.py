"""Which part of a long text an embedder reads: its first and last 64 tokens.

A question's subject stands at its beginning or its end, and cost grows with length, so the middle is left out.
"""

from __future__ import annotations

END_TOKENS = 64
_END_CHARS = 1_500
"""Kept of either end before tokenising, so that no text is expensive. 64 tokens are some 250 characters of English."""


def text_ends(text: str) -> str:
    """`text`, or both its ends when it is long."""
    if len(text) <= 2 * _END_CHARS:
        return text
    return f"{text[:_END_CHARS]} {text[-_END_CHARS:]}"


def token_ends(ids: list[int]) -> list[int]:
    """`ids`, or the first and last 64 of them."""
    return ids if len(ids) <= 2 * END_TOKENS else ids[:END_TOKENS] + ids[-END_TOKENS:]
