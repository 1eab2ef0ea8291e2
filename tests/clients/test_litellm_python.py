"""The litellm client, with Atoll as its OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Any

import pytest

from doubles.process import Process

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm: Any = pytest.importorskip("litellm")


def wish(gateway: Process, text: str, **members: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": "openai/auto",
        "api_base": f"{gateway.url}/v1",
        "api_key": "client-key",
        "messages": messages,
        "num_retries": 0,
        **members,
    }


def test_chat(gateway: Process) -> None:
    answer = litellm.completion(**wish(gateway, "Hi"))
    assert answer.choices[0].message.content == "Hello 0"
    assert answer.usage.total_tokens == 15


def test_streamed_chat_with_usage(gateway: Process) -> None:
    chunks = list(litellm.completion(**wish(gateway, "Hi", stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage.completion_tokens == 5


def test_tool_calls(gateway: Process) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    (call,) = litellm.completion(**wish(gateway, "tools", tools=[tool])).choices[0].message.tool_calls
    assert call.function.arguments == '{"city":"Oslo"}'


def test_errors_raise_the_right_class(gateway: Process) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**wish(gateway, "Hi", model="openai/gpt-9"))
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**wish(gateway, "Hi", api_key="wrong"))
