"""What a failed attempt means: whether another candidate may do better, and what the client is told.

A client's own key is fine when the gateway's key at an upstream is not, so an upstream's 401 is a 502 here. What is the
client's own fault (400, 404, 422) goes through as the upstream said it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import orjson

from atoll.errors import (
    RateLimited,
    RequestError,
    Unavailable,
    UpstreamFault,
    UpstreamRejected,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from atoll.gateway.redact import Redactor
from atoll.gateway.retry_after import retry_after_s
from atoll.types import Candidate

MAX_MESSAGE_CHARS: Final = 1000
_MAX_PASSED_BYTES: Final = 16_384
_OVERFLOW_CODE: Final = "context_length_exceeded"
_OVERFLOW: Final = re.compile(
    r"context.{0,3}length|maximum context|context window|prompt is too long|input is too long|too many tokens"
    r"|exceeds? the (?:model's )?(?:maximum|max) (?:number of )?(?:input )?tokens",
    re.IGNORECASE,
)
_ELSEWHERE_STATUS: Final = frozenset({401, 402, 403, 404, 408, 409, 425, 429})


class Remedy(Enum):
    """What may help after a failed attempt."""

    NONE = "the request itself is wrong"
    MORE_CONTEXT = "a candidate with more context"
    ANOTHER = "any other candidate"


class PassedThrough(RequestError):
    """An upstream's error that the client is to see as the upstream put it."""

    type = "invalid_request_error"

    def __init__(self, message: str, body: bytes, *, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message, status=status, code=code, param=param)
        self._body = body

    def body_bytes(self) -> bytes:
        return self._body


def remedy_for(fault: RequestError) -> Remedy:
    """What may help after `fault`."""
    if isinstance(fault, PassedThrough):
        if fault.http_status == 400 and (fault.error_code == _OVERFLOW_CODE or _OVERFLOW.search(fault.message)):
            return Remedy.MORE_CONTEXT
        return Remedy.ANOTHER if fault.http_status in _ELSEWHERE_STATUS else Remedy.NONE
    return Remedy.ANOTHER


def fault_of_answer(
    candidate: Candidate, status: int, headers: Mapping[str, str], body: bytes, redactor: Redactor
) -> RequestError:
    """The error that an upstream's answer with an error status stands for."""
    error = _error_of(body)
    message = redactor.text(_message_of(error, body) or f"status {status} without a message", MAX_MESSAGE_CHARS)
    said = f"The upstream {candidate.upstream!r} of {candidate.name!r} answered {status}: {message}"
    if status in (401, 402, 403):
        return UpstreamRejected(
            f"{said}. The gateway's own key or account there is refused, not yours; its operator has to look",
            code="upstream_auth",
        )
    if status == 429:
        return RateLimited(said, retry_after_s=retry_after_s(headers), code=_text(error.get("code")))
    if status in (408, 504):
        return UpstreamTimeout(said)
    if status == 503:
        return Unavailable(said, code="upstream_unavailable", retry_after_s=retry_after_s(headers))
    if status >= 500 or status < 400:
        return UpstreamRejected(said, retry_after_s=retry_after_s(headers))
    return _passed_through(status, error, message, body, redactor)


def fault_of_event(candidate: Candidate, error: Any, redactor: Redactor) -> RequestError:
    """The error that an `error` event at the start of a stream stands for."""
    details = error if isinstance(error, dict) else {"message": error}
    body = orjson.dumps({"error": details}, default=str)
    code = details.get("status") or details.get("code")
    number = int(code) if isinstance(code, int) or (isinstance(code, str) and code.isdigit()) else 0
    return fault_of_answer(candidate, number if 400 <= number < 600 else 500, {}, body, redactor)


def most_useful(faults: Sequence[tuple[Candidate, RequestError]]) -> RequestError:
    """Of the failures of all attempts, the one that tells the client most, with the soonest time to come back."""
    assert faults
    if len(faults) == 1:
        return faults[0][1]
    best = min((fault for _, fault in faults), key=_rank)
    waits = [fault.retry_after_s for _, fault in faults if fault.retry_after_s is not None]
    told = "; ".join(f"{candidate.name}: {fault.message[:200]}" for candidate, fault in faults)
    best.message = f"All {len(faults)} candidates failed. {told}"[:MAX_MESSAGE_CHARS]
    best.retry_after_s = min(waits, default=None)
    return best


def _rank(fault: RequestError) -> int:
    """Waiting helps the client most, then a retry, then nothing but the operator."""
    if isinstance(fault, PassedThrough):
        return 5
    if isinstance(fault, RateLimited):
        return 0
    if isinstance(fault, Unavailable):
        return 1
    if isinstance(fault, UpstreamTimeout):
        return 2
    if isinstance(fault, UpstreamFault) and fault.error_code == "upstream_auth":
        return 6
    return 4 if isinstance(fault, UpstreamUnreachable) else 3


def _passed_through(
    status: int, error: Mapping[str, Any], message: str, body: bytes, redactor: Redactor
) -> PassedThrough:
    code, param = _text(error.get("code")), _text(error.get("param"))
    is_ours = bool(error) and isinstance(error.get("message"), str) and len(body) <= _MAX_PASSED_BYTES
    if is_ours:
        shown = redactor.text(body.decode("utf-8", "replace")).encode()
    else:
        kind = _text(error.get("type")) or PassedThrough.type
        shown = orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
    return PassedThrough(message, shown, status=status, code=code, param=param)


def _error_of(body: bytes) -> Mapping[str, Any]:
    """The `error` object of an answer, or an empty one."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    error = data.get("error") if isinstance(data, dict) else None
    return error if isinstance(error, dict) else {}


def _message_of(error: Mapping[str, Any], body: bytes) -> str:
    message = error.get("message")
    if isinstance(message, str):
        return message
    return body[: 4 * MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip()


def _text(value: Any) -> str | None:
    return str(value)[:100] if isinstance(value, str | int) and value != "" else None
