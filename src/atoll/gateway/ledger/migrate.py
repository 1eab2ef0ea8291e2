"""Brings a ledger's tables up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from atoll.errors import DataError

_FOLDER: Final = Path(__file__).parent / "migrations"


def upgrade(connection: Connection, where: str) -> None:
    """Run the migrations that the database lacks, in the connection's transaction.

    Raises DataError, naming the database by `where`, when it was written by a newer Atoll.
    """
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    head = scripts.get_current_head()
    if current == head:
        return
    known = {script.revision for script in scripts.walk_revisions()}
    if current is not None and current not in known:
        raise DataError(
            f"The ledger {where} was made by a newer Atoll: its revision is {current!r}, and this Atoll knows "
            f"revisions up to {head!r}. Install the newer Atoll, or set data_dir to another folder"
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
