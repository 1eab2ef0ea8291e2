"""Every error that Atoll raises on purpose, with its HTTP status, OpenAI type and code, and log level, in one place.

    AtollError
    ├── ConfigError                    the configuration file, an environment variable or a flag is wrong
    ├── MissingExtraError              an optional part of Atoll is not installed
    ├── DataError                      a table, artefact or database cannot be used
    ├── RouterError                    a router was asked for something it cannot do
    ├── EngineError                    the local engine failed
    └── RequestError                   what a client sees; the only branch with an HTTP face
        ├── InvalidRequest       400   the body, a header or a parameter is wrong
        │   └── ContextOverflow  400   the prompt (and answer) do not fit into the model
        ├── NotAuthenticated     401
        ├── NotPermitted         403
        ├── NotFound             404
        │   └── ModelNotFound    404
        ├── PayloadTooLarge      413
        ├── RateLimited          429
        ├── ClientClosed         499   the client left; only ever logged
        ├── InternalFault        500   our own mistake, told without a stack trace
        ├── UpstreamFault        502   an upstream failed us
        │   ├── UpstreamRejected       it answered with an error status (the status the client gets varies)
        │   ├── UpstreamUnreachable    no connection, or it was lost
        │   ├── UpstreamMalformed      it answered something that is not the protocol
        │   └── UpstreamTimeout  504   connect, first byte, idle or total time was exceeded
        └── Unavailable          503   nothing can serve this now

A message quotes the value, says what is allowed and what to do next. It never holds a secret.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import orjson


class AtollError(Exception):
    """The root. `str(error)` is written for the person who has to act on it."""


class ConfigError(AtollError):
    """A configuration file, environment variable or flag is wrong."""


class MissingExtraError(AtollError):
    """An optional part is needed and not installed. `command` is what installs it, if not the extra alone."""

    def __init__(self, what: str, extra: str, *, command: str | None = None) -> None:
        run = f"pip install 'atoll[{extra}]'" + (f" && {command}" if command else "")
        super().__init__(f"{what} needs the optional part {extra!r}, which is not installed. Run: {run}")
        self.extra = extra


class DataError(AtollError):
    """An outcome table, an artefact or a database cannot be used."""


class RouterError(AtollError):
    """A router was asked for something it cannot do."""


class EngineError(AtollError):
    """The local engine failed or is not running."""


class RequestError(AtollError):
    """An error with an HTTP face, rendered as OpenAI's `{"error": {...}}`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    log_level: ClassVar[int] = logging.INFO

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code if code is not None else self.code
        self.http_status = status if status is not None else self.status
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.error_code}}

    def body_bytes(self) -> bytes:
        return orjson.dumps(self.body())


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class ContextOverflow(InvalidRequest):
    code = "context_length_exceeded"


class NotAuthenticated(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotPermitted(RequestError):
    status = 403
    type = "permission_error"
    code = "not_permitted"


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class PayloadTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class RateLimited(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ClientClosed(RequestError):
    status = 499
    type = "client_closed_request"
    code = "client_closed_request"


class InternalFault(RequestError):
    status = 500
    type = "server_error"
    code = "internal_error"
    log_level = logging.ERROR


class UpstreamFault(RequestError):
    status = 502
    type = "upstream_error"
    code = "upstream_error"
    log_level = logging.WARNING


class UpstreamRejected(UpstreamFault):
    code = "upstream_rejected"


class UpstreamUnreachable(UpstreamFault):
    code = "upstream_unreachable"


class UpstreamMalformed(UpstreamFault):
    code = "upstream_malformed"


class UpstreamTimeout(UpstreamFault):
    status = 504
    code = "upstream_timeout"


class Unavailable(RequestError):
    status = 503
    type = "server_error"
    code = "unavailable"
    log_level = logging.WARNING
