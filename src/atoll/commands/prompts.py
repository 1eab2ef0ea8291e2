"""Prompts from a file: a text file has one a line, a JSONL file one object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.errors import DataError

Body = dict[str, Any]
"""What of a request's body holds the prompt."""


def valid_text(text: str) -> str:
    """Text from the command line, where bytes that are no UTF-8 have become halves of surrogate pairs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def body_of(prompt: str, system: str | None = None) -> Body:
    messages = [{"role": "system", "content": valid_text(system)}] if system else []
    return {"messages": [*messages, {"role": "user", "content": valid_text(prompt)}]}


def read_prompts(path: Path, system: str | None = None) -> list[Body]:
    """With `system` before each that is a text.

    Raises DataError, naming the line, for what is no prompt, and for a file without any.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}") from None
    bodies = list(_of_jsonl(path, text, system) if path.suffix in (".jsonl", ".ndjson") else _of_text(text, system))
    if not bodies:
        raise DataError(f"{path} holds no prompt")
    return bodies


def _of_text(text: str, system: str | None) -> Iterator[Body]:
    for line in text.splitlines():
        if line.strip():
            yield body_of(line.strip(), system)


def _of_jsonl(path: Path, text: str, system: str | None) -> Iterator[Body]:
    import orjson

    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from None
        body = _of_value(value, system)
        if body is None:
            raise DataError(
                f'{path}:{number}: no prompt in {line[:60]!r}. Write a text, {{"prompt": "…"}} or {{"messages": […]}}'
            )
        yield body


def _of_value(value: Any, system: str | None) -> Body | None:
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            return {key: value[key] for key in ("messages", "tools", "response_format", "max_tokens") if key in value}
        value = value.get("prompt")
    return body_of(value, system) if isinstance(value, str) and value.strip() else None
