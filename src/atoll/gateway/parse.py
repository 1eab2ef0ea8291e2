"""A request body, read once and checked for what the gateway itself uses. Everything else is the upstream's to judge.

The body's bytes stay as they came; `splice.py` edits them where an upstream must see something else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import orjson

from atoll.config import AUTO_MODEL, LimitSettings
from atoll.errors import InvalidRequest, ModelNotFound, PayloadTooLarge
from atoll.types import Preference

EXTENSION_KEY: Final = "atoll"
"""The body's own member for Atoll; removed before an upstream sees the body."""
_EXTENSIONS: Final = ("preference", "max_cost_usd", "session", "explain", "template")
_REDIRECTING: Final = frozenset(
    {"api_base", "base_url", "api_key", "api_version", "custom_llm_provider", "extra_headers", "extra_body"}
)
"""Members by which some clients and libraries choose an upstream or its key. Only the configuration does that here."""
_MAX_SESSION_CHARS: Final = 200
_MAX_MODEL_CHARS: Final = 200
_NAMES_IN_ERROR: Final = 20

_BRACKETS_AND_QUOTES: Final = b'{}[]"'
_ALL_BUT_BRACKETS_AND_QUOTES: Final = bytes(set(range(256)) - set(_BRACKETS_AND_QUOTES))
_DEPTH_STEP: Final = np.zeros(256, dtype=np.int8)
_DEPTH_STEP[list(b"{[")] = 1
_DEPTH_STEP[list(b"}]")] = -1


class Endpoint(StrEnum):
    """What a request wants. The value is the path below the API root, here and at upstreams."""

    CHAT = "/chat/completions"
    COMPLETIONS = "/completions"
    EMBEDDINGS = "/embeddings"
    ROUTE = "/route"


