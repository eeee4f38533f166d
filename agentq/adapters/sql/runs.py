"""Starting, reading and cancelling runs in SQL."""

import hashlib
import json
from collections.abc import Container, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, bindparam, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from agentq.adapters.sql.change import Change
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.conditions import run_conditions
from agentq.adapters.sql.engine import Database, now_plus, seconds_since
from agentq.adapters.sql.errors import auditing
from agentq.adapters.sql.locking import is_one_of, lock_runs_of
from agentq.adapters.sql.rows import dead_letter_from, event_from, run_from, step_from
from agentq.adapters.sql.schema import agents, dead_letters, events, runs, steps
from agentq.adapters.sql.sealing import seal
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import IdempotencyConflictError, NotFoundError
from agentq.domain.events import EventKind
from agentq.domain.lifecycle import RunChange, StepChange, run_after, step_after
from agentq.domain.model import DeadLetter, Event, Run, RunMode, RunStatus, StepKind, StepRef, StepState
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import Added, NewRun, RunFilter, ServedAgent

ENQUEUED_BY = "enqueue"

_status = select(runs.c.status).where(runs.c.id == bindparam("run_id"))
_run = select(runs, seconds_since(runs.c.created_at).label("age_seconds")).where(runs.c.id == bindparam("run_id"))
_run_by_key = select(runs).where(runs.c.idempotency_key == bindparam("key"))
_steps = select(steps).where(steps.c.run_id == bindparam("run_id")).order_by(steps.c.number)
_events = (
    select(events)
    .where(events.c.run_id == bindparam("run_id"), events.c.sequence > bindparam("after"))
    .order_by(events.c.sequence)
)
_agents = select(agents.c.name, agents.c.input_bytes_max, seconds_since(agents.c.seen_at).label("seen_seconds"))


