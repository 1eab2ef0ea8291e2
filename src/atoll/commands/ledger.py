"""`atoll ledger`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from atoll.commands.options import config_option, json_option, read_settings
from atoll.commands.output import (
    NOTHING,
    count,
    echo_json,
    echo_json_line,
    echo_table,
    number,
    one_line,
    seconds,
    table,
    terminal_safe,
    usd,
)
from atoll.commands.when import local_time, when

if TYPE_CHECKING:
    from atoll.gateway.ledger import Filters, LedgerRecord, Reader

_F = TypeVar("_F", bound=Callable[..., Any])

_FOLLOW_INTERVAL_S: Final = 0.3
_MAX_REASON_CHARS: Final = 60
_HEAD: Final = ["time", "request", "model", ">status", ">in", ">out", ">cost", ">took", ">score", "reason or error"]


@click.group()
def ledger() -> None:
    """Read what was asked, decided, answered and paid.

    The ledger has one row per request. It lies in the data folder of the configuration, and may be read while the
    gateway runs.
    """


def place_options(function: _F) -> _F:
    """Where the ledger is."""
    data_dir = click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="The data folder.  [default: data_dir of the configuration]",
    )
    return config_option(data_dir(function))


def filter_options(function: _F) -> _F:
    """Which rows; `filters_of` takes them."""
    for option in (
        click.option("--errors", is_flag=True, help="Failed requests only."),
        click.option("--key", "key_id", help="Of this API key, by the id that the ledger shows."),
        click.option("--session", help="Of this session."),
        click.option("--model", help="Asked for, or answered by, this model."),
        click.option("--until", type=when, help="Started before: as --since."),
        click.option("--since", type=when, help="Started at or after: 30m, 2h, 7d ago, or 2026-12-01T15:30."),
    ):
        function = option(function)
    return function


@ledger.command(
    epilog="""
\b
Examples:
  atoll ledger tail
  atoll ledger tail -n 100 --errors --since 1d
  atoll ledger tail --follow --json | jq .cost_usd
"""
)
@place_options
@filter_options
@click.option("-n", "--lines", "rows", type=click.IntRange(0, 1_000_000), default=20, show_default=True, help="Rows.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new rows as they are written.")
@json_option
def tail(rows: int, follow: bool, as_json: bool, config_path: Path | None, data_dir: Path | None, **given: Any) -> None:
    """Show the last requests, the latest at the end. With --json, one object a line."""
    with _opened(config_path, data_dir) as reader:
        filters = filters_of(**given)
        last = reader.tail(1)
        records = reader.tail(rows, filters)
        _echo_records(records, as_json=as_json, has_head=True)
        seen = max([0, *(record.seq for record in [*records, *last])])
        while follow:
            time.sleep(_FOLLOW_INTERVAL_S)
            for record in reader.iterate(filters, after_seq=seen):
                _echo_records([record], as_json=as_json, has_head=False)
                seen = record.seq


@ledger.command(
    epilog="""
\b
Examples:
  atoll ledger show req_019ad0c1f3a2b4c5d6e7f8a9b0c1
  atoll ledger show req_019ad0c1f3a2b4c5d6e7f8a9b0c1 --json | jq .decision
"""
)
@click.argument("request_id")
@place_options
@json_option
def show(request_id: str, as_json: bool, config_path: Path | None, data_dir: Path | None) -> None:
    """Show all that is known of one request.

    REQUEST_ID is the `x-atoll-request-id` of its answer.
    """
    from atoll.errors import DataError

    with _opened(config_path, data_dir) as reader:
        record = reader.get(request_id)
    if record is None:
        raise DataError(f"There is no request {request_id!r} in this ledger. `atoll ledger tail` shows the last ones")
    facts = facts_of(record)
    if as_json:
        echo_json(facts)
        return
    decision = facts.pop("decision")
    width = max(map(len, facts))
    for name, value in facts.items():
        if value is not None:
            click.echo(f"{name:{width}}  {_shown(name, value)}")
    if isinstance(decision, dict) and decision.get("estimates"):
        click.echo()
        _echo_estimates(decision)


@ledger.command(
    epilog="""
\b
Examples:
  atoll ledger totals --since 7d
  atoll ledger totals --by key --json
