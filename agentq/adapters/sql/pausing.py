"""Pauses in SQL: a person's word that a tool isn't to be called, which every fence obeys."""

from datetime import timedelta

from sqlalchemy import Connection, RowMapping, and_, bindparam, delete, exists, func, insert, select, update
from sqlalchemy.sql.expression import ColumnElement

from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.deployment_log import tell
from agentq.adapters.sql.engine import Database, now_plus
from agentq.adapters.sql.locking import is_one_of, lock_runs_of
from agentq.adapters.sql.schema import DUE_NEXT, IN_FLIGHT, dead_letters, pauses, runs, steps
from agentq.domain.errors import NotFoundError
from agentq.domain.events import EventKind
from agentq.domain.model import StepRef
from agentq.domain.pauses import Pause

PARKED_MIN, PARKED_MAX = timedelta(seconds=2), timedelta(seconds=60)
WAKE_BATCH = 500
EVERY = ""  # What stands for every tool, or every agent, in a key.

# Shared by fences, alone for who pauses. It is taken after a run's lock, or without one.
_fence_lock = select(func.pg_advisory_xact_lock_shared(func.hashtext("agentq pauses")))
_pause_lock = select(func.pg_advisory_xact_lock(func.hashtext("agentq pauses")))

_pauses = select(pauses).order_by(pauses.c.tool, pauses.c.agent)
_stops = select(
    exists().where(pauses.c.tool.in_((EVERY, bindparam("tool"))), pauses.c.agent.in_((EVERY, bindparam("agent"))))
)
_of_key = and_(pauses.c.tool == bindparam("of_tool"), pauses.c.agent == bindparam("of_agent"))
_parked = (
    select(steps.c.run_id, steps.c.number, steps.c.attempt)
    .join_from(steps, runs, runs.c.id == steps.c.run_id)
    .where(DUE_NEXT, steps.c.parked_since.is_not(None))
    .order_by(steps.c.run_id, steps.c.number)
    .limit(WAKE_BATCH)
)
_under_fence = (
    select(func.count())
    .select_from(steps)
    .join(runs, and_(runs.c.id == steps.c.run_id, runs.c.pending_effect_number == steps.c.number))
    .where(IN_FLIGHT)
)


class SqlPauseStore:
    """`PauseStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def pauses(self) -> tuple[Pause, ...]:
        with self._database.reading() as connection:
            return read_pauses(connection)

    def pause(self, tool: str | None, agent: str | None, *, reads: bool, actor: str, reason: str) -> Pause:
        with self._database.writing() as connection:
            self._shut_out_fences(connection)
            now = connection.execute(select(now_plus())).scalar_one()
            row = {
                "tool": clean_text(tool or EVERY),
                "agent": clean_text(agent or EVERY),
                "reads": reads,
                "paused_at": now,
                "paused_by": clean_text(actor),
                "reason": clean_text(reason),
            }
            connection.execute(delete(pauses).where(_of_key), {"of_tool": row["tool"], "of_agent": row["agent"]})
            connection.execute(insert(pauses), row)
            told = {"tool": tool, "agent": agent, "reads": reads, "reason": row["reason"]}
            tell(connection, EventKind.TOOL_PAUSED, actor=actor, data=told)
        return Pause(
            tool=tool, agent=agent, reads=reads, paused_at=now, paused_by=row["paused_by"], reason=row["reason"]
        )

    def resume(self, tool: str | None, agent: str | None, *, actor: str, reason: str) -> int:
        with self._database.writing() as connection:
            self._shut_out_fences(connection)
            key = {"of_tool": clean_text(tool or EVERY), "of_agent": clean_text(agent or EVERY)}
            if not connection.execute(delete(pauses).where(_of_key), key).rowcount:
                raise NotFoundError(f"{scope_text(tool, agent)} is not paused{self._others(connection)}")
            told = {"tool": tool, "agent": agent, "reason": clean_text(reason)}
            tell(connection, EventKind.TOOL_RESUMED, actor=actor, data=told)
        return self._wake(tool, agent)

    def writes_in_flight(self, tool: str | None, agent: str | None) -> int:
        with self._database.reading() as connection:
            counted = connection.execute(_under_fence.where(*_scope(runs.c.pending_effect_tool, tool, agent)))
            return int(counted.scalar_one())

    def tools_seen(self) -> set[str]:
        questions = [
            *(select(steps.c.tool).distinct().where(condition) for condition in (IN_FLIGHT, DUE_NEXT)),
            select(dead_letters.c.tool).distinct().where(dead_letters.c.closed_at.is_(None)),
        ]
        with self._database.reading() as connection:
            found = {name for question in questions for name in connection.execute(question).scalars()}
        return {name for name in found if name is not None}

    def _shut_out_fences(self, connection: Connection) -> None:
        if self._database.is_postgresql:  # SQLite lets one write at a time anyway.
            connection.execute(_pause_lock)

    def _others(self, connection: Connection) -> str:
        paused = [scope_text(each.tool, each.agent) for each in read_pauses(connection)]
        return f"; paused now: {', '.join(paused)}" if paused else "; nothing is"

    def _wake(self, tool: str | None, agent: str | None) -> int:
        """In batches, so that no transaction holds many runs for long. One that another pause stops parks again."""
        woken = 0
        while True:
            with self._database.writing() as connection:
                rows = connection.execute(_parked.where(*_scope(steps.c.tool, tool, agent))).all()
                refs = [StepRef(run_id=row.run_id, number=row.number, attempt=row.attempt) for row in rows]
                if not refs:
                    return woken
                lock_runs_of(connection, refs)
                still_parked = and_(is_one_of(refs), DUE_NEXT, steps.c.parked_since.is_not(None))
                due = update(steps).where(still_parked).values(due_at=now_plus(), parked_since=None)
                woken += len(connection.execute(due.returning(steps.c.number)).all())


def is_paused(connection: Connection, *, agent: str, tool: str, is_postgresql: bool) -> bool:
    """Asked by a fence under its run's lock: no pause of that tool can be committed until this transaction ends."""
    if is_postgresql:
        connection.execute(_fence_lock)
    return bool(connection.execute(_stops, {"tool": clean_text(tool), "agent": agent}).scalar_one())


def read_pauses(connection: Connection) -> tuple[Pause, ...]:
    return tuple(_pause_from(row) for row in connection.execute(_pauses).mappings())


def parked_for(paused: timedelta | None) -> timedelta:
    """How long a step waits before it is looked at again, by how long its tool has been paused; None: not any more."""
    return PARKED_MIN if paused is None else min(max(paused / 2, PARKED_MIN), PARKED_MAX)


def scope_text(tool: str | None, agent: str | None) -> str:
    """What a pause is of, in words."""
    what = "every tool" if tool is None else f"tool {tool!r}"
    return what if agent is None else f"{what} of agent {agent!r}"


def _scope(tool_column: ColumnElement[str | None], tool: str | None, agent: str | None) -> list[ColumnElement[bool]]:
    conditions = []
    if tool is not None:
        conditions.append(tool_column == clean_text(tool))
    if agent is not None:
        conditions.append(runs.c.agent == clean_text(agent))
    return conditions


def _pause_from(row: RowMapping) -> Pause:
    return Pause(
        tool=row["tool"] or None,
        agent=row["agent"] or None,
        reads=bool(row["reads"]),
        paused_at=row["paused_at"],
        paused_by=row["paused_by"],
        reason=row["reason"],
    )
