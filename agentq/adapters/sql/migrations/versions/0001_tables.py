"""The first tables."""

import uuid

import sqlalchemy as sa
from alembic import op

from agentq.adapters.sql.engine import now_plus
from agentq.adapters.sql.schema import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "agents",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("input_bytes_max", sa.BigInteger(), nullable=False),
        sa.Column("registered_at", UtcDateTime(), nullable=False),
        sa.Column("seen_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("agents_pkey")),
    )
    op.create_table(
        "deployment",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("oldest_code_version", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("deployment_pkey")),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer()),
        sa.Column("attempt", sa.Integer()),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("run_id", "sequence", name=op.f("events_pkey")),
    )
    op.create_table(
        "pauses",
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("reads", sa.Boolean(), nullable=False),
        sa.Column("paused_at", UtcDateTime(), nullable=False),
        sa.Column("paused_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tool", "agent", name=op.f("pauses_pkey")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("output", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("metadata", sa.JSON(none_as_null=True)),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("input_digest", sa.Text()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("started_at", UtcDateTime()),
        sa.Column("finished_at", UtcDateTime()),
        sa.Column("next_step", sa.Integer(), server_default="1", nullable=False),
        sa.Column("open_calls", sa.Integer(), server_default="0", nullable=False),
        sa.Column("events_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("events_lost", sa.Integer(), server_default="0", nullable=False),
        sa.Column("has_contradiction", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("cancel_requested_by", sa.Text()),
        sa.Column("cancel_requested_reason", sa.Text()),
        sa.Column("copied_from", sa.Text()),
        sa.Column("copied_steps", sa.Integer(), server_default="0", nullable=False),
        sa.Column("pending_effect_id", sa.Text()),
        sa.Column("pending_effect_number", sa.Integer()),
        sa.Column("pending_effect_attempt", sa.Integer()),
        sa.Column("pending_effect_tool", sa.Text()),
        sa.Column("pending_effect_effect", sa.Text()),
        sa.Column("pending_effect_owner", sa.Text()),
        sa.Column("pending_effect_stamped_at", UtcDateTime()),
        sa.Column("pending_effect_deadline_at", UtcDateTime()),
        sa.Column("pending_effect_settles_within_seconds", sa.Double()),
        sa.Column("pending_effect_is_callable", sa.Boolean()),
        sa.Column("pending_effect_has_probe", sa.Boolean()),
        sa.Column("pending_effect_probes", sa.Integer()),
        sa.Column("pending_effect_failure_class", sa.Text()),
        sa.Column("pending_effect_error", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("runs_pkey")),
        postgresql_with={"fillfactor": 70},
    )
    op.create_index(
        "runs_contradicted",
        "runs",
        ["id"],
        postgresql_where=sa.text("has_contradiction"),
        sqlite_where=sa.text("has_contradiction"),
    )
    op.create_index("runs_created_at", "runs", ["created_at"])
    op.create_index(
        "runs_finished_at",
        "runs",
        ["finished_at"],
        postgresql_where=sa.text("finished_at IS NOT NULL"),
        sqlite_where=sa.text("finished_at IS NOT NULL"),
    )
    op.create_index(
        "runs_idempotency_key_key",
        "runs",
        ["idempotency_key"],
        unique=True,
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index(
        "runs_interactive",
        "runs",
        ["mode", "id"],
        postgresql_where=sa.text("mode = 'interactive' AND finished_at IS NULL"),
        sqlite_where=sa.text("mode = 'interactive' AND finished_at IS NULL"),
    )
    op.create_index("runs_status_created_at", "runs", ["status", "created_at"])
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="1", nullable=False),
        sa.Column("batch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("tool", sa.Text()),
        sa.Column("call_id", sa.Text()),
        sa.Column("arguments", sa.Text()),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("deadline_seconds", sa.Double()),
        sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("crashes", sa.Integer(), server_default="0", nullable=False),
        sa.Column("throttled_since", UtcDateTime()),
        sa.Column("may_have_happened", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("result", sa.Text()),
        sa.Column("is_error", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("input_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("due_at", UtcDateTime()),
        sa.Column("dispatched_at", UtcDateTime()),
        sa.Column("republished", sa.Integer(), server_default="0", nullable=False),
        sa.Column("handed_back_since", UtcDateTime()),
        sa.Column("parked_since", UtcDateTime()),
        sa.Column("is_isolated", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("settled_by", sa.Text()),
        sa.Column("finished_at", UtcDateTime()),
        sa.Column("ruling", sa.Text()),
        sa.Column("ruled_by", sa.Text()),
        sa.Column("ruled_at", UtcDateTime()),
        sa.Column("suppressed", sa.Integer()),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("steps_pkey")),
        postgresql_with={"fillfactor": 90},
    )
    op.create_index(
        "steps_due_first",
        "steps",
        ["due_at", "run_id"],
        postgresql_where=sa.text("state = 'available' AND dispatched_at IS NULL AND number = 1 AND attempt = 1"),
        sqlite_where=sa.text("state = 'available' AND dispatched_at IS NULL AND number = 1 AND attempt = 1"),
    )
    op.create_index(
        "steps_due_next",
        "steps",
        ["due_at", "run_id"],
        postgresql_where=sa.text("state = 'available' AND dispatched_at IS NULL AND (number > 1 OR attempt > 1)"),
        sqlite_where=sa.text("state = 'available' AND dispatched_at IS NULL AND (number > 1 OR attempt > 1)"),
    )
    op.create_index(
        "steps_in_flight",
        "steps",
        ["run_id", "number"],
        postgresql_where=sa.text("state = 'available' AND dispatched_at IS NOT NULL"),
        sqlite_where=sa.text("state = 'available' AND dispatched_at IS NOT NULL"),
    )
    op.create_table(
        "dead_letters",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("tool", sa.Text()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("failure_class", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("outcome_unknown", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("closed_at", UtcDateTime()),
        sa.Column("closed_by", sa.Text()),
        sa.Column("closed_as", sa.Text()),
        sa.Column("notified_at", UtcDateTime()),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("dead_letters_run_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("dead_letters_pkey")),
    )
    op.create_index(
        "dead_letters_open",
        "dead_letters",
        ["created_at"],
        postgresql_where=sa.text("closed_at IS NULL"),
        sqlite_where=sa.text("closed_at IS NULL"),
    )
    op.create_index(
        "dead_letters_open_run_id",
        "dead_letters",
        ["run_id"],
        unique=True,
        postgresql_where=sa.text("closed_at IS NULL"),
        sqlite_where=sa.text("closed_at IS NULL"),
    )
    op.create_index("dead_letters_run_id", "dead_letters", ["run_id"])
    op.create_index(
        "dead_letters_untold",
        "dead_letters",
        ["created_at", "id"],
        postgresql_where=sa.text("closed_at IS NULL AND notified_at IS NULL"),
        sqlite_where=sa.text("closed_at IS NULL AND notified_at IS NULL"),
    )
    deployment = sa.table(
        "deployment",
        *(sa.column(name) for name in ("id", "version", "oldest_code_version")),
        sa.column("created_at", UtcDateTime()),
    )
    op.execute(
        sa.insert(deployment).values(id=uuid.uuid4().hex, version=1, oldest_code_version=1, created_at=now_plus())
    )
