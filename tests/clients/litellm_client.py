"""The litellm client against a gateway; prints what it got as JSON. Its own program, for what it leaves unclosed."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
warnings.simplefilter("ignore")

import litellm  # noqa: E402


def ask(text: str, **members: Any) -> Any:
    wish = {"model": "openai/auto", "api_base": f"{sys.argv[1]}/v1", "api_key": "client-key", "num_retries": 0}
    return litellm.completion(messages=[{"role": "user", "content": text}], **{**wish, **members})


def error_of(**members: Any) -> str:
    try:
        ask("Hi", **members)
    except Exception as error:
        return type(error).__name__
    return "none"


def main() -> None:
    whole = ask("Hi")
    chunks = list(ask("Hi", stream=True, stream_options={"include_usage": True}))
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    (call,) = ask("tools", tools=[tool]).choices[0].message.tool_calls
    got = {
        "whole": whole.choices[0].message.content,
        "total_tokens": whole.usage.total_tokens,
        "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "completion_tokens": chunks[-1].usage.completion_tokens,
        "arguments": call.function.arguments,
        "errors": [error_of(model="openai/gpt-9"), error_of(api_key="wrong")],
    }
    sys.stdout.write(json.dumps(got))


if __name__ == "__main__":
    main()
