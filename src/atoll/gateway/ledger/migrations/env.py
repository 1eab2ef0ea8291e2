"""Run by Alembic. `atoll.gateway.ledger.migrate` hands the open connection over."""

from __future__ import annotations

from alembic import context

from atoll.gateway.ledger.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    # On SQLite too: the ledger's connections begin their transactions themselves.
    transactional_ddl=True,
    # SQLite changes a column by copying the table.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