class SqlRunStore:
    """`RunStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, new_runs: Sequence[NewRun]) -> list[Added]:
        """Several transactions may add the same keys at once: one of them adds each run, the others find it."""
        if not new_runs:
            return []
        distinct = _Distinct()
        places = [distinct.place_of(run, _digest(run)) for run in new_runs]
        added = None
        while added is None:
            with suppress(_VanishedError):
                added = self._add(new_runs, distinct, places)
        return added

    def _add(self, new_runs: Sequence[NewRun], distinct: "_Distinct", places: Sequence[int]) -> list[Added]:
        with self._database.writing() as connection:
            created = self._insert_runs(connection, distinct)
            run_ids = self._ids(connection, distinct, created)
            started = [run for run in distinct.runs if run.id in created]
            self._insert_first_steps(connection, started, created)
            self._insert_events(connection, started, created)
        added = []
        for run, place in zip(new_runs, places, strict=True):
            is_new = run_ids[place] in created and distinct.runs[place] is run
            added.append(Added(run_id=run_ids[place], is_new=is_new, wakeup=_wakeup(run) if is_new else None))
        return added

    def undispatch(self, refs: Sequence[StepRef]) -> None:
        if not refs:
            return
        with self._database.writing() as connection:
            lock_runs_of(connection, refs)
            available = and_(is_one_of(refs), steps.c.state == StepState.AVAILABLE.value)
            connection.execute(update(steps).where(available).values(dispatched_at=None))

    def agents(self) -> dict[str, ServedAgent]:
        with self._database.reading() as connection:
            rows = connection.execute(_agents).mappings().all()
        return {row["name"]: ServedAgent(**row) for row in rows}

    def run(self, run_id: str) -> Run:
        with self._database.snapshot() as connection:
            row = connection.execute(_run, {"run_id": run_id}).mappings().one_or_none()
            if row is None:
                raise NotFoundError(f"there is no run {run_id!r}")
            its_steps = [step_from(each) for each in connection.execute(_steps, {"run_id": run_id}).mappings()]
            dead_letter = _open_dead_letters(connection, [run_id]).get(run_id)
        return run_from(row, steps=its_steps, dead_letter=dead_letter, age_seconds=row["age_seconds"])

    def status(self, run_id: str) -> RunStatus:
        with self._database.reading() as connection:
            status = connection.execute(_status, {"run_id": run_id}).scalar_one_or_none()
        if status is None:
            raise NotFoundError(f"there is no run {run_id!r}")
        return RunStatus(status)

    def run_by_key(self, idempotency_key: str) -> Run:
        with self._database.reading() as connection:
            row = connection.execute(_run_by_key, {"key": idempotency_key}).mappings().one_or_none()
        if row is None:
            raise NotFoundError(f"there is no run with the idempotency key {idempotency_key!r}")
        return self.run(row["id"])

    def runs(self, filters: RunFilter) -> list[Run]:
        newest_first = (
            select(runs)
            .where(*run_conditions(filters))
            .order_by(runs.c.created_at.desc(), runs.c.id.desc())
            .limit(filters.limit)
        )
        with self._database.snapshot() as connection:
            rows = connection.execute(newest_first).mappings().all()
            failed = [row["id"] for row in rows if row["status"] == RunStatus.FAILED]
            found = _open_dead_letters(connection, failed)
        return [run_from(row, dead_letter=found.get(row["id"])) for row in rows]

    def events(self, run_id: str, after: int = 0) -> list[Event]:
        with self._database.reading() as connection:
            rows = connection.execute(_events, {"run_id": run_id, "after": after}).mappings().all()
        return [event_from(row) for row in rows]

    def cancel(self, run_id: str, *, actor: str, reason: str) -> RunStatus:
        with self._database.locked(run_id) as (connection, row):
            if row is None:
                raise NotFoundError(f"there is no run {run_id!r}")
            change = Change(connection, row, actor=actor)
            if not change.is_active or row.cancel_requested:
                return change.status
            change.set(
                cancel_requested=True,
                cancel_requested_by=clean_text(actor),
                cancel_requested_reason=clean_text(reason),
            )
            if row.pending_effect_id is None:
                change.cancel()
            else:  # It ends first: whoever settles or judges it carries the cancel out.
                change.event(EventKind.CANCEL_REQUESTED, row.pending_effect_number, reason=clean_text(reason))
            change.write()
            return change.status

    # --- adding

    def _insert_runs(self, connection: Connection, distinct: "_Distinct") -> dict[str, datetime]:
        """The ids that are new, with the time they were created at. Another's uncommitted row is waited for."""
        insert = postgresql.insert if self._database.is_postgresql else sqlite.insert
        statement = (
            insert(runs)
            .values(created_at=now_plus(), events_count=1)
            .on_conflict_do_nothing()
            .returning(runs.c.id, runs.c.created_at)
        )
        rows = [_row(run, digest) for run, digest in zip(distinct.runs, distinct.digests, strict=True)]
        # One order for everybody, or two batches with the same keys would wait for each other for ever.
        rows.sort(key=lambda row: (row["idempotency_key"] or "", row["id"]))
        created = {row.id: row.created_at for row in connection.execute(statement, rows)}
        refused = [run.id for run in distinct.runs if run.error is not None and run.id in created]
        if refused:
            ended = update(runs).where(runs.c.id.in_(refused))
            connection.execute(ended.values(finished_at=runs.c.created_at))
        return created

    def _ids(self, connection: Connection, distinct: "_Distinct", created: Container[str]) -> list[str]:
        """The id of each run: its own if it is new, else that of the run which was there before."""
        old = [run for run in distinct.runs if run.id not in created]
        if not old:
            return [run.id for run in distinct.runs]
        keys = [run.idempotency_key for run in old if run.idempotency_key is not None]
        is_known = or_(runs.c.id.in_([run.id for run in old]), runs.c.idempotency_key.in_(keys))
        columns = (runs.c.id, runs.c.idempotency_key, runs.c.input_digest)
        found = connection.execute(select(*columns).where(is_known)).all()
        by_name = {("id", row.id): row for row in found} | {("key", row.idempotency_key): row for row in found}
        run_ids = []
        for run, digest in zip(distinct.runs, distinct.digests, strict=True):
            if run.id in created:
                run_ids.append(run.id)
                continue
            row = next((by_name[name] for name in _names(run) if name in by_name), None)
            if row is None:
                raise _VanishedError
            if row.input_digest != digest:
                raise _conflict(run, row.id)
            run_ids.append(row.id)
        return run_ids

    def _insert_first_steps(
        self, connection: Connection, new_runs: Sequence[NewRun], created: dict[str, datetime]
    ) -> None:
        rows = [_first_step(run, created[run.id]) for run in new_runs if run.error is None]
        if rows:
            connection.execute(steps.insert(), rows)

    def _insert_events(self, connection: Connection, new_runs: Sequence[NewRun], created: dict[str, datetime]) -> None:
        rows = [_event(run, created[run.id]) for run in new_runs]
        if rows:
            with auditing():
                connection.execute(events.insert(), rows)
        for run in new_runs:
            if run.error is not None:  # It has ended as it began.
                seal(connection, run.id, sequence=1, events_lost=0, at=created[run.id])