@dataclass(frozen=True, slots=True)
class Extensions:
    """What a client asks of Atoll itself, in the body under `atoll` or in headers; the body wins."""

    preference: Preference
    session: str | None = None
    explain: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request. `body` is what the client sent, byte for byte; `data` what it parses to."""

    endpoint: Endpoint
    body: bytes
    data: dict[str, Any]
    model: str
    is_streaming: bool
    wants_usage: bool
    """Whether the client asked for the usage chunk of a stream."""
    extensions: Extensions

    @property
    def is_auto(self) -> bool:
        return self.model == AUTO_MODEL


def parse_request(
    endpoint: Endpoint, body: bytes, headers: Mapping[bytes, bytes], limits: LimitSettings, default_preference: float
) -> ParsedRequest:
    """Read and check. Raises InvalidRequest or PayloadTooLarge, naming the parameter and what is allowed."""
    data = parse_object(body, limits)
    _refuse_redirection(data)
    model = data.get("model")
    if model is None and endpoint is Endpoint.ROUTE:
        model = AUTO_MODEL
    if not isinstance(model, str) or not model or len(model) > _MAX_MODEL_CHARS:
        raise _wrong(
            "model",
            model,
            f"a model's name of at most {_MAX_MODEL_CHARS} characters, or {AUTO_MODEL!r} to have one chosen",
        )
    _check_input(endpoint, data)
    is_streaming = _flag(data, "stream")
    return ParsedRequest(
        endpoint=endpoint,
        body=body,
        data=data,
        model=model,
        is_streaming=is_streaming,
        wants_usage=is_streaming and _wants_usage(data),
        extensions=_extensions(data.get(EXTENSION_KEY), headers, default_preference),
    )


def parse_object(body: bytes, limits: LimitSettings) -> dict[str, Any]:
    """The body as a JSON object, no deeper than the limit. Raises InvalidRequest with the position of a fault."""
    if len(body) > limits.max_body_bytes:
        raise body_too_large(limits.max_body_bytes)
    if is_deeper_than(body, limits.max_json_depth):
        raise InvalidRequest(
            f"The body nests deeper than {limits.max_json_depth} levels. Flatten it, or raise limits.max_json_depth",
            code="json_too_deep",
        )
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(_why_not_json(body, error), code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequest(
            f"The body must be a JSON object, found {type(data).__name__}: {_shown(data)}", code="invalid_json"
        )
    return data


def body_too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {max_bytes} bytes. Send less, or raise limits.max_body_bytes")


def is_deeper_than(body: bytes, max_depth: int) -> bool:
    """Whether valid JSON nests deeper than `max_depth`, at the speed of a memory scan.

    Invalid JSON may get either answer.
    """
    if body.count(b"{") + body.count(b"[") <= max_depth:
        return False
    if b"\\" in body:
        # In this order: what is left of a run of backslashes before a quote is one that escapes it.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    skeleton = body.translate(None, _ALL_BUT_BRACKETS_AND_QUOTES)
    outside_strings = b"".join(skeleton.split(b'"')[::2])
    steps = _DEPTH_STEP[np.frombuffer(outside_strings, dtype=np.uint8)]
    return bool(steps.cumsum(dtype=np.int32).max(initial=0) > max_depth)


def unknown_model(model: str, known: Iterable[str]) -> ModelNotFound:
    """404 that lists what there is, nearest names first."""
    names = list(known)
    near = difflib.get_close_matches(model, names, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    listed = ", ".join([AUTO_MODEL, *names][:_NAMES_IN_ERROR]) + (", …" if len(names) >= _NAMES_IN_ERROR else "")
    return ModelNotFound(f"There is no model {model[:_MAX_MODEL_CHARS]!r}.{hint} There are: {listed}", param="model")


def _why_not_json(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body:
        return "The body is empty; it must be a JSON object"
    try:
        body.decode()
    except UnicodeDecodeError as fault:
        return f"The body is not UTF-8: byte 0x{body[fault.start]:02x} at position {fault.start}"
    return f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"


def _refuse_redirection(data: Mapping[str, Any]) -> None:
    """A client must not choose where a request goes or with which key: that is how provider keys get stolen."""
    for name in data:
        if name.lower() in _REDIRECTING:
            raise InvalidRequest(
                f"{name[:40]!r} is not accepted: upstreams and their keys come from the server's configuration only. "
                "Remove it from the body",
                param=name[:40],
                code="not_permitted_parameter",
            )


def _check_input(endpoint: Endpoint, data: Mapping[str, Any]) -> None:
    if endpoint is Endpoint.EMBEDDINGS:
        _check_texts(data, "input")
    elif endpoint is Endpoint.COMPLETIONS or (endpoint is Endpoint.ROUTE and "messages" not in data):
        _check_texts(data, "prompt")
    else:
        _check_messages(data.get("messages"))
    for name in ("max_tokens", "max_completion_tokens"):
        limit = data.get(name)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise _wrong(name, limit, "a whole number of at least 1")
    for name in ("tools", "functions"):
        if not isinstance(data.get(name) or [], list):
            raise _wrong(name, data[name], "a list")
    if not isinstance(data.get("response_format") or {}, dict):
        raise _wrong("response_format", data["response_format"], "an object such as {'type': 'json_object'}")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise _wrong(
            "messages", messages, "a list of at least one message, such as {'role': 'user', 'content': 'Hello'}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _wrong(f"messages[{index}]", message, "an object with a role")
        if not isinstance(message.get("role"), str):
            raise _wrong(f"messages[{index}].role", message.get("role"), "a text such as 'user'")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise _wrong(f"messages[{index}].content", content, "a text, a list of parts, or null")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise _wrong(f"messages[{index}].content", content, "a list whose parts are objects")


def _check_texts(data: Mapping[str, Any], name: str) -> None:
    value = data.get(name)
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not value or not all(isinstance(part, str | int | list) for part in value):
        raise _wrong(name, value, "a text, or a list of at least one text")


def _wants_usage(data: Mapping[str, Any]) -> bool:
    options = data.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object such as {'include_usage': true}")
    return _flag(options, "include_usage", "stream_options.include_usage")


def _flag(data: Mapping[str, Any], name: str, param: str | None = None) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(param or name, value, "true or false")
    return bool(value)


def _extensions(given: Any, headers: Mapping[bytes, bytes], default_preference: float) -> Extensions:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise _wrong(EXTENSION_KEY, given, f"an object with any of {', '.join(_EXTENSIONS)}")
    unknown = next((name for name in given if name not in _EXTENSIONS), None)
    if unknown is not None:
        raise InvalidRequest(
            f"Unknown key {unknown[:40]!r} in 'atoll'. Allowed are {', '.join(_EXTENSIONS)}",
            param=f"{EXTENSION_KEY}.{unknown[:40]}",
        )
    preference = _either(given, "preference", headers, b"x-atoll-preference")
    max_cost_usd = _either(given, "max_cost_usd", headers, b"x-atoll-max-cost-usd")
    return Extensions(
        preference=Preference(
            default_preference if preference is None else _number(preference, "preference", 0, 1),
            None if max_cost_usd is None else _number(max_cost_usd, "max_cost_usd", 0, math.inf),
        ),
        session=_session(_either(given, "session", headers, b"x-atoll-session")),
        explain=_flag(given, "explain", f"{EXTENSION_KEY}.explain"),
    )


def _either(given: Mapping[str, Any], name: str, headers: Mapping[bytes, bytes], header: bytes) -> Any:
    """The body's value, else the header's; a header's text is read as a number by `_number`."""
    value = given.get(name)
    if value is None and header in headers:
        return headers[header].decode("latin-1")
    return value


def _number(value: Any, name: str, low: float, high: float) -> float:
    allowed = f"a number from {low:g} to {high:g}" if high < math.inf else f"a number of at least {low:g}"
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _wrong(f"{EXTENSION_KEY}.{name}", value, allowed) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high) or value == math.inf:
        raise _wrong(f"{EXTENSION_KEY}.{name}", value, allowed)
    return float(value)


def _session(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_SESSION_CHARS:
        raise _wrong(f"{EXTENSION_KEY}.session", value, f"a text of 1 to {_MAX_SESSION_CHARS} characters")
    return value


def _wrong(param: str, value: Any, allowed: str) -> InvalidRequest:
    found = "it is missing" if value is None else f"found {_shown(value)}"
    return InvalidRequest(f"{param!r} must be {allowed}; {found}", param=param)


def _shown(value: Any) -> str:
    """A value as JSON, cut short without rendering all of a large one."""
    if isinstance(value, str):
        value = value[:80]
    elif isinstance(value, list | dict) and value:
        return "a list" if isinstance(value, list) else "an object"
    return orjson.dumps(value).decode()[:80]
