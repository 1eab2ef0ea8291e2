"""`atoll models`."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.commands.candidates import echo_candidates, facts_of_all
from atoll.commands.options import config_option, json_option, read_catalog
from atoll.commands.output import echo_json


@click.command(
    epilog="""
\b
Examples:
  atoll models
  atoll models --json | jq -r '.[] | select(.is_routable) | .name'
"""
)
@config_option
@json_option
def models(config_path: Path | None, as_json: bool) -> None:
    """List what can be asked for, with prices. Needs no running gateway.

    Quality is what the shipped prior, or `quality_prior` in the configuration, expects before any feedback; `auto` says
    which ones routing may choose.
    """
    settings, catalog = read_catalog(config_path)
    if as_json:
        echo_json(facts_of_all(settings, catalog))
    else:
        echo_candidates(settings, catalog)
