"""What a request asks of whoever answers it: capabilities, and room for prompt and answer."""

from __future__ import annotations

from typing import Any, Final

from atoll.gateway.parse import ParsedRequest
from atoll.routers.eligibility import Requirements
from atoll.routers.embedding.prompt_tokens import estimate_prompt_tokens

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
        prompt_tokens=estimate_prompt_tokens(data),
        max_output_tokens=data.get("max_completion_tokens") or data.get("max_tokens"),
        capabilities=frozenset(capabilities),
    )


def _has_image(messages: Any) -> bool:
    return any(
        part.get("type") in _IMAGE_PARTS
        for message in messages or ()
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
