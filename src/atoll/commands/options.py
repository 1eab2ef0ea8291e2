"""Options that several commands share, and what they lead to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from atoll.config import Settings
    from atoll.gateway.catalog import Catalog

_F = TypeVar("_F", bound=Callable[..., Any])

DEFAULT_CONFIG: Final = Path("atoll.yaml")


def config_option(function: _F) -> _F:
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="ATOLL_CONFIG",
        show_envvar=True,
        help="The configuration file.  [default: ./atoll.yaml if it exists]",
    )(function)


def json_option(function: _F) -> _F:
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON, for programs.")(function)


def config_file(config_path: Path | None) -> Path | None:
    """The file to read: the one named, else the one that lies here, else none."""
    if config_path is not None:
        return config_path
    return DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None


def read_settings(config_path: Path | None) -> Settings:
    """Raises ConfigError, which tells all that is wrong."""
    from atoll.config import load_settings

    return load_settings(config_file(config_path))


def read_catalog(config_path: Path | None) -> tuple[Settings, Catalog]:
    from atoll.gateway.catalog import build_catalog

    settings = read_settings(config_path)
    return settings, build_catalog(settings, os.environ)
