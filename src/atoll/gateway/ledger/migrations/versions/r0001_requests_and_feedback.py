"""One row per request, and the feedback on it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column(
            "seq",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            autoincrement=True,
            nullable=False,
            comment="the order in which rows were written",
        ),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text),
        sa.Column("session", sa.Text),
        sa.Column("requested_model", sa.Text),
        sa.Column("served_model", sa.Text),
        sa.Column("upstream", sa.Text),
        sa.Column("upstream_id", sa.Text),
        sa.Column("router", sa.Text),
        sa.Column("router_version", sa.Text),
        sa.Column("propensity", sa.Double),
        sa.Column("reason", sa.Text),
        sa.Column("preference", sa.Double),
        sa.Column("is_streaming", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("cached_tokens", sa.BigInteger),
        sa.Column("completion_tokens", sa.BigInteger),
        sa.Column("reasoning_tokens", sa.BigInteger),
        sa.Column("is_usage_estimated", sa.Boolean, nullable=False),
        sa.Column("cost_usd", sa.Double),
        sa.Column("ttft_s", sa.Double),
        sa.Column("latency_s", sa.Double),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("error_code", sa.Text),
        sa.Column("error_message", sa.Text),
        sa.Column("embedding_space", sa.Text),
        sa.Column("decision_json", sa.Text),
        sa.Column("embedding", sa.LargeBinary),
        sa.Column("prompt_json", sa.Text),
        sa.Column("answer_text", sa.Text),
        sa.PrimaryKeyConstraint("seq", name="pk_requests"),
        sa.UniqueConstraint("request_id", name="uq_requests_request_id"),
    )
    op.create_index("ix_requests_started_at", "requests", ["started_at"])
    op.create_table(
        "feedback",
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("score", sa.Double, nullable=False),
        sa.Column("comment", sa.Text),
        sa.Column("given_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_feedback"),
        sa.ForeignKeyConstraint(["request_id"], ["requests.request_id"], name="fk_feedback_request_id"),
    )


def downgrade() -> None:
    op.drop_table("feedback")
    op.drop_table("requests")
