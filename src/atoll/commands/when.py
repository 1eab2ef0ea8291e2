"""Points in time on the command line."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Final

import click

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGO: Final = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)


def when(value: str) -> float:
    """Seconds since the epoch of `30m`, `2h`, `7d` ago, or of a date and time in ISO 8601.

    Local time unless it names a zone. Raises BadParameter for anything else.
    """
    ago = _AGO.fullmatch(value)
    if ago is not None:
        return time.time() - int(ago.group(1)) * _SECONDS[ago.group(2)]
    try:
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is no time. Write 30m, 2h, 7d, 2026-12-01 or 2026-12-01T15:30") from None


def local_time(timestamp: float) -> str:
    """To the second, in local time."""
    return datetime.fromtimestamp(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S")
