"""What of a request is embedded: the last user turn, with as much of the talk before it as fits.

Embedders read a text's first and last 64 tokens. So a long user turn is given alone: then both ends are its own. A
short one comes last, behind the nearest earlier turns, and the whole stays within about 128 tokens, so that nothing
is cut at all; and should the estimate be off, the last 64 tokens are still the user's. System prompts, tool calls and
tool results are left out: they are the same for every request of an application, or no question. In an agent's long
loop of tool results the last user turn is still what the work is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.routers.embedding.message_text import clipped, content_text
from atoll.routers.embedding.prompt_tokens import estimate_prompt_tokens, estimate_text_tokens

__all__ = ["estimate_prompt_tokens", "routing_text"]

MAX_TURN_CHARS = 2_000
"""Far more than 64 tokens from either end, even of long words."""
CONTEXT_TOKENS = 120
"""Of turn and context together; a little under the 128 tokens that an embedder reads, since it is an estimate."""
_MIN_CONTEXT_TOKENS = 8
_MAX_MESSAGES_SEARCHED = 10_000
_MAX_CONTEXT_MESSAGES = 8
_CONTEXT_ROLES = ("user", "assistant")
_TOOL_ROLES = ("tool", "function")


def routing_text(body: Any) -> str:
    """The text to embed for a request body of `/v1/chat/completions`, `/v1/completions`, `/v1/responses`,
    `/v1/messages` or `/v1/embeddings`; empty where there are no words (token ids, images alone).

    Takes any JSON value, never raises, and looks at a bounded part of it. The result has at most about 2,000
    characters.
    """
    if not isinstance(body, dict):
        return ""
    for key in ("messages", "input", "prompt"):
        value = body.get(key)
        text = _of_messages(value) if isinstance(value, list) and _holds_messages(value) else _of_prompt(value)
        if text:
            return text
    return ""


def _holds_messages(items: list[Any]) -> bool:
    return bool(items) and isinstance(items[-1], dict)


def _of_prompt(value: Any) -> str:
    """The last text of a plain prompt or of a list of them."""
    if isinstance(value, str):
        return clipped(value, MAX_TURN_CHARS).strip()
    if isinstance(value, list):
        for item in reversed(value[-_MAX_CONTEXT_MESSAGES:]):
            if isinstance(item, str) and (text := clipped(item, MAX_TURN_CHARS).strip()):
                return text
    return ""


def _of_messages(messages: list[Any]) -> str:
    turns = _turns_backwards(messages)
    fallback = ""
    for role, text in turns:
        if role == "user":
            return _with_context(text, turns)
        if not fallback and role not in _TOOL_ROLES:
            fallback = text
    return fallback


def _turns_backwards(messages: list[Any]) -> Iterator[tuple[Any, str]]:
    """Role and words of each message that has any, the latest first."""
    for index in range(len(messages) - 1, max(-1, len(messages) - 1 - _MAX_MESSAGES_SEARCHED), -1):
        message = messages[index]
        if isinstance(message, dict) and (text := content_text(message.get("content"), MAX_TURN_CHARS)):
            yield message.get("role"), text


def _with_context(turn: str, earlier: Iterator[tuple[Any, str]]) -> str:
    tokens_left = CONTEXT_TOKENS - estimate_text_tokens(turn)
    parts = [turn]
    for (role, text), _ in zip(earlier, range(_MAX_CONTEXT_MESSAGES), strict=False):
        if tokens_left < _MIN_CONTEXT_TOKENS:
            break
        if role not in _CONTEXT_ROLES:
            continue
        text_tokens = estimate_text_tokens(text)
        if text_tokens > tokens_left:
            # A turn's subject stands at its beginning.
            text = text[: len(text) * tokens_left // text_tokens]
        parts.append(text)
        tokens_left -= text_tokens
    return "\n".join(reversed(parts))
