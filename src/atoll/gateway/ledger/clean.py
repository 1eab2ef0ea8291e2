"""Makes any text fit to be kept: bounded, without control characters, without the bytes of images and files.

Nobody reads five megabytes of base64 in a ledger, and an error that echoes a request holds them as well. What is taken
out leaves its type, size and hash.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from typing import Final

_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Controls except tab and line ends (a terminal would obey them), and lone surrogates (no database takes them)."""
_REPLACEMENT: Final = "\ufffd"
_ELLIPSIS: Final = "…"

_WINDOW_CHARS: Final = 65_536
"""How much one search looks at, so that a long text never holds the interpreter for long."""
_MIN_RUN_CHARS: Final = 512
_MIN_VECTOR_NUMBERS: Final = 32
_BASE64: Final = r"(?:[A-Za-z0-9+/_-]|\\[/nr])"
"""JSON may write a slash as `\\/`, and mail wraps its lines."""
# Attempts begin only where a run begins, which keeps the search linear.
_BINARY_START: Final = re.compile(rf"(?<![A-Za-z0-9+/_-]){_BASE64}{{{_MIN_RUN_CHARS}}}")
_BINARY_MORE: Final = re.compile(rf"{_BASE64}+={{0,2}}|={{1,2}}")
_VECTOR_START: Final = re.compile(rf"(?<=\[)[\d.,eE+\-\s]{{{_MIN_RUN_CHARS}}}")
_VECTOR_MORE: Final = re.compile(r"[\d.,eE+\-\s]+")
_BULK_START: Final = re.compile(f"(?P<vector>{_VECTOR_START.pattern})|(?P<binary>{_BINARY_START.pattern})")
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,\Z")
_ESCAPES: Final = re.compile(r"\\[nr]|\\(?=/)")

_MAGIC: Final = (
    (b"\x89PNG\r\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
)


def clean_text(text: str, max_chars: int) -> str:
    """`text` without control characters and lone surrogates, at most `max_chars` long; a cut text ends in `…`."""
    if len(text) > max_chars:
        text = text[: max_chars - 1] + _ELLIPSIS
    if text.isprintable():
        return text
    return _UNSAFE.sub(_REPLACEMENT, text)


def clean_content(text: str, max_chars: int) -> str:
    """As `clean_text`, with base64 and vectors of numbers replaced by their type, size and hash.

    What was JSON stays JSON unless it is cut.
    """
    if len(text) < _MIN_RUN_CHARS:
        return clean_text(text, max_chars)
    kept: list[str] = []
    room = max_chars + 1
    at = 0
    while at < len(text) and room > 0:
        piece, at = _next_piece(text, at)
        kept.append(piece[:room])
        room -= len(piece)
    return clean_text("".join(kept), max_chars)


def _next_piece(text: str, at: int) -> tuple[str, int]:
    """What is kept of `text` from `at` on, and where to go on from."""
    end = min(at + _WINDOW_CHARS, len(text))
    found = _BULK_START.search(text, at, end)
    if found is None:
        # A run may begin near the window's end: it is met whole in the next one.
        stop = end if end == len(text) else end - _MIN_RUN_CHARS
        return text[at:stop], stop
    if found.start() > at:
        return text[at : found.start()], found.start()
    if found.lastgroup == "vector":
        stop = _run_end(_VECTOR_MORE, text, found.end())
        return _vector_note(text[at:stop]), stop
    stop = _run_end(_BINARY_MORE, text, found.end())
    return _binary_note(text, at, stop), stop


def _run_end(more: re.Pattern[str], text: str, at: int) -> int:
    while (found := more.match(text, at, at + _WINDOW_CHARS)) is not None:
        at = found.end()
    return at


def _binary_note(text: str, start: int, end: int) -> str:
    run = text[start:end]
    if not _is_varied(run[:_MIN_RUN_CHARS]):
        return run
    data = _decoded(run)
    prefix = _DATA_URL.search(text, max(0, start - 200), start)
    kind = prefix.group(1) if prefix else _sniffed(data)
    return f"[{kind}, {len(data)} bytes, sha256:{hashlib.sha256(data).hexdigest()}]"


def _is_varied(run: str) -> bool:
    """Tells base64 from a ruler of dashes, a long word or a number."""
    return any(c.islower() for c in run) and any(c.isupper() for c in run) and any(c.isdigit() for c in run)


def _decoded(run: str) -> bytes:
    """The bytes behind base64; of a run that is none, its own."""
    encoded = _ESCAPES.sub("", run).rstrip("=").replace("-", "+").replace("_", "/")
    # A cut run may end within a group of four: one character alone says nothing.
    encoded = encoded[: len(encoded) - 1] if len(encoded) % 4 == 1 else encoded
    try:
        return binascii.a2b_base64(encoded + "=" * (-len(encoded) % 4))
    except binascii.Error:
        return run.encode()


def _sniffed(data: bytes) -> str:
    if data[:4] == b"RIFF":
        return "audio/wav" if data[8:12] == b"WAVE" else "image/webp"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), "application/octet-stream")


def _vector_note(run: str) -> str:
    commas = run.count(",")
    if commas < _MIN_VECTOR_NUMBERS:
        return run
    is_cut = run.rstrip().endswith(",")
    digest = hashlib.sha256(run.encode()).hexdigest()
    return f'"[{commas + (not is_cut)} numbers, sha256:{digest}]"' + ("," if is_cut else "")
