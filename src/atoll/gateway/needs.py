"""What a request asks of whoever answers it: capabilities, and room for prompt and answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from atoll.gateway.parse import ParsedRequest
from atoll.routers.eligibility import Requirements

_CHARS_PER_TOKEN: Final = 4
_TOKENS_PER_WIDE_CHAR: Final = 0.8
_TOKENS_PER_MESSAGE: Final = 4
_TOKENS_PER_IMAGE: Final = 765
"""What a picture of 1024 x 1024 costs at the usual tile sizes."""
_IMAGE_PARTS: Final = frozenset({"image_url", "input_image", "image"})


def requirements_of(request: ParsedRequest) -> Requirements:
    """Token counts of the prompt are estimates: no tokenizer runs on the request path."""
    data = request.data
    capabilities = set()
    if data.get("tools") or data.get("functions"):
        capabilities.add("tools")
    response_format = data.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") == "json_schema":
        capabilities.add("json_schema")
    if data.get("logprobs"):
        capabilities.add("logprobs")
    if _has_image(data.get("messages")):
        capabilities.add("vision")
    return Requirements(
        prompt_tokens=prompt_tokens_of(data),
        max_output_tokens=data.get("max_completion_tokens") or data.get("max_tokens"),
        capabilities=frozenset(capabilities),
    )


def prompt_tokens_of(data: dict[str, Any]) -> int:
    """About how many tokens the prompt of a request body has."""
    total = 0.0
    for message in data.get("messages") or ():
        total += _TOKENS_PER_MESSAGE + sum(map(_tokens_of, _texts(message)))
    for key in ("prompt", "input"):
        value = data.get(key)
        if isinstance(value, str):
            total += _tokens_of(value)
        elif isinstance(value, list):
            total += sum(_tokens_of(part) if isinstance(part, str) else _ids(part) for part in value)
    for key in ("tools", "functions"):
        if data.get(key):
            total += len(orjson.dumps(data[key])) / _CHARS_PER_TOKEN
    return int(total)


def _texts(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part.get("text"), str):
                yield part["text"]
            elif part.get("type") in _IMAGE_PARTS:
                yield " " * (_TOKENS_PER_IMAGE * _CHARS_PER_TOKEN)
    if message.get("tool_calls"):
        yield orjson.dumps(message["tool_calls"]).decode()


def _tokens_of(text: str) -> float:
    if text.isascii():
        return len(text) / _CHARS_PER_TOKEN
    wide_chars = (len(text.encode("utf-8", "replace")) - len(text)) / 2
    return max(len(text) - wide_chars, 0) / _CHARS_PER_TOKEN + wide_chars * _TOKENS_PER_WIDE_CHAR


def _ids(part: Any) -> int:
    return len(part) if isinstance(part, list) else 1


def _has_image(messages: Any) -> bool:
    return any(
        part.get("type") in _IMAGE_PARTS
        for message in messages or ()
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
