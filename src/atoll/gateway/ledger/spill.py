"""Where rows wait on disk while the database cannot take them: one JSON line a row, one file a process.

A file is locked by the process that writes it. Whoever gets the lock knows that its owner is gone, and takes over.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from atoll.gateway.ledger.encode import Values, from_json_line, to_json_line

_PATTERN: Final = "ledger.spill-*.jsonl"
MAX_SPILL_BYTES: Final = 4_000_000_000
"""A database that is down for days must not fill the disk."""
_READ_BYTES: Final = 1_000_000


class Peek(NamedTuple):
    rows: list[Values]
    read_to: int
    """Where the rows after these begin: for `taken`."""
    torn: int


class SpillFile:
    """Rows are appended at the end and taken from the front. Every method may raise OSError."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._read_at = 0
        self._size = os.fstat(handle).st_size

    @classmethod
    def create(cls, folder: Path) -> Self:
        path = folder / f"ledger.spill-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, handle)

    @classmethod
    def orphans(cls, folder: Path) -> Iterator[Self]:
        """The files whose writers are gone, now locked by us."""
        for path in sorted(folder.glob(_PATTERN)):
            try:
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            if os.fstat(handle).st_nlink == 0:
                # Another process took it over between our open and our lock.
                os.close(handle)
                continue
            yield cls(path, handle)

    @property
    def is_empty(self) -> bool:
        return self._read_at >= self._size

    def append(self, rows: Sequence[Values]) -> None:
        """Keep all of `rows`, or raise and keep none."""
        lines = b"".join(map(to_json_line, rows))
        if self._size + len(lines) > MAX_SPILL_BYTES:
            raise OSError(f"{self.path} has reached {MAX_SPILL_BYTES} bytes")
        written = 0
        try:
            while written < len(lines):
                written += os.pwrite(self._handle, memoryview(lines)[written:], self._size + written)
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(lines)

    def peek(self) -> Peek:
        """The next rows. Torn lines, of a killed writer, are passed over."""
        data = os.pread(self._handle, _READ_BYTES, self._read_at)
        if b"\n" not in data:
            # One row longer than that, or a torn one at the end.
            data = os.pread(self._handle, self._size - self._read_at, self._read_at)
        end = len(data) if self._read_at + len(data) >= self._size else data.rindex(b"\n") + 1
        lines = [line for line in data[:end].split(b"\n") if line]
        rows = [row for line in lines if (row := from_json_line(line)) is not None]
        return Peek(rows, self._read_at + end, torn=len(lines) - len(rows))

    def taken(self, read_to: int) -> None:
        """Forget the rows before `read_to`: they are in the database."""
        self._read_at = read_to
        if self.is_empty:
            os.ftruncate(self._handle, 0)
            self._read_at = self._size = 0

    def close(self) -> None:
        """Let go of the file; delete it when it holds nothing."""
        if self.is_empty:
            self.path.unlink(missing_ok=True)
        os.close(self._handle)