class _VanishedError(Exception):
    """The run that stood in the way of a new one was purged in between; takes the transaction back."""


class _Distinct:
    """The runs of one call, without those whose key or id came before in the same call."""

    def __init__(self) -> None:
        self.runs: list[NewRun] = []
        self.digests: list[str] = []
        self._places: dict[tuple[str, str], int] = {}

    def place_of(self, run: NewRun, digest: str) -> int:
        """Where the run, or the earlier one that it repeats, is. Raises IdempotencyConflictError."""
        place = next((self._places[name] for name in _names(run) if name in self._places), len(self.runs))
        if place == len(self.runs):
            self.runs.append(run)
            self.digests.append(digest)
            self._places.update(dict.fromkeys(_names(run), place))
        elif self.digests[place] != digest:
            raise _conflict(run, self.runs[place].id)
        return place


def _names(run: NewRun) -> list[tuple[str, str]]:
    """What makes two runs the same, the stronger first."""
    names = [("id", run.id)]
    return names if run.idempotency_key is None else [("key", run.idempotency_key), *names]


def _digest(run: NewRun) -> str:
    return hashlib.sha256(json.dumps([run.agent, run.input], sort_keys=True).encode()).hexdigest()


def _conflict(run: NewRun, other_id: str) -> IdempotencyConflictError:
    if run.id == other_id:
        return IdempotencyConflictError(f"run id {run.id!r} is taken by a run with another agent or input")
    return IdempotencyConflictError(
        f"idempotency key {run.idempotency_key!r} was used for run {other_id!r} with another agent or input"
    )


def _wakeup(run: NewRun) -> Wakeup | None:
    if run.error is not None or run.mode is not RunMode.QUEUED:
        return None
    return Wakeup(ref=StepRef(run_id=run.id, number=1, attempt=1), agent=run.agent, kind=StepKind.MODEL)


def _row(run: NewRun, digest: str) -> dict[str, Any]:
    change = RunChange.ENQUEUE if run.error is None else RunChange.REFUSE
    return {
        "id": run.id,
        "agent": clean_text(run.agent),
        "mode": run.mode.value,
        "status": run_after(change, None).value,
        "input": encode(run.input),
        "error": None if run.error is None else clean_text(run.error),
        "metadata": None if run.metadata is None else json.loads(encode(dict(run.metadata))),
        "idempotency_key": run.idempotency_key,
        "input_digest": digest,
        "next_step": 2 if run.error is None else 1,
    }


def _first_step(run: NewRun, created_at: datetime) -> dict[str, Any]:
    return {
        "run_id": run.id,
        "number": 1,
        "kind": StepKind.MODEL.value,
        "state": step_after(StepChange.ADD, None).value,
        "effect": ToolEffect.READ_ONLY.value,
        "due_at": created_at,
        # The producer publishes it right after the commit; if it can't, or dies, the keeper does.
        # An interactive run's is never published: marked all the same, it doesn't stand in the dispatcher's way.
        "dispatched_at": created_at,
    }


def _event(run: NewRun, created_at: datetime) -> dict[str, Any]:
    is_refused = run.error is not None
    data = {"agent": run.agent, "mode": run.mode.value, "error": run.error}
    return {
        "run_id": run.id,
        "sequence": 1,
        "at": created_at,
        "kind": (EventKind.RUN_REFUSED if is_refused else EventKind.RUN_ENQUEUED).value,
        "actor": ENQUEUED_BY,
        "data": encode({name: value for name, value in data.items() if value is not None}),
    }


def _open_dead_letters(connection: Connection, run_ids: Sequence[str]) -> dict[str, DeadLetter]:
    if not run_ids:
        return {}
    found = select(dead_letters).where(dead_letters.c.run_id.in_(run_ids), dead_letters.c.closed_at.is_(None))
    return {row["run_id"]: dead_letter_from(row) for row in connection.execute(found).mappings()}
