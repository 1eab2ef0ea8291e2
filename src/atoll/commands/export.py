"""Ledger rows as files: JSON lines, CSV, Parquet. Each takes any number of rows in constant memory."""

from __future__ import annotations

import csv
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from atoll.errors import DataError, MissingExtraError
from atoll.gateway.ledger.row import LedgerRecord

if TYPE_CHECKING:
    import pyarrow

_NAMES: Final = tuple(field.name for field in fields(LedgerRecord))
_ROWS_PER_GROUP: Final = 5000
_STANDARD_OUTPUT: Final = Path("-")
_SPREADSHEET_COMMANDS: Final = ("=", "+", "-", "@", "\t", "\r")


def export_jsonl(records: Iterable[LedgerRecord], out: Path) -> None:
    """The vector is base64 of its float32s; `decision_json` is text, as in the ledger."""
    import orjson

    with _binary(out) as file:
        for record in records:
            file.write(orjson.dumps(_plain(record), option=orjson.OPT_APPEND_NEWLINE))


def export_csv(records: Iterable[LedgerRecord], out: Path) -> None:
    """Text that a spreadsheet would run as a formula is led by an apostrophe: clients and models wrote it."""
    with _binary(out) as file:
        lines = _Lines(file)
        writer = csv.writer(lines)
        writer.writerow(_NAMES)
        for record in records:
            writer.writerow([_cell(value) for value in _plain(record).values()])


def export_parquet(records: Iterable[LedgerRecord], out: Path) -> None:
    """Typed columns; the vector is binary."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("Parquet", "train") from None
    schema = _schema()
    rows = iter(records)
    with _binary(out) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        while group := [asdict(record) for record in islice(rows, _ROWS_PER_GROUP)]:
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


Exporter = Callable[[Iterable[LedgerRecord], Path], None]
EXPORTERS: Final[dict[str, Exporter]] = {
    "jsonl": export_jsonl,
    "csv": export_csv,
    "parquet": export_parquet,
}


def _schema() -> pyarrow.Schema:
    import pyarrow

    kinds = {"int": pyarrow.int64(), "float": pyarrow.float64(), "bool": pyarrow.bool_(), "bytes": pyarrow.binary()}
    # The annotations are text: `int | None`.
    return pyarrow.schema(
        [(field.name, kinds.get(str(field.type).split(" ")[0], pyarrow.string())) for field in fields(LedgerRecord)]
    )


@contextmanager
def _binary(out: Path) -> Iterator[IO[bytes]]:
    """The file to write, which appears under its name only when it is complete."""
    if out == _STANDARD_OUTPUT:
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    # A pipe or a device takes the rows as they come.
    is_special = out.exists() and not out.is_file()
    part = out if is_special else out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        with part.open("wb") as file:
            yield file
        if not is_special:
            part.replace(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}. Name another file with --out") from None
    finally:
        if not is_special:
            part.unlink(missing_ok=True)


class _Lines:
    """Lets `csv` write to a binary file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.write(text.encode())


def _plain(record: LedgerRecord) -> dict[str, Any]:
    facts = asdict(record)
    if record.embedding is not None:
        facts["embedding"] = b64encode(record.embedding).decode()
    return facts


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_SPREADSHEET_COMMANDS) else value
