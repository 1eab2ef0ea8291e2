"""Alembic's environment and revisions of the ledger, shipped so that a database is brought up to date at start."""
