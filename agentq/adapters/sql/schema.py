"""The tables: what they hold, and which indexes their readers need.

The hot rows are a run's and its open steps'. A run is updated several times a step, so none of the columns that change
then is in an index of `runs`: those updates stay within their page (HOT), for which `fillfactor` leaves room.
Steps and events have no foreign key to their run: every writer has just locked that run's row, and a check for each
inserted row would cost more than the insert.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)
from sqlalchemy.types import TypeEngine

VERSION = 1
"""What this code expects. The database says in `deployment` which version it has, and the oldest that may run on it."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime in UTC. SQLite drops time zones, so there it is text that sorts: `2026-01-31 12:00:00.123`."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None or dialect.name != "sqlite":
            return value
        return sqlite_time(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if isinstance(value, str):
            return datetime.fromisoformat(value).replace(tzinfo=UTC)
        aware: datetime = value.astimezone(UTC)
        return aware


def sqlite_time(value: datetime) -> str:
    """The text that SQLite stores for this time; milliseconds, as its own clock gives them."""
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ", timespec="milliseconds")


metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
        "pk": "%(table_name)s_pkey",
    }
)

deployment = Table(
    "deployment",
    metadata,
    Column("id", Text, primary_key=True),  # Leases and keys carry it, so that two databases can't share them.
    Column("version", Integer, nullable=False),
    Column("oldest_code_version", Integer, nullable=False),  # Code that expects less must not run here any more.
    Column("created_at", UtcDateTime, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("agent", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("input", Text, nullable=False),  # JSON text, like every payload.
    Column("output", Text),
    Column("error", Text),
    Column("metadata", JSON(none_as_null=True)),
    Column("idempotency_key", Text),
    Column("input_digest", Text),  # Of agent and input: tells a repeated enqueue from a conflict.
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    Column("next_step", Integer, nullable=False, server_default="1"),  # The number that the next added step gets.
    Column("open_calls", Integer, nullable=False, server_default="0"),  # The join counter: available tool steps.
    Column("events_count", Integer, nullable=False, server_default="0"),  # The sequence number of the last event.
    Column("events_lost", Integer, nullable=False, server_default="0"),
    Column("has_contradiction", Boolean, nullable=False, server_default=false()),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    Column("cancel_requested_by", Text),
    Column("cancel_requested_reason", Text),
    Column("copied_from", Text),  # The run whose first steps it began with, as many as `copied_steps`.
    Column("copied_steps", Integer, nullable=False, server_default="0"),
    # The fence: the write in flight. All null: none stands.
    Column("pending_effect_id", Text),
    Column("pending_effect_number", Integer),
    Column("pending_effect_attempt", Integer),
    Column("pending_effect_tool", Text),
    Column("pending_effect_effect", Text),
    Column("pending_effect_owner", Text),
    Column("pending_effect_stamped_at", UtcDateTime),
    Column("pending_effect_deadline_at", UtcDateTime),
    Column("pending_effect_settles_within_seconds", Double),
    Column("pending_effect_is_callable", Boolean),
    Column("pending_effect_has_probe", Boolean),
    Column("pending_effect_probes", Integer),
    Column("pending_effect_failure_class", Text),  # How the call failed, if whoever made it lived to see that.
    Column("pending_effect_error", Text),
    postgresql_with={"fillfactor": 70},
)
Index(
    "runs_idempotency_key_key",
    runs.c.idempotency_key,
    unique=True,
    postgresql_where=runs.c.idempotency_key.is_not(None),
    sqlite_where=runs.c.idempotency_key.is_not(None),
)
Index("runs_created_at", runs.c.created_at)
Index("runs_status_created_at", runs.c.status, runs.c.created_at)
Index(
    "runs_finished_at",
    runs.c.finished_at,
    postgresql_where=runs.c.finished_at.is_not(None),
    sqlite_where=runs.c.finished_at.is_not(None),
)
Index(
    "runs_interactive",
    runs.c.mode,  # In front, or SQLite reads through all runs in the order of their ids instead.
    runs.c.id,
    postgresql_where=text("mode = 'interactive' AND finished_at IS NULL"),
    sqlite_where=text("mode = 'interactive' AND finished_at IS NULL"),
)
Index(
    "runs_contradicted",
    runs.c.id,
    postgresql_where=text("has_contradiction"),
    sqlite_where=text("has_contradiction"),
)

steps = Table(
    "steps",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("batch", Integer, nullable=False, server_default="0"),
    Column("tool", Text),
    Column("call_id", Text),
    Column("arguments", Text),
    Column("effect", Text, nullable=False),
    Column("deadline_seconds", Double),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("crashes", Integer, nullable=False, server_default="0"),
    Column("throttled_since", UtcDateTime),
    Column("may_have_happened", Boolean, nullable=False, server_default=false()),
    Column("result", Text),  # JSON text; null until a result is recorded (a result of None is the text `null`).
    Column("is_error", Boolean, nullable=False, server_default=false()),
    Column("input_tokens", Integer, nullable=False, server_default="0"),
    Column("output_tokens", Integer, nullable=False, server_default="0"),
    Column("due_at", UtcDateTime),  # Null while it waits for others.
    Column("dispatched_at", UtcDateTime),  # Null: the dispatcher sees to it when it is due.
    Column("republished", Integer, nullable=False, server_default="0"),
    Column("handed_back_since", UtcDateTime),
    Column("parked_since", UtcDateTime),  # Since when it waits for its tool, which is paused; null once it was woken.
    Column("is_isolated", Boolean, nullable=False, server_default=false()),
    Column("settled_by", Text),  # The owner whose settle changed it last: the same settlement again finds itself.
    Column("finished_at", UtcDateTime),
    Column("ruling", Text),  # What a person or a probe decided about its unknown write (a Decision).
    Column("ruled_by", Text),
    Column("ruled_at", UtcDateTime),
    # Deliveries that came to nothing, as far as its last settle or requeue heard; null: Redis couldn't tell.
    Column("suppressed", Integer),
    postgresql_with={"fillfactor": 90},
)
# Statements that are to use a partial index say its condition in the same words, without parameters.
DUE_FIRST = text("state = 'available' AND dispatched_at IS NULL AND number = 1 AND attempt = 1")
DUE_NEXT = text("state = 'available' AND dispatched_at IS NULL AND (number > 1 OR attempt > 1)")
IN_FLIGHT = text("state = 'available' AND dispatched_at IS NOT NULL")
# Two, so that a million new runs in front don't hide the few steps that are due in runs that are going.
Index(
    "steps_due_first",
    steps.c.due_at,
    steps.c.run_id,
    postgresql_where=DUE_FIRST,
    sqlite_where=DUE_FIRST,
)
Index(
    "steps_due_next",
    steps.c.due_at,
    steps.c.run_id,
    postgresql_where=DUE_NEXT,
    sqlite_where=DUE_NEXT,
)
Index(
    "steps_in_flight",
    steps.c.run_id,
    steps.c.number,
    postgresql_where=IN_FLIGHT,
    sqlite_where=IN_FLIGHT,
)

events = Table(
    "events",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("at", UtcDateTime, nullable=False),
    Column("kind", Text, nullable=False),
    Column("number", Integer),
    Column("attempt", Integer),
    Column("actor", Text, nullable=False),
    Column("data", Text, nullable=False, server_default="{}"),
)
"""Append-only, as `seals` is: the database refuses to change or delete a row, except of a run that is in `purging`."""


seals = Table(
    "seals",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # One for each end of the run, from 1 on.
    Column("sequence", Integer, nullable=False),  # Of the last event that it seals.
    Column("events_lost", Integer, nullable=False),  # As the run counted them then.
    Column("digest", Text, nullable=False),  # SHA-256 over the seal before it and the events since, as hex.
    Column("at", UtcDateTime, nullable=False),
)
# A block range index costs an insert next to nothing. SQLite has none, and a tree would cost it a page a settle.
for told in (events, seals):
    Index(
        f"{told.name}_at",
        told.c.at,
        postgresql_using="brin",
        postgresql_with={"pages_per_range": 32, "autosummarize": True},
        info={"only_on": "postgresql"},
    ).ddl_if(dialect="postgresql")

# A run that is here may lose its events and seals: it is being deleted, in the transaction that put it here.
purging = Table("purging", metadata, Column("run_id", Text, primary_key=True))

dead_letters = Table(
    "dead_letters",
    metadata,
    # SQLite counts a rowid by itself only in a column of type INTEGER.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("run_id", Text, ForeignKey(runs.c.id), nullable=False),
    Column("number", Integer, nullable=False),
    # Of the run and its step, which keep them: so that a list of many reads this table alone.
    Column("agent", Text, nullable=False),
    Column("tool", Text),
    Column("reason", Text, nullable=False),
    Column("failure_class", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("outcome_unknown", Boolean, nullable=False, server_default=false()),
    Column("created_at", UtcDateTime, nullable=False),
    Column("closed_at", UtcDateTime),  # Null: open.
    Column("closed_by", Text),
    Column("closed_as", Text),
    Column("notified_at", UtcDateTime),  # When somebody was told of it; stays null where nobody is to be.
)
Index(
    "dead_letters_open_run_id",  # A run has at most one that is open.
    dead_letters.c.run_id,
    unique=True,
    postgresql_where=dead_letters.c.closed_at.is_(None),
    sqlite_where=dead_letters.c.closed_at.is_(None),
)
Index(
    "dead_letters_open",
    dead_letters.c.created_at,
    postgresql_where=dead_letters.c.closed_at.is_(None),
    sqlite_where=dead_letters.c.closed_at.is_(None),
)
Index("dead_letters_run_id", dead_letters.c.run_id)
UNTOLD = text("closed_at IS NULL AND notified_at IS NULL")
Index(
    "dead_letters_untold",
    dead_letters.c.created_at,
    dead_letters.c.id,
    postgresql_where=UNTOLD,
    sqlite_where=UNTOLD,
)

pauses = Table(
    "pauses",
    metadata,
    Column("tool", Text, primary_key=True),  # Empty: every tool.
    Column("agent", Text, primary_key=True),  # Empty: every agent.
    Column("reads", Boolean, nullable=False),
    Column("paused_at", UtcDateTime, nullable=False),
    Column("paused_by", Text, nullable=False),
    Column("reason", Text, nullable=False),
)

agents = Table(
    "agents",
    metadata,
    Column("name", Text, primary_key=True),
    Column("input_bytes_max", BigInteger, nullable=False),
    Column("registered_at", UtcDateTime, nullable=False),
    Column("seen_at", UtcDateTime, nullable=False),
)
