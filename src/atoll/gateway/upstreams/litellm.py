"""Every other provider, through the `litellm` library, which owns their wire formats.

The library is told to do nothing but translate: no retries, no fallbacks, no call-backs, no telemetry, no price table
from the network. Of a request's fields it gets OpenAI's own and a few of the providers' by name. Anything else travels
in `extra_body` to providers that speak OpenAI's wire format and is left out for the others, which have no such field:
handed over by name, many of the library's own parameters could send a request elsewhere or read a file. A wish that
only shades the answer (`_HINTS`) is left out where the provider has no such parameter; `auto` may send any request to
any provider. The library refuses anything else that it cannot translate.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from types import ModuleType
from typing import Any, Final

import orjson

from atoll.config import LiteLLMUpstream, Timeouts
from atoll.errors import UpstreamTimeout, UpstreamUnreachable
from atoll.gateway.upstreams.base import Upstream, UpstreamRequest, UpstreamResponse
from atoll.gateway.upstreams.whole import DONE, MadeResponse, event, refusal
from atoll.types import Candidate

# fmt: off
_OPENAI_FIELDS: Final = frozenset((
    "audio", "best_of", "dimensions", "echo", "encoding_format", "frequency_penalty", "function_call", "functions",
    "input", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "modalities", "n",
    "parallel_tool_calls", "prediction", "presence_penalty", "prompt", "reasoning_effort", "response_format",
    "seed", "service_tier", "stop", "stream_options", "suffix", "temperature", "tool_choice", "tools",
    "top_logprobs", "top_p", "user", "verbosity", "web_search_options",
))
_PROVIDER_FIELDS: Final = frozenset(("thinking", "top_k", "safety_settings", "cachedContent", "context_management"))
_HINTS: Final = frozenset((
    "frequency_penalty", "logit_bias", "parallel_tool_calls", "prediction", "presence_penalty", "seed", "service_tier",
    "user", "verbosity",
))
# fmt: on
_ALSO_OPENAI_LIKE: Final = ("openai", "azure", "text-completion-openai", "bigmodel", "openrouter", "vercel_ai_gateway")
"""Providers that `extra_body` reaches, besides those the library lists itself."""
_LONGEST_CHAIN: Final = 12
_MAX_MESSAGE_CHARS: Final = 2000
_HANDLED_FIELDS: Final = frozenset({"model", "stream"})
_KEPT_HEADERS: Final = ("retry-after", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens")
_FUNCTIONS: Final = {
    "/chat/completions": "acompletion",
    "/completions": "atext_completion",
    "/embeddings": "aembedding",
}


class LiteLLM(Upstream):
    """One provider."""

    def __init__(self, name: str, settings: LiteLLMUpstream) -> None:
        self.name = name
        self._settings = settings
        self._library: ModuleType | None = None
        self._is_openai_like = False
        self._hints: dict[str, frozenset[str]] = {}
        """For each model, the hints that its provider takes."""

    async def start(self) -> None:
        # Importing takes seconds: better now than within the first request.
        self._library = await asyncio.to_thread(_import_library)
        self._is_openai_like = self._settings.provider in (
            *_ALSO_OPENAI_LIKE,
            *self._library.openai_compatible_providers,
        )

    async def send(self, request: UpstreamRequest, candidate: Candidate) -> UpstreamResponse:
        assert self._library is not None, "start() comes first"
        function = _FUNCTIONS.get(request.path)
        if function is None:
            return refusal(404, f"The upstream {self.name!r} does not serve {request.path}")
        body = orjson.loads(request.body)
        if _asks_the_library(body):
            return refusal(400, "A tool whose 'server_url' begins with 'litellm_proxy' is not served here")
        arguments = self._arguments(body, request, candidate)
        timeouts = request.timeouts
        ends_at = asyncio.get_running_loop().time() + timeouts.total_s
        try:
            async with asyncio.timeout(min(timeouts.first_byte_s, timeouts.total_s)):
                answer = await getattr(self._library, function)(**arguments)
        except TimeoutError:
            raise self._timeout("first_byte_s", timeouts, "did not begin to answer") from None
        except Exception as error:
            return self._refusal(error)
        if not request.is_streaming:
            return MadeResponse(200, body=orjson.dumps(_plain(answer)))
        stream = self._stream(answer, timeouts, ends_at)
        return MadeResponse(200, stream=stream, on_close=lambda: _close(stream, answer))

    async def is_ready(self) -> bool:
        return self._library is not None

    async def close(self) -> None:
        if self._library is not None:
            close_clients = getattr(self._library, "close_litellm_async_clients", None)
            if close_clients is not None:
                await close_clients()

    def _arguments(self, body: dict[str, Any], request: UpstreamRequest, candidate: Candidate) -> dict[str, Any]:
        settings = self._settings
        known = _OPENAI_FIELDS | _PROVIDER_FIELDS
        unknown_hints = _HINTS - self._hints_of(candidate.model)
        arguments = {name: value for name, value in body.items() if name in known and name not in unknown_hints}
        if self._is_openai_like:
            others = {name: value for name, value in body.items() if name not in known | _HANDLED_FIELDS}
            if others:
                arguments["extra_body"] = others
        if request.is_streaming:
            arguments["stream"] = True
        arguments |= {
            "model": f"{settings.provider}/{candidate.model}",
            "timeout": request.timeouts.total_s,
            "num_retries": 0,
            "max_retries": 0,
        }
        if settings.api_key is not None:
            arguments["api_key"] = settings.api_key.get_secret_value()
        if settings.base_url is not None:
            arguments["api_base"] = settings.base_url
        return arguments

    def _hints_of(self, model: str) -> frozenset[str]:
        hints = self._hints.get(model)
        if hints is None:
            assert self._library is not None
            taken = self._library.get_supported_openai_params(model=model, custom_llm_provider=self._settings.provider)
            # A model that the library knows nothing of gets what it was sent.
            hints = self._hints[model] = _HINTS if taken is None else _HINTS.intersection(taken)
        return hints

    async def _stream(self, answer: Any, timeouts: Timeouts, ends_at: float) -> AsyncIterator[bytes]:
        """The library's chunks as OpenAI's events, with a limit to the time between two."""
        loop = asyncio.get_running_loop()
        chunks = aiter(answer)
        limit_s, limit = timeouts.first_byte_s, "first_byte_s"
        while True:
            left_s = ends_at - loop.time()
            try:
                async with asyncio.timeout(min(limit_s, left_s)):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                if left_s <= limit_s:
                    raise self._timeout("total_s", timeouts, "did not finish its answer") from None
                raise self._timeout(limit, timeouts, "fell silent") from None
            except Exception as error:
                # The answer has begun: whatever the library says, there is nobody else to ask now.
                yield event(orjson.loads(await self._refusal(error).read()))
                return
            if chunk is None:
                break
            yield event(_plain(chunk))
            limit_s, limit = timeouts.idle_s, "idle_s"
        yield DONE

    def _refusal(self, error: Exception) -> MadeResponse:
        """An answer for the library's exception. Raises UpstreamUnreachable or UpstreamTimeout where there was none."""
        assert self._library is not None
        status = getattr(error, "status_code", None)
        # The library puts its own stack trace behind what happened.
        message = str(getattr(error, "message", None) or error).partition("\nTraceback")[0][:_MAX_MESSAGE_CHARS]
        if isinstance(error, self._library.Timeout):
            raise UpstreamTimeout(f"The upstream {self.name!r} did not answer in time") from None
        is_refusal = isinstance(status, int) and status >= 400
        if not is_refusal or isinstance(error, self._library.APIConnectionError) or _lost_its_connection(error):
            raise UpstreamUnreachable(
                f"The upstream {self.name!r} cannot be reached or broke off: {message[:300]}"
            ) from None
        code = "context_length_exceeded" if isinstance(error, self._library.ContextWindowExceededError) else None
        return refusal(int(status or 502), message, code=code, headers=_kept_headers(error))

    def _timeout(self, limit: str, timeouts: Timeouts, what: str) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"The upstream {self.name!r} {what} within {getattr(timeouts, limit):g} s "
            f"(upstreams.{self.name}.timeouts.{limit})"
        )


