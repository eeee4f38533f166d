"""Reading an attempt: one statement for a call, one more for a model turn's history.

Rendered once, and run on the driver's own connection: it is done for every step, and a turn's history has many rows.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import ColumnElement, RowMapping, Select, bindparam, literal_column, or_, select
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from agentq.adapters.sql.change import ACTIVE
from agentq.adapters.sql.engine import now_plus, seconds_since
from agentq.adapters.sql.rows import fence_from, payload
from agentq.adapters.sql.schema import runs, steps
from agentq.domain.effects import ToolEffect
from agentq.domain.model import RunMode, Step, StepKind, StepRef, StepState
from agentq.ports.steps import HistoryItem, Loaded, RunHead

_STEP_COLUMNS: tuple[ColumnElement[Any], ...] = (
    steps.c.kind,
    steps.c.batch,
    steps.c.tool,
    steps.c.call_id,
    steps.c.arguments,
    steps.c.effect,
    steps.c.deadline_seconds,
    steps.c.tries,
    steps.c.crashes,
    steps.c.throttled_since,
    steps.c.may_have_happened,
    steps.c.due_at,
    steps.c.dispatched_at,
)

_RUN_COLUMNS: tuple[ColumnElement[Any], ...] = (
    runs.c.agent,
    runs.c.input,
    runs.c.mode,
    runs.c.metadata,
    *(column for column in runs.c if column.name.startswith("pending_effect_")),
)
_KINDS = {kind.value: kind for kind in StepKind}


class AttemptReader:
    """Loads attempts of one database."""

    def __init__(self, *, is_postgresql: bool) -> None:
        self._head = _Statement(_head_statement(), is_postgresql=is_postgresql)
        self._history = _Statement(_history_statement(), is_postgresql=is_postgresql)

    def load(self, connection: Any, ref: StepRef) -> Loaded | None:
        """See `StepStore.load`; `connection` is the driver's own."""
        rows = self._head.rows(connection, run_id=ref.run_id, number=ref.number, attempt=ref.attempt)
        if not rows:
            return None
        row = dict(zip(self._head.names, rows[0], strict=True))
        past: list[tuple[Any, ...]] = []
        if row["kind"] == StepKind.MODEL:
            past = self._history.rows(connection, run_id=ref.run_id, number=ref.number)
        return Loaded(
            run=RunHead(
                id=ref.run_id,
                agent=row["agent"],
                input=payload(row["input"]),
                mode=RunMode(row["mode"]),
                metadata=_metadata(row["metadata"]),
            ),
            step=_loaded_step(ref, row),
            loaded_at=cast(datetime, _time(row["loaded_at"])),
            history=tuple(
                [HistoryItem(kind=_KINDS[kind], call_id=call_id, result=text) for kind, call_id, text in past]
            ),
            fence=None if row["pending_effect_id"] is None else fence_from(_with_times(row)),
            handed_back_seconds=row["handed_back_seconds"],
            throttled_seconds=row["throttled_seconds"],
            run_age_seconds=row["run_age_seconds"],
        )


def _constant(value: StrEnum) -> ColumnElement[str]:
    """One of our own words in a statement's text: a parameter less to send each time."""
    return literal_column(f"'{value.value}'")


def _head_statement() -> Select[Any]:
    return (
        select(
            *_STEP_COLUMNS,
            *_RUN_COLUMNS,
            seconds_since(steps.c.handed_back_since).label("handed_back_seconds"),
            seconds_since(steps.c.throttled_since).label("throttled_seconds"),
            seconds_since(runs.c.created_at).label("run_age_seconds"),
            now_plus(literal_column("0")).label("loaded_at"),
        )
        .join_from(steps, runs, runs.c.id == steps.c.run_id)
        .where(
            steps.c.run_id == bindparam("run_id"),
            steps.c.number == bindparam("number"),
            steps.c.attempt == bindparam("attempt"),
            steps.c.state == _constant(StepState.AVAILABLE),
            or_(steps.c.due_at.is_(None), steps.c.due_at <= now_plus(literal_column("0"))),
            or_(*(runs.c.status == _constant(status) for status in ACTIVE)),
        )
    )


def _history_statement() -> Select[Any]:
    return (
        select(steps.c.kind, steps.c.call_id, steps.c.result)
        .where(
            steps.c.run_id == bindparam("run_id"),
            steps.c.number < bindparam("number"),
            steps.c.state == _constant(StepState.COMPLETED),
        )
        .order_by(steps.c.number)
    )


class _Statement:
    """A SELECT for the driver's own connection: rendered once, rows as the driver gives them."""

    def __init__(self, statement: Select[Any], *, is_postgresql: bool) -> None:
        dialect = PGDialect_psycopg() if is_postgresql else SQLiteDialect_pysqlite(paramstyle="named")  # type: ignore[no-untyped-call]
        compiled = statement.compile(dialect=dialect)
        self.names = tuple(column.name for column in statement.selected_columns)
        self._text = str(compiled)

    def rows(self, connection: Any, **arguments: Any) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = connection.execute(self._text, arguments).fetchall()
        return rows


def _loaded_step(ref: StepRef, row: Mapping[str, Any]) -> Step:
    return Step(
        run_id=ref.run_id,
        number=ref.number,
        kind=_KINDS[row["kind"]],
        state=StepState.AVAILABLE,
        attempt=ref.attempt,
        batch=row["batch"],
        tool=row["tool"],
        call_id=row["call_id"],
        arguments=payload(row["arguments"]),
        effect=ToolEffect(row["effect"]),
        deadline_seconds=row["deadline_seconds"],
        tries=row["tries"],
        crashes=row["crashes"],
        throttled_since=_time(row["throttled_since"]),
        may_have_happened=bool(row["may_have_happened"]),
        due_at=_time(row["due_at"]),
        dispatched_at=_time(row["dispatched_at"]),
    )


def _with_times(row: dict[str, Any]) -> RowMapping:
    times = ("pending_effect_stamped_at", "pending_effect_deadline_at")
    return cast(RowMapping, {**row, **{name: _time(row[name]) for name in times}})


def _time(value: Any) -> datetime | None:
    if isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    return cast("datetime | None", value)  # The session's time zone is UTC.


def _metadata(value: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(value) if isinstance(value, str) else value or {}
    return metadata
