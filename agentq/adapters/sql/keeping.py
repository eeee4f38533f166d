"""What the keeper reads of runs in SQL, and the marks it leaves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import RowMapping, Select, TextClause, and_, bindparam, exists, literal_column, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from agentq.adapters.sql.change import NO_FENCE, Change
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.engine import Database, now_plus, seconds_since
from agentq.adapters.sql.locking import is_one_of, lock_runs_of
from agentq.adapters.sql.rows import fence_from, wakeup_from
from agentq.adapters.sql.schema import DUE_FIRST, DUE_NEXT, IN_FLIGHT, agents, runs, steps
from agentq.adapters.sql.settling import is_up
from agentq.domain.events import EventKind
from agentq.domain.failures import FailureClass
from agentq.domain.lifecycle import StepChange, step_after
from agentq.domain.model import DeadLetterReason, Fence, RunMode, RunStatus, StepRef, StepState
from agentq.domain.outcomes import Stopped
from agentq.ports.dispatch import Wakeup
from agentq.ports.keeping import InFlight

KEEPER = "keeper"
# Said so, no index of due steps fits, and a planner without statistics can't take it for the shorter way.
_NOT_AVAILABLE = [state.value for state in StepState if state is not StepState.AVAILABLE]
OLDEST_QUEUED = 1000  # Of these it is looked whether they lost their step; the others become the oldest in time.

# Not by status: its index would lead planners to begin with a million queued runs instead of with the steps.
_is_active = runs.c.finished_at.is_(None)
_is_for_workers = and_(_is_active, runs.c.mode == RunMode.QUEUED.value)
_of_its_run = steps.c.run_id == runs.c.id
_is_under_fence = runs.c.pending_effect_number == steps.c.number
_fence = [column for column in runs.c if column.name.startswith("pending_effect_")]
_is_past_deadline = (runs.c.pending_effect_deadline_at < now_plus()).label("is_past_deadline")
_is_settled = (seconds_since(runs.c.pending_effect_deadline_at) > runs.c.pending_effect_settles_within_seconds).label(
    "is_settled"
)
_wakeup = [
    steps.c.run_id,
    steps.c.number,
    steps.c.attempt,
    runs.c.agent,
    steps.c.kind,
    steps.c.tool,
    steps.c.effect,
    steps.c.deadline_seconds,
    steps.c.is_isolated,
]


def _due(condition: TextClause) -> Select[Any]:
    # The limit is inside, so that whatever the planner believes, no more steps than that meet their runs.
    oldest = (
        select(steps)
        .where(condition, steps.c.due_at <= now_plus())
        .order_by(steps.c.due_at, steps.c.run_id)
        .limit(bindparam("limit"))
        .subquery()
    )
    return (
        select(*(column if column.table is runs else oldest.c[column.name] for column in _wakeup))
        .join_from(oldest, runs, runs.c.id == oldest.c.run_id)
        .where(_is_for_workers)
        .order_by(oldest.c.due_at, oldest.c.run_id)
        # A run that is locked is being changed: its step, if it still has one, is found at the next pass.
        .with_for_update(of=runs, skip_locked=True, key_share=True)
    )


_due_first = _due(DUE_FIRST)
_due_next = _due(DUE_NEXT)

_in_flight = (
    select(
        *_wakeup,
        *_fence,
        _is_past_deadline,
        _is_settled,
        _is_under_fence.label("is_under_fence"),
        runs.c.cancel_requested,
        steps.c.crashes,
        steps.c.republished,
        seconds_since(steps.c.dispatched_at).label("dispatched_seconds"),
        seconds_since(runs.c.created_at).label("run_age_seconds"),
    )
    .join_from(steps, runs, _of_its_run)
    .where(
        IN_FLIGHT,
        _is_for_workers,
        tuple_(steps.c.run_id, steps.c.number) > tuple_(bindparam("after_run"), bindparam("after_number")),
    )
    .order_by(steps.c.run_id, steps.c.number)
    .limit(bindparam("limit"))
)

_stands_still = and_(
    runs.c.mode == RunMode.QUEUED.value,
    runs.c.pending_effect_id.is_(None),
    # Asked apart: the first is an index look-up and answers for nearly all.
    ~exists().where(_of_its_run, IN_FLIGHT),
    ~exists().where(_of_its_run, steps.c.state == StepState.AVAILABLE.value),
)
_running_without_step = (
    select(runs.c.id)
    .where(runs.c.status == RunStatus.RUNNING.value, _stands_still)
    .order_by(runs.c.created_at)
    .limit(bindparam("limit"))
)
_oldest_queued = (
    select(runs.c.id)
    .where(runs.c.status == RunStatus.QUEUED.value)
    .order_by(runs.c.created_at)
    .limit(OLDEST_QUEUED)
    .subquery()
)
_queued_without_step = (
    select(runs.c.id).where(runs.c.id.in_(select(_oldest_queued.c.id)), _stands_still).limit(bindparam("limit"))
)

_interactive = (
    select(runs.c.id, steps.c.number, steps.c.attempt, *_fence, _is_past_deadline)
    .join_from(runs, steps, and_(_of_its_run, steps.c.state == StepState.AVAILABLE.value), isouter=True)
    .where(runs.c.mode == literal_column("'interactive'"), runs.c.finished_at.is_(None))  # As its index says it.
    .order_by(runs.c.id, steps.c.number)
)


class SqlKeeperStore:
    """`KeeperStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take_due(self, limit: int, *, first_steps: bool) -> list[Wakeup]:
        with self._database.writing() as connection:
            due = connection.execute(_due_first if first_steps else _due_next, {"limit": limit}).mappings().all()
            wakeups = [wakeup_from(row) for row in due]
            if not wakeups:
                return []
            # Read before its run was locked, a step may have moved on since.
            is_still_due = and_(
                is_one_of([wakeup.ref for wakeup in wakeups]),
                steps.c.state.not_in(_NOT_AVAILABLE),
                steps.c.dispatched_at.is_(None),
            )
            marked = update(steps).where(is_still_due).values(dispatched_at=now_plus())
            taken = _refs(connection.execute(marked.returning(*_ref)).mappings())
        return [wakeup for wakeup in wakeups if wakeup.ref in taken]

    def in_flight(self, *, after: StepRef | None, limit: int) -> list[InFlight]:
        """A step under a fence that isn't marked as dispatched is so at the next `take_due`, whatever its fence."""
        values = {
            "after_run": after.run_id if after else "",
            "after_number": after.number if after else 0,
            "limit": limit,
        }
        with self._database.reading() as connection:
            return [_in_flight_from(row) for row in connection.execute(_in_flight, values).mappings()]

    def mark_republished(self, refs: Sequence[StepRef]) -> list[StepRef]:
        if not refs:
            return []
        with self._database.writing() as connection:
            lock_runs_of(connection, refs)
            marked = (
                update(steps)
                .where(is_one_of(refs), steps.c.state == StepState.AVAILABLE.value)
                .values(dispatched_at=now_plus(), republished=steps.c.republished + 1)
                .returning(*_ref)
            )
            found = _refs(connection.execute(marked).mappings())
        return [ref for ref in refs if ref in found]

    def ask_probe(self, ref: StepRef, fence_id: str) -> Wakeup | None:
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None or row.pending_effect_id != fence_id or not row.pending_effect_has_probe:
                return None
            change = Change(connection, row, actor=KEEPER)
            step = change.step(ref.number)
            if step is None or not is_up(change, step, ref):
                return None
            change.change_step(ref.number, due_at=change.now, dispatched_at=change.now, republished=0)
            change.set(pending_effect_probes=row.pending_effect_probes + 1)
            change.write()
            return wakeup_from({**step, "agent": row.agent})

    def runs_without_open_step(self, limit: int) -> list[str]:
        """Of queued runs only the oldest are looked at: they have a step from the start, and there may be millions."""
        with self._database.reading() as connection:
            running = connection.execute(_running_without_step, {"limit": limit}).scalars().all()
            queued = connection.execute(_queued_without_step, {"limit": limit}).scalars().all()
        return [*running, *queued][:limit]

    def resume(self, run_id: str) -> tuple[Wakeup, ...]:
        with self._database.locked(run_id) as (connection, row):
            if row is None:
                return ()
            change = Change(connection, row, actor=KEEPER)
            has_open_step = any(step["state"] == StepState.AVAILABLE for step in change.steps())
            if not change.is_active or row.mode != RunMode.QUEUED or row.pending_effect_id or has_open_step:
                return ()
            if row.cancel_requested:
                change.cancel()
                change.write()
                return ()
            wakeups = change.go_on()
            change.event(EventKind.RUN_RESUMED, opened=[wakeup.ref.number for wakeup in wakeups])
            change.write()
            return wakeups

    def interactive_runs(self) -> list[tuple[StepRef, Fence | None, bool]]:
        with self._database.reading() as connection:
            rows = connection.execute(_interactive).mappings().all()
        first_of_run: dict[str, tuple[StepRef, Fence | None, bool]] = {}
        for row in rows:
            ref = StepRef(run_id=row["id"], number=row["number"] or 0, attempt=row["attempt"] or 1)
            first_of_run.setdefault(row["id"], (ref, fence_from(row), bool(row["is_past_deadline"])))
        return list(first_of_run.values())

    def fail_interactive(self, run_id: str, *, error: str) -> bool:
        with self._database.locked(run_id) as (connection, row):
            if row is None or row.mode != RunMode.INTERACTIVE:
                return False
            change = Change(connection, row, actor=KEEPER)
            if not change.is_active:
                return False
            if row.pending_effect_id is not None and not row.pending_effect_is_callable:
                change.set(**NO_FENCE)  # Nothing can have been called.
            is_unknown = change.run["pending_effect_id"] is not None
            if row.cancel_requested and not is_unknown:
                change.cancel()
            else:
                _fail(change, error, is_unknown=is_unknown)
            change.write()
            return True

    def see_agents(self, served: Mapping[str, int]) -> None:
        if not served:
            return
        insert = postgresql.insert if self._database.is_postgresql else sqlite.insert
        new = insert(agents).values(registered_at=now_plus(), seen_at=now_plus())
        seen = new.on_conflict_do_update(
            index_elements=[agents.c.name],
            set_={"seen_at": now_plus(), "input_bytes_max": new.excluded.input_bytes_max},
        )
        # One order for everybody, or two workers would wait for each other for ever.
        rows = [{"name": clean_text(name), "input_bytes_max": served[name]} for name in sorted(served)]
        with self._database.writing() as connection:
            connection.execute(seen, rows)


def _fail(change: Change, error: str, *, is_unknown: bool) -> None:
    number, attempt = _step_to_blame(change)
    if number and is_unknown:
        state = step_after(StepChange.STOP, StepState.AVAILABLE)
        change.change_step(number, state=state.value, finished_at=change.now)
    stopped = Stopped(
        reason=DeadLetterReason.NOT_RETRYABLE,
        failure_class=FailureClass.UNKNOWN,
        error=error,
        outcome_unknown=is_unknown,
    )
    change.stop(number, attempt, stopped)


def _step_to_blame(change: Change) -> tuple[int, int]:
    if change.run["pending_effect_id"] is not None:
        return change.run["pending_effect_number"], change.run["pending_effect_attempt"]
    available = (step for step in change.steps() if step["state"] == StepState.AVAILABLE)
    return next(((step["number"], step["attempt"]) for step in available), (0, 1))


_ref = (steps.c.run_id, steps.c.number, steps.c.attempt)


def _refs(rows: Iterator[RowMapping]) -> set[StepRef]:
    return {StepRef(run_id=row["run_id"], number=row["number"], attempt=row["attempt"]) for row in rows}


def _in_flight_from(row: RowMapping) -> InFlight:
    fence = fence_from(row) if row["is_under_fence"] else None
    return InFlight(
        wakeup=wakeup_from(row),
        crashes=row["crashes"],
        dispatched_seconds=row["dispatched_seconds"],
        republished=row["republished"],
        is_cancelled=bool(row["cancel_requested"]),
        fence=fence,
        fence_is_past_deadline=fence is not None and bool(row["is_past_deadline"]),
        fence_is_settled=fence is not None and bool(row["is_settled"]),
        run_age_seconds=row["run_age_seconds"],
    )
