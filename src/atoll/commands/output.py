"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
import orjson

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
RIGHT: Final = ">"
LEFT: Final = "<"
NOTHING: Final = "-"


def terminal_safe(text: str) -> str:
    """`text` without what a terminal would obey: models and clients wrote it."""
    return _CONTROLS.sub("\ufffd", text)


def one_line(text: str, max_chars: int) -> str:
    flat = terminal_safe(" ".join(text.split()))
    return flat if len(flat) <= max_chars else flat[: max_chars - 1] + "…"


def write(text: str) -> None:
    """Text as it is, at once; what the terminal's encoding lacks becomes `?`."""
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "replace"))
    sys.stdout.buffer.flush()


def echo_json(data: Any) -> None:
    """Indented, one document."""
    click.echo(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode())


def echo_json_line(data: Any) -> None:
    click.echo(orjson.dumps(data).decode())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns. A head that begins with `>` aligns its column to the right."""
    names = [name.removeprefix(RIGHT) for name in head]
    widths = [max(len(line[i]) for line in [names, *rows]) for i in range(len(head))]
    aligns = [RIGHT if name.startswith(RIGHT) else LEFT for name in head]
    return [
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(line, aligns, widths, strict=True)).rstrip()
        for line in [names, *rows]
    ]


def echo_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    first, *others = table(head, rows)
    click.secho(first, bold=True)
    for line in others:
        click.echo(line)


def usd(amount: float | None) -> str:
    """An amount in dollars, with as many digits as a small one needs."""
    if amount is None:
        return NOTHING
    if amount == 0:
        return "$0"
    return f"${amount:.2f}" if abs(amount) >= 1 else f"${amount:.3g}" if abs(amount) >= 0.0001 else f"${amount:.2e}"


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    return NOTHING if value is None else f"{value}"


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
