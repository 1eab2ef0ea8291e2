"""Text out of OpenAI-shaped (and Anthropic-shaped) messages, whatever a client put there. Work is bounded for any
body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TEXT_PART_KINDS = frozenset({"text", "input_text", "output_text", None})
_MAX_PARTS_EACH_END = 16


def clipped(text: str, max_chars: int) -> str:
    """`text`, or its first and last halves of `max_chars` with a line break between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n{text[-half:]}"


def content_text(content: Any, max_chars: int) -> str:
    """What a message's `content` says in words: a string, or a list of parts of which only text counts.

    Stripped, at most about `max_chars` characters, the empty string for images, tool results and anything unknown.
    """
    if isinstance(content, str):
        return clipped(content, max_chars).strip()
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return ""
    texts = [clipped(text, max_chars) for text in _part_texts(_ends(content))]
    return clipped("\n".join(texts), max_chars).strip()


def _part_texts(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            kind, text = part.get("type"), part.get("text")
            if isinstance(text, str) and (kind is None or (isinstance(kind, str) and kind in _TEXT_PART_KINDS)):
                yield text


def _ends(items: list[Any]) -> list[Any]:
    if len(items) <= 2 * _MAX_PARTS_EACH_END:
        return items
    return items[:_MAX_PARTS_EACH_END] + items[-_MAX_PARTS_EACH_END:]
