"""OpenAI's HTTP shapes: reading requests strictly, and building answers, chunks and errors.

What a request asks for and the engine cannot do is refused by name, with status 400; fields that change nothing here
(`user`, `metadata`, `store`, …) and fields nobody knows are ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from atoll.errors import InvalidRequest
from atoll.local_backend.engine import FinishReason, Sampling, TokenLogprob

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_STOPS: Final = 4
_MAX_CHOICES: Final = 128
_MAX_TOP_LOGPROBS: Final = 20
_MAX_COMPLETION_LOGPROBS: Final = 20
_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class Wanted:
    """What chat and text completions ask for alike."""

    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    choices: int
    top_logprobs: int | None
    is_streaming: bool
    includes_usage: bool
    """Whether a stream ends with a usage chunk."""
    ignore_end: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    wanted: Wanted
    messages: list[dict[str, Any]]
    """Contents are strings."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    wanted: Wanted
    prompts: list[str | list[int]]
    """Texts, or token ids."""
    echo: bool


def read_body(body: bytes) -> Mapping[str, Any]:
    """The JSON object in a request's body. Raises InvalidRequest."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, found {_kind(data)}")
    return data


def read_chat(data: Mapping[str, Any]) -> ChatRequest:
    """A body of /v1/chat/completions. Raises InvalidRequest naming the parameter."""
    _refuse_formats(data)
    _refuse_forced_tools(data)
    wants_logprobs = _flag(data, "logprobs")
    top = _number(data, "top_logprobs", 0, _MAX_TOP_LOGPROBS, integer=True)
    if top and not wants_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
    newer, older = _max_tokens(data, "max_completion_tokens"), _max_tokens(data, "max_tokens")
    wanted = _wanted(
        data,
        max_tokens=newer if newer is not None else older,
        top_logprobs=int(top or 0) if wants_logprobs else None,
    )
    return ChatRequest(wanted, _messages(data))


def read_completion(data: Mapping[str, Any]) -> CompletionRequest:
    """A body of /v1/completions. Raises InvalidRequest naming the parameter."""
    for name in ("suffix", "best_of"):
        if data.get(name) not in (None, "", data.get("n") or 1):
            raise InvalidRequest(f"{name!r} is not supported by the local engine; leave it out", param=name)
    logprobs = _number(data, "logprobs", 0, _MAX_COMPLETION_LOGPROBS, integer=True)
    wanted = _wanted(
        data,
        max_tokens=_max_tokens(data, "max_tokens", least=0),
        top_logprobs=None if logprobs is None else int(logprobs),
    )
    echo = _flag(data, "echo")
    if wanted.max_tokens == 0 and not echo:
        raise InvalidRequest("'max_tokens' must be at least 1, unless 'echo' is true", param="max_tokens")
    if echo and wanted.is_streaming:
        raise InvalidRequest("'echo' is not supported in a stream; set 'stream' to false", param="echo")
    return CompletionRequest(wanted, _prompts(data.get("prompt")), echo)


def _wanted(data: Mapping[str, Any], *, max_tokens: int | None, top_logprobs: int | None) -> Wanted:
    is_streaming = _flag(data, "stream")
    temperature = _number(data, "temperature", 0, 2)
    top_p = _number(data, "top_p", 0, 1)
    seed = _number(data, "seed", -(1 << _SEED_BITS), (1 << _SEED_BITS) - 1, integer=True)
    sampling = Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=None if seed is None else int(seed),
        presence_penalty=_number(data, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=_number(data, "frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(data.get("logit_bias")),
    )
    return Wanted(
        max_tokens=max_tokens,
        sampling=sampling,
        stop=_stop(data.get("stop")),
        choices=int(_number(data, "n", 1, _MAX_CHOICES, integer=True) or 1),
        top_logprobs=top_logprobs,
        is_streaming=is_streaming,
        includes_usage=_includes_usage(data.get("stream_options"), is_streaming=is_streaming),
        ignore_end=_flag(data, "ignore_eos"),
    )


def _number(data: Mapping[str, Any], name: str, least: float, most: float, *, integer: bool = False) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        kind = "an integer" if integer else "a number"
        raise InvalidRequest(f"Invalid type for {name!r}: expected {kind}, found {_kind(value)}", param=name)
    if not least <= value <= most:
        raise InvalidRequest(f"Invalid value for {name!r}: {value!r} is not within [{least:g}, {most:g}]", param=name)
    return value


def _max_tokens(data: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"Invalid type for {name!r}: expected an integer, found {_kind(value)}", param=name)
    if value < least:
        raise InvalidRequest(f"Invalid value for {name!r}: {value} is less than {least}", param=name)
    return value


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"Invalid type for {name!r}: expected a boolean, found {_kind(value)}", param=name)
    return value


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest(
            f"Invalid type for 'stop': expected a string or an array of strings, found {_kind(value)}", param="stop"
        )
    if len(stops) > _MAX_STOPS:
        raise InvalidRequest(f"Invalid 'stop': {len(stops)} strings, at most {_MAX_STOPS} are allowed", param="stop")
    return tuple(stop for stop in stops if stop)


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"Invalid type for 'logit_bias': expected an object of token ids and numbers, found {_kind(value)}",
            param="logit_bias",
        )
    biases = {}
    for token, bias in value.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not token.isdecimal() or not is_number or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"Invalid 'logit_bias': {token!r}: {bias!r}; expected a token id and a number within [-100, 100]",
                param="logit_bias",
            )
        biases[int(token)] = float(bias)
    return biases


def _includes_usage(options: Any, *, is_streaming: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest(
            f"Invalid type for 'stream_options': expected an object, found {_kind(options)}", param="stream_options"
        )
    if not is_streaming:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true", param="stream_options")
    return _flag(options, "include_usage")


def _refuse_formats(data: Mapping[str, Any]) -> None:
    shape = data.get("response_format")
    kind = shape.get("type") if isinstance(shape, dict) else shape
    if kind not in (None, "text"):
        raise InvalidRequest(
            f"'response_format' of type {kind!r} cannot be guaranteed by the local engine, only 'text'. Leave it out, "
            "or ask a model with the capability 'json_schema'",
            param="response_format",
        )


def _refuse_forced_tools(data: Mapping[str, Any]) -> None:
    """A model may answer without calling a tool, so tools on offer are no error; a call that is demanded is."""
    choice = data.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidRequest(
            "'tool_choice' demands a tool call, which the local engine cannot make. Use 'auto' or 'none', or ask a "
            "model with the capability 'tools'",
            param="tool_choice",
        )


def _messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = data.get("messages")
    if messages is None:
        raise InvalidRequest("Missing required parameter: 'messages'", param="messages")
    if not isinstance(messages, list):
        raise InvalidRequest(
            f"Invalid type for 'messages': expected an array, found {_kind(messages)}", param="messages"
        )
    if not messages:
        raise InvalidRequest("Invalid 'messages': the array is empty; at least one message is needed", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"Invalid type for '{where}': expected an object, found {_kind(message)}", param=where)
    role = message.get("role")
    if role not in _ROLES:
        allowed = ", ".join(repr(known) for known in _ROLES)
        raise InvalidRequest(f"Invalid value for '{where}.role': {role!r}. Supported: {allowed}", param=f"{where}.role")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InvalidRequest(
            f"Invalid type for '{where}.tool_calls': expected an array of objects", param=f"{where}.tool_calls"
        )
    return message | {"content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A content's text: itself, or the texts of its parts one after another; null is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"Invalid type for '{where}': expected a string or an array, found {_kind(content)}", param=where
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if kind not in (None, "text", "input_text", "output_text", "refusal"):
            raise InvalidRequest(
                f"'{where}[{index}]' is of type {kind!r}; this model reads text only. Leave it out, or ask a model "
                "with the capability 'vision'",
                param=f"{where}[{index}]",
            )
        if not isinstance(text, str):
            raise InvalidRequest(
                f'Invalid \'{where}[{index}]\': expected {{"type": "text", "text": …}}', param=f"{where}[{index}]"
            )
        texts.append(text)
    return "".join(texts)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_token_id(part) for part in prompt):
            return [prompt]
        if all(isinstance(part, str) or _is_token_list(part) for part in prompt):
            return prompt
    if prompt is None:
        raise InvalidRequest("Missing required parameter: 'prompt'", param="prompt")
    raise InvalidRequest(
        "Invalid 'prompt': expected a string, token ids, or an array of strings or of arrays of token ids",
        param="prompt",
    )


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_token_id(part) for part in value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class Reply:
    """The parts that all objects of one answer share: id, time, model, and the shapes of chat or text completions."""

    def __init__(self, *, is_chat: bool, model: str, fingerprint: str) -> None:
        self._is_chat = is_chat
        prefix, kind = ("chatcmpl", "chat.completion") if is_chat else ("cmpl", "text_completion")
        self._chunk_kind = f"{kind}.chunk" if is_chat else kind
        self._kind = kind
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        # All chunks of a stream begin alike: written once, not once a token.
        self._chunk_head = b"data: " + orjson.dumps(self._head | {"object": self._chunk_kind})[:-1] + b',"choices":'

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return orjson.dumps(self._head | {"object": self._kind, "choices": choices, "usage": usage})

    def choice(
        self, index: int, text: str, reason: FinishReason | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A finished choice."""
        shared = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self._is_chat:
            return shared | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return shared | {"text": text}

    def chunk(
        self,
        index: int,
        text: str | None,
        reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
        *,
        is_first: bool = False,
        with_usage: bool = False,
    ) -> bytes:
        """One server-sent event. `with_usage` says that the stream will end with usage, so the others hold null."""
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
        if not self._is_chat:
            choice["text"] = text or ""
        elif is_first:
            choice["delta"] = {"role": "assistant", "content": "", "refusal": None}
        else:
            choice["delta"] = {} if text is None else {"content": text}
        return self._event([choice], b',"usage":null}\n\n' if with_usage else b"}\n\n")

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return self._event([], b',"usage":' + orjson.dumps(usage) + b"}\n\n")

    def _event(self, choices: list[dict[str, Any]], usage: bytes) -> bytes:
        """`usage` is what stands behind the choices, up to the end of the object."""
        return self._chunk_head + orjson.dumps(choices) + usage


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {
        "content": [_chat_token(token) | {"top_logprobs": [_chat_token(t) for t in token.top]} for token in tokens],
        "refusal": None,
    }


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


def completion_logprobs(
    tokens: Sequence[TokenLogprob], start: int, *, has_unscored_first: str | None = None
) -> dict[str, Any]:
    """`logprobs` of a text choice; `start` is the first token's place in the text, in characters.

    `has_unscored_first` is the text of a first token that nothing stands before (an echoed prompt's), which has no
    log-probability.
    """
    texts = [token.text for token in tokens]
    logprobs: list[float | None] = [token.logprob for token in tokens]
    tops: list[dict[str, float] | None] = [{top.text: top.logprob for top in token.top} for token in tokens]
    if has_unscored_first is not None:
        texts, logprobs, tops = [has_unscored_first, *texts], [None, *logprobs], [None, *tops]
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
