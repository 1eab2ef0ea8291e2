"""No secret leaves in a log line, an error or the ledger.

What is known to be secret, and what looks like it, is masked.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Final

from atoll.config import Settings, UpstreamSettings

MASK: Final = "[redacted]"
_MIN_SECRET_CHARS: Final = 6
"""Shorter values would mask ordinary text."""
_LOOKS_SECRET: Final = re.compile(
    r"""(?xi)
    \b(?:sk|pk|rk|gsk|xai|hf|ghp|glpat|nvapi)[-_][a-z0-9_\-]{12,}   # keys of known providers
    | \bAIza[a-z0-9_\-]{20,}
    | \beyJ[a-z0-9_\-]{8,}\.[a-z0-9_\-]{8,}\.[a-z0-9_\-]*           # JSON web tokens
    | (?<=bearer\s)[^\s"',;]{6,}
    | (?<=api[-_]key["'\s:=]{1})[^\s"',;]{6,}
    """
)


class Redactor:
    """Masks the given secrets, their SHA-256 in hex, and whatever looks like a key."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS}
        known |= {hashlib.sha256(secret.encode()).hexdigest() for secret in known}
        # Longest first: a key that begins with another one is masked whole.
        ordered = sorted(known, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def text(self, text: str, max_chars: int | None = None) -> str:
        """`text` without secrets; with `max_chars`, cut to that length after masking."""
        if max_chars is not None:
            # Masking never needs more than what is kept and one key beyond it.
            text = text[: max_chars + 1000]
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _LOOKS_SECRET.sub(MASK, text)
        if max_chars is not None and len(text) > max_chars:
            return text[: max_chars - 1] + "…"
        return text


class RedactingFilter(logging.Filter):
    """At the sink: put on handlers, it sees every record whatever its logger."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = self._redactor.text(record.getMessage())
        record.args = None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self._redactor.text(record.exc_text)
        return True


def secrets_of(settings: Settings, upstreams: Iterable[UpstreamSettings]) -> Iterator[str]:
    """Every secret that the configuration holds."""
    for key in settings.server.api_keys:
        yield key.get_secret_value()
    for upstream in upstreams:
        api_key = getattr(upstream, "api_key", None)
        if api_key is not None:
            yield api_key.get_secret_value()
        yield from getattr(upstream, "headers", {}).values()
