"""The audit log takes events and gives none back: triggers that refuse, seals, and the one path that purge may take.

A seal's digest is computed here on PostgreSQL, in the transaction of the end that it seals, and by
`agentq.domain.audit` elsewhere: both make the same text of an event, field by field.
"""

import sqlalchemy as sa
from alembic import op

from agentq.adapters.sql.schema import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

REFUSAL = "the audit log is append-only: {table} are neither changed nor deleted, only purged with their run"


def _field(value: str) -> str:
    """Its length and its text, so that no two rows make the same text; null is a dash."""
    return f"coalesce(length({value}) || ':' || {value}, '-')"


def _moment(at: str) -> str:
    return f"to_char({at} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"


# Spelled out for each field: a function for it would be called a dozen times an event, and cost more than the digest.
_EVENT_TEXT = " || ".join(
    _field(value)
    for value in ("sequence::text", _moment("at"), "kind", "number::text", "attempt::text", "actor", "data")
)
_SEAL_TEXT = " || ".join(
    _field(value)
    for value in ("v_digest", "p_run_id", "v_number::text", "p_sequence::text", "p_events_lost::text", _moment("p_at"))
)
SEAL = f"""
CREATE FUNCTION agentq_seal_1(p_run_id text, p_sequence integer, p_events_lost integer, p_at timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_number integer := 1;
    v_after integer := 0;
    v_digest text;
    v_last record;
    v_events text;
BEGIN
    SELECT number, sequence, digest INTO v_last FROM seals WHERE run_id = p_run_id ORDER BY number DESC LIMIT 1;
    IF FOUND THEN
        v_number := v_last.number + 1;
        v_after := v_last.sequence;
        v_digest := v_last.digest;
    END IF;
    SELECT coalesce(string_agg({_EVENT_TEXT}, '' ORDER BY sequence), '') INTO v_events
    FROM events WHERE run_id = p_run_id AND sequence > v_after AND sequence <= p_sequence;
    INSERT INTO seals (run_id, number, sequence, events_lost, digest, at)
    VALUES (
        p_run_id, v_number, p_sequence, p_events_lost,
        encode(sha256(convert_to({_SEAL_TEXT} || v_events, 'UTF8')), 'hex'), p_at
    );
END
$$
"""

APPEND_ONLY = f"""
CREATE FUNCTION agentq_append_only_1() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND EXISTS (SELECT FROM purging WHERE run_id = OLD.run_id) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '{REFUSAL.format(table="%")}', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';
END
$$
"""
# TRUNCATE has no rows, so that no purge of theirs can be on its way.
ROWS = """
CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table}
FOR EACH ROW EXECUTE FUNCTION agentq_append_only_1()
"""
WHOLE = """
CREATE TRIGGER {table}_not_truncated BEFORE TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION agentq_append_only_1()
"""

SQLITE_UPDATE = """
CREATE TRIGGER {table}_not_changed BEFORE UPDATE ON {table}
BEGIN SELECT RAISE(ABORT, '{refusal}'); END
"""
SQLITE_DELETE = """
CREATE TRIGGER {table}_not_deleted BEFORE DELETE ON {table}
WHEN NOT EXISTS (SELECT 1 FROM purging WHERE run_id = OLD.run_id)
BEGIN SELECT RAISE(ABORT, '{refusal}'); END
"""
# INSERT OR REPLACE deletes what stands in its way without asking the trigger of deletes.
SQLITE_REPLACE = """
CREATE TRIGGER {table}_not_replaced BEFORE INSERT ON {table}
WHEN EXISTS (SELECT 1 FROM {table} WHERE run_id = NEW.run_id AND {key} = NEW.{key})
    OR EXISTS (SELECT 1 FROM {table} WHERE rowid = NEW.rowid)
BEGIN SELECT RAISE(ABORT, '{refusal}'); END
"""


def upgrade() -> None:
    op.create_table(
        "seals",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("events_lost", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("seals_pkey")),
    )
    op.create_table(
        "purging",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("purging_pkey")),
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        for statement in (SEAL, APPEND_ONLY):
            connection.exec_driver_sql(statement.replace("%", "%%"))
        for table in ("events", "seals"):
            connection.exec_driver_sql(ROWS.format(table=table))
            connection.exec_driver_sql(WHOLE.format(table=table))
            op.create_index(
                f"{table}_at",
                table,
                ["at"],
                postgresql_using="brin",
                postgresql_with={"pages_per_range": 32, "autosummarize": True},
            )
        return
    for table, key in (("events", "sequence"), ("seals", "number")):
        for statement in (SQLITE_UPDATE, SQLITE_DELETE, SQLITE_REPLACE):
            connection.exec_driver_sql(statement.format(table=table, key=key, refusal=REFUSAL.format(table=table)))
