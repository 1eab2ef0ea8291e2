"""When an upstream says it may be called again, in any of the ways upstreams say so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_UNITS_S: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)")
_RESET: Final = re.compile(r"(?:x-ratelimit-reset(?:-(?P<kind>.+))?|anthropic-ratelimit-(?P<anthropic>.+)-reset)")
_EPOCH_SECONDS: Final = 1e9
"""Numbers this large are points in time, those a thousand times larger in milliseconds."""


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds to wait, by `retry-after-ms`, `retry-after` (seconds or a date) or rate-limit resets; None if unsaid.

    Names in `headers` are lower case. Of several resets, those of exhausted limits count, and the latest of them.
    """
    now = now or datetime.now(UTC)
    if (value := headers.get("retry-after-ms")) is not None and (seconds := _number(value)) is not None:
        return max(0.0, seconds / 1000)
    if (value := headers.get("retry-after")) is not None and (waiting := _wait_s(value, now)) is not None:
        return waiting
    resets: list[tuple[bool, float]] = []
    for name, value in headers.items():
        match = _RESET.fullmatch(name)
        if match is None or (waiting := _wait_s(value, now)) is None:
            continue
        if match["anthropic"]:
            remaining = headers.get(f"anthropic-ratelimit-{match['anthropic']}-remaining")
        else:
            remaining = headers.get("-".join(filter(None, ("x-ratelimit-remaining", match["kind"]))))
        resets.append((remaining is not None and _number(remaining) == 0, waiting))
    exhausted = [waiting for is_exhausted, waiting in resets if is_exhausted]
    return max(exhausted or [waiting for _, waiting in resets], default=None)


def _wait_s(value: str, now: datetime) -> float | None:
    """Seconds from a number, a duration such as `6m0s`, a point in time or a date; None for anything else."""
    value = value.strip()
    number = _number(value)
    if number is not None:
        if number > _EPOCH_SECONDS:
            number = number / (1000 if number > _EPOCH_SECONDS * 1000 else 1) - now.timestamp()
        return max(0.0, number)
    parts = _DURATION_PART.findall(value)
    if parts and "".join(map("".join, parts)) == value:
        return sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)
    moment = _moment(value)
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _moment(value: str) -> datetime | None:
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = read(value)
        except ValueError:
            continue
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return None


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None