"""
)
@place_options
@filter_options
@click.option("--by", type=click.Choice(["model", "key"]), default="model", show_default=True, help="What to sum by.")
@json_option
def totals(by: Any, as_json: bool, config_path: Path | None, data_dir: Path | None, **given: Any) -> None:
    """Sum requests, tokens and cost by model or by key."""
    with _opened(config_path, data_dir) as reader:
        sums = reader.totals(by, filters_of(**given))
    if as_json:
        echo_json([asdict(total) for total in sums])
        return
    echo_table(
        [by, ">requests", ">errors", ">in", ">cached", ">out", ">cost", ">mean took", ">scores", ">mean score"],
        [
            [
                one_line(total.name or NOTHING, 60),
                count(total.requests),
                count(total.errors),
                count(total.prompt_tokens),
                count(total.cached_tokens),
                count(total.completion_tokens),
                usd(total.cost_usd),
                seconds(total.mean_latency_s),
                count(total.feedback),
                number(total.mean_score),
            ]
            for total in sums
        ],
    )


@ledger.command(
    epilog="""
\b
Examples:
  atoll ledger export > rows.jsonl
  atoll ledger export --format csv --since 30d --out december.csv
  atoll ledger export --format parquet --out rows.parquet     needs pip install 'atoll[train]'
"""
)
@place_options
@filter_options
@click.option("--format", "kind", type=click.Choice(["jsonl", "csv", "parquet"]), default="jsonl", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("-"),
    help="The file to write.  [default: standard output]",
)
def export(kind: str, out: Path, config_path: Path | None, data_dir: Path | None, **given: Any) -> None:
    """Write rows with their feedback to a file, in the order in which they were written.

    Any number of rows: they are written as they are read.
    """
    from atoll.commands.export import EXPORTERS

    with _opened(config_path, data_dir) as reader:
        EXPORTERS[kind](reader.iterate(filters_of(**given)), out)


@contextmanager
def _opened(config_path: Path | None, data_dir: Path | None) -> Iterator[Reader]:
    """Raises DataError where there is no ledger, or none that can be read."""
    from sqlalchemy.exc import DBAPIError

    from atoll.errors import DataError
    from atoll.gateway.ledger import Reader
    from atoll.gateway.ledger.database import Database

    # Whoever names the folder need not have a right configuration.
    database = Database((data_dir or read_settings(config_path).data_path).expanduser())
    database.open_existing()
    try:
        yield Reader(database)
    except DBAPIError as error:
        raise DataError(f"The ledger {database.where} cannot be read: {error.orig}") from error
    finally:
        database.close()


def filters_of(
    since: float | None, until: float | None, model: str | None, session: str | None, key_id: str | None, errors: bool
) -> Filters:
    from atoll.gateway.ledger import Filters

    return Filters(since, until, model, key_id, session, is_error=True if errors else None)


def facts_of(record: LedgerRecord) -> dict[str, Any]:
    """For JSON: the decision as an object, the vector in base64."""
    from base64 import b64encode

    import orjson

    facts = asdict(record)
    decision = facts.pop("decision_json")
    try:
        facts["decision"] = orjson.loads(decision) if decision is not None else None
    except orjson.JSONDecodeError:
        facts["decision"] = decision
    if record.embedding is not None:
        facts["embedding"] = b64encode(record.embedding).decode()
    return facts


def _echo_records(records: list[LedgerRecord], *, as_json: bool, has_head: bool) -> None:
    if as_json:
        for record in records:
            echo_json_line(facts_of(record))
        return
    lines = [_cells(record) for record in records]
    if has_head:
        echo_table(_HEAD, lines)
    else:
        # Alone, a row cannot know how wide the others are; these widths suit most.
        for cells in lines:
            click.echo(table(_HEAD, [cells])[1])


def _cells(record: LedgerRecord) -> list[str]:
    model = record.served_model or NOTHING
    if record.requested_model not in (None, record.served_model):
        model = f"{record.requested_model} → {model}"
    return [
        local_time(record.started_at),
        record.request_id,
        one_line(model, 60),
        str(record.status),
        count(record.prompt_tokens),
        count(record.completion_tokens),
        usd(record.cost_usd),
        seconds(record.latency_s),
        number(record.feedback_score),
        one_line(record.error_message or record.reason or NOTHING, _MAX_REASON_CHARS),
    ]


def _shown(name: str, value: Any) -> str:
    if name in ("started_at", "feedback_at"):
        return local_time(value)
    if name == "cost_usd":
        return usd(value)
    if name == "embedding":
        return f"{len(value) * 3 // 16} numbers"
    return terminal_safe(str(value))


def _echo_estimates(decision: dict[str, Any]) -> None:
    echo_table(
        ["", "candidate", ">quality", ">± std", ">out tokens", ">cost", ">score"],
        [
            [
                "→" if estimate.get("candidate") == decision.get("candidate") else "",
                one_line(str(estimate.get("candidate")), 60),
                number(estimate.get("quality"), 3),
                number(estimate.get("quality_std"), 3),
                number(estimate.get("output_tokens"), 0),
                usd(estimate.get("cost_usd")),
                number(estimate.get("score"), 4),
            ]
            for estimate in decision["estimates"]
        ],
    )
