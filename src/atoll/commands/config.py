"""`atoll config`."""

from __future__ import annotations

from pathlib import Path

import click

from atoll.commands.candidates import echo_candidates, facts_of_all
from atoll.commands.options import config_file, config_option, json_option, read_catalog
from atoll.commands.output import echo_json


@click.group()
def config() -> None:
    """Check the configuration."""


@config.command(
    epilog="""
\b
Examples:
  atoll config check                       ./atoll.yaml, or what Atoll serves without one
  atoll config check --config prod.yaml && systemctl reload atoll
"""
)
@config_option
@json_option
def check(config_path: Path | None, as_json: bool) -> None:
    """Read the configuration as `atoll serve` would, and say what it leads to.

    Everything that is wrong is told at once, with file, line and key; then the exit code is 2.
    """
    path = config_file(config_path)
    settings, catalog = read_catalog(config_path)
    if as_json:
        echo_json(
            {
                "config": str(path) if path is not None else None,
                "data_dir": str(settings.data_path),
                "upstreams": {name: upstream.kind for name, upstream in catalog.upstreams.items()},
                "candidates": facts_of_all(settings, catalog),
                "default_candidate": catalog.default,
                "notes": list(catalog.notes),
            }
        )
        return
    click.echo(f"{path} is right." if path is not None else "No configuration file: Atoll serves what it finds.")
    click.echo(f"Data folder {settings.data_path}; when routing fails, {catalog.default} answers.\n")
    echo_candidates(settings, catalog)
    for note in catalog.notes:
        click.echo(f"\n{note}")