def _import_library() -> ModuleType:
    """litellm, told to keep to itself."""
    if "litellm" not in sys.modules:
        # Read at import: without it the library fetches its price table from the network.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        os.environ.setdefault("LITELLM_LOG", "ERROR")
    import litellm

    litellm.telemetry = False
    litellm.num_retries = 0
    litellm.suppress_debug_info = True
    litellm.drop_params = False
    litellm.turn_off_message_logging = True
    return litellm  # type: ignore[no-any-return]


def _plain(answer: Any) -> dict[str, Any]:
    """The library's object as OpenAI's JSON: of the many members it sets to null, those that OpenAI sends."""
    data = answer if isinstance(answer, dict) else answer.model_dump(mode="json", exclude_none=False)
    for choice in data.get("choices") or ():
        if isinstance(choice.get("message"), dict):
            choice["message"] = {"content": None, **_without_nulls(choice["message"])}
        if isinstance(choice.get("delta"), dict):
            choice["delta"] = _without_nulls(choice["delta"])
    if isinstance(data.get("usage"), dict):
        data["usage"] = _without_nulls(data["usage"])
    return {name: value for name, value in data.items() if value is not None or name == "choices"}


def _without_nulls(data: dict[str, Any]) -> dict[str, Any]:
    """`data` without its null members, those of the objects in it included."""
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in data.items()
        if value is not None
    }


def _asks_the_library(body: dict[str, Any]) -> bool:
    """Whether a tool is meant for the library's own proxy, which is not part of this gateway."""
    tools = body.get("tools")
    return isinstance(tools, list) and any(
        isinstance(tool, dict) and str(tool.get("server_url")).startswith("litellm_proxy") for tool in tools
    )


def _lost_its_connection(error: BaseException) -> bool:
    """The library reports a lost connection as a 500 of the provider; what it came from tells them apart."""
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(cause, OSError):
            return True
        if cause is None:
            return False
        cause = cause.__cause__ or cause.__context__
    return False


def _kept_headers(error: Exception) -> Mapping[str, str]:
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {name: str(headers[name]) for name in _KEPT_HEADERS if name in headers}


async def _close(stream: AsyncIterator[bytes], answer: Any) -> None:
    """End the provider's call, wherever it is."""
    await stream.aclose()  # type: ignore[attr-defined]
    for holder in (answer, getattr(answer, "completion_stream", None)):
        close = getattr(holder, "aclose", None)
        if close is not None:
            try:
                await close()
            except Exception:  # noqa: S112 - what cannot be closed any more is closed
                continue
            return
