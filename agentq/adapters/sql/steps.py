"""The step store: what a worker does to a step. Each change holds the run's lock and decides on what it reads then.

Two paths lead to the same place. The general one locks, reads, decides here and writes. On PostgreSQL, what every step
does (fence, and a settle that fits) is one call of a function in the database; what doesn't fit takes the general path.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import ColumnElement, RowMapping, Select, bindparam, literal_column, or_, select
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from agentq.adapters.sql.change import ACTIVE, NO_FENCE, Change, EventKind, leaves_doubt
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.engine import Database, now_plus, seconds_since
from agentq.adapters.sql.late import carry_on, record_result, settle_late
from agentq.adapters.sql.rows import fence_from, payload, wakeup_from
from agentq.adapters.sql.schema import runs, steps
from agentq.domain.effects import ToolEffect
from agentq.domain.model import Charge, Decision, RunMode, RunStatus, Step, StepKind, StepRef, StepState
from agentq.domain.outcomes import Answer, Join, Recorded, Retried, Stopped, Turn
from agentq.ports import (
    FenceRequest,
    FenceVerdict,
    HistoryItem,
    Loaded,
    RunHead,
    Settled,
    Settlement,
    Verdict,
    Wakeup,
)

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

_FENCE = f"SELECT agentq_fence_1({', '.join(['%s'] * 11)})"
_SETTLE = f"SELECT o_status, o_agent, o_first_number, o_opened FROM agentq_settle_1({', '.join(['%s'] * 13)})"


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


_HISTORY = (
    select(steps.c.kind, steps.c.call_id, steps.c.result)
    .where(
        steps.c.run_id == bindparam("run_id"),
        steps.c.number < bindparam("number"),
        steps.c.state == _constant(StepState.COMPLETED),
    )
    .order_by(steps.c.number)
)


class SqlStepStore:
    """A `StepStore`; see there for what each method promises."""

    def __init__(self, database: Database, *, always_general: bool = False) -> None:
        """`always_general`: leave the database's functions alone; SQLite has none."""
        self._database = database
        self._has_functions = database.is_postgresql and not always_general
        self._head = _Statement(_head_statement(), is_postgresql=database.is_postgresql)
        self._history = _Statement(_HISTORY, is_postgresql=database.is_postgresql)

    def load(self, ref: StepRef) -> Loaded | None:
        with self._database.raw() as connection:
            rows = self._head.rows(connection, run_id=ref.run_id, number=ref.number, attempt=ref.attempt)
            if not rows:
                return None
            row = dict(zip(self._head.names, rows[0], strict=True))
            past = []
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
            history=tuple(
                [HistoryItem(kind=_KINDS[kind], call_id=call_id, result=text) for kind, call_id, text in past]
            ),
            fence=None if row["pending_effect_id"] is None else fence_from(_with_times(row)),
            handed_back_seconds=row["handed_back_seconds"],
            throttled_seconds=row["throttled_seconds"],
        )

    def fence(self, request: FenceRequest) -> FenceVerdict:
        if not self._has_functions:
            return self._fence_generally(request)
        arguments = (
            request.ref.run_id,
            request.ref.number,
            request.ref.attempt,
            request.id,
            request.owner,
            clean_text(request.tool),
            request.effect.value,
            float(request.deadline_seconds),
            None if request.settles_within_seconds is None else float(request.settles_within_seconds),
            request.is_callable,
            encode(_fence_data(request)),
        )
        with self._database.raw() as connection:
            return FenceVerdict(connection.execute(_FENCE, arguments).fetchone()[0])

    def take_back(self, ref: StepRef, fence_id: str, owner: str) -> bool:
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return False
            change = Change(connection, row, actor=owner)
            step = change.step(ref.number)
            if step is None:
                return False
            if change.run["pending_effect_id"] != fence_id:
                _contradict_ruling(change, step, ref, fence_id)
                return False
            self._take_back(change, step)
            change.event(EventKind.FENCE_TAKEN_BACK, ref.number, ref.attempt, fence=fence_id)
            change.write()
            return True

    def hand_back(self, ref: StepRef, *, due_in_seconds: float, why: str) -> bool:
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return False
            change = Change(connection, row, actor="agentq")
            step = change.step(ref.number)
            if step is None or not _is_up(change, step, ref) or _fence_of(change, ref.number) is not None:
                return False
            change.change_step(
                ref.number,
                due_at=change.now + timedelta(seconds=due_in_seconds),
                dispatched_at=None,
                handed_back_since=step["handed_back_since"] or change.now,
            )
            if step["handed_back_since"] is None:  # Told once: it may be handed back every few seconds.
                change.event(EventKind.STEP_HANDED_BACK, ref.number, ref.attempt, why=clean_text(why))
            change.write()
            return True

    def settle(self, settlement: Settlement) -> Settled:
        recorded = settlement.change
        if self._has_functions and isinstance(recorded, Recorded):
            settled = self._settle_by_function(settlement, recorded)
            if settled is not None:
                return settled
        return self._settle_generally(settlement)

    def beat(self, ref: StepRef) -> bool:
        with self._database.reading() as connection:
            row = connection.execute(_STANDING, {"run_id": ref.run_id}).one_or_none()
        if row is None:
            return False
        if row.status == RunStatus.QUEUED:
            with self._database.locked(ref.run_id) as (connection, locked_row):
                if locked_row is not None:
                    change = Change(connection, locked_row, actor="agentq")
                    change.start()
                    change.write()
        return bool(row.cancel_requested) or row.status == RunStatus.CANCELLED

    # --- fence

    def _fence_generally(self, request: FenceRequest) -> FenceVerdict:
        ref = request.ref
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return FenceVerdict.MOVED_ON
            change = Change(connection, row, actor=request.owner)
            if change.run["pending_effect_id"] == request.id:
                return FenceVerdict.STAMPED
            step = change.step(ref.number)
            if step is None or not _is_up(change, step, ref) or change.run["cancel_requested"]:
                return FenceVerdict.MOVED_ON
            if change.run["pending_effect_id"] is not None:
                return FenceVerdict.FENCE_STANDS
            change.set(
                pending_effect_id=request.id,
                pending_effect_number=ref.number,
                pending_effect_attempt=ref.attempt,
                pending_effect_tool=clean_text(request.tool),
                pending_effect_effect=request.effect.value,
                pending_effect_owner=request.owner,
                pending_effect_stamped_at=change.now,
                pending_effect_deadline_at=change.now + timedelta(seconds=request.deadline_seconds),
                pending_effect_settles_within_seconds=request.settles_within_seconds,
                pending_effect_is_callable=request.is_callable,
            )
            change.event(EventKind.FENCE_STAMPED, ref.number, ref.attempt, **_fence_data(request))
            change.write()
            return FenceVerdict.STAMPED

    def _take_back(self, change: Change, step: RowMapping) -> None:
        change.set(**NO_FENCE)
        if step["state"] not in (StepState.AVAILABLE, StepState.DEAD_LETTERED):
            return  # The run ended over something else.
        if step["state"] == StepState.DEAD_LETTERED:
            # It was shown as unknown, and is known now: nothing happened.
            change.close_dead_letter("withdrawn")
            change.event(EventKind.DEAD_LETTER_WITHDRAWN, step["number"], step["attempt"])
            change.activate()
            change.reopen_closed_steps()
        if change.run["cancel_requested"]:
            change.change_step(step["number"], state=StepState.CLOSED.value, finished_at=change.now)
            change.cancel()
            return
        change.set(open_calls=1)  # Writes run alone.
        change.change_step(
            step["number"],
            state=StepState.AVAILABLE.value,
            due_at=change.now,
            dispatched_at=None,
            finished_at=None,
            settled_by=None,
        )

    # --- settle

    def _settle_by_function(self, settlement: Settlement, recorded: Recorded) -> Settled | None:
        """None: it doesn't fit, nothing was changed."""
        ref, then = settlement.ref, recorded.then
        output = calls_text = None
        match then:
            case Answer():
                kind, output = "answer", encode(then.output)
            case Turn():
                if not then.calls or any(call.error is not None for call in then.calls):
                    return None
                kind = "turn"
                calls_text = _calls_text(then)
            case Join():
                kind = "join"
        arguments = (
            ref.run_id,
            ref.number,
            ref.attempt,
            settlement.owner,
            settlement.fence_id,
            encode(recorded.result),
            recorded.is_error,
            recorded.usage.input_tokens,
            recorded.usage.output_tokens,
            kind,
            output,
            calls_text,
            encode(_settled_data(settlement, recorded)) if settlement.with_events else None,
        )
        with self._database.raw() as connection:
            status, agent, first_number, opened = connection.execute(_SETTLE, arguments).fetchone()
        if status is None:
            return None
        if status == RunStatus.COMPLETED:
            return Settled(verdict=Verdict.APPLIED, run_status=RunStatus.COMPLETED)
        return Settled(
            verdict=Verdict.APPLIED,
            wakeups=_wakeups(ref.run_id, agent, then, first_number, opened),
            run_status=RunStatus.RUNNING,
        )

    def _settle_generally(self, settlement: Settlement) -> Settled:
        ref, owner = settlement.ref, settlement.owner
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return Settled(verdict=Verdict.MOVED_ON)
            change = Change(connection, row, actor=owner, with_events=settlement.with_events)
            step = change.step(ref.number)
            if step is None:
                return Settled(verdict=Verdict.MOVED_ON, run_status=change.status)
            if _is_settled_by(owner, step, ref):
                return Settled(verdict=Verdict.ALREADY, wakeups=_opened_by(change, step), run_status=change.status)
            fits = _is_up(change, step, ref) and _fence_of(change, ref.number) == settlement.fence_id
            match settlement.change:
                case Recorded() as recorded if fits:
                    return _record(change, settlement, recorded)
                case Recorded() as recorded if settlement.effect.is_write and settlement.fence_id is not None:
                    return settle_late(change, step, settlement, recorded)
                case Retried() if _is_up(change, step, ref) and _forbids_requeue(change, ref.number):
                    return Settled(verdict=Verdict.REFUSED, run_status=change.status)
                case Retried() as retried if fits:
                    return _requeue(change, step, settlement, retried)
                case Stopped() as stopped if fits:
                    return _stop(change, step, settlement, stopped)
                case _:
                    return Settled(verdict=Verdict.MOVED_ON, run_status=change.status)


_STANDING = select(runs.c.status, runs.c.cancel_requested).where(runs.c.id == bindparam("run_id"))
_OPENED_AT = select(steps).where(
    steps.c.run_id == bindparam("run_id"),
    steps.c.state == StepState.AVAILABLE.value,
    steps.c.dispatched_at == bindparam("at"),
)


def _record(change: Change, settlement: Settlement, recorded: Recorded) -> Settled:
    number, attempt = settlement.ref.number, settlement.ref.attempt
    record_result(change, number, settlement.owner, recorded)
    if settlement.fence_id is not None:
        change.set(**NO_FENCE)
    change.event(EventKind.STEP_SETTLED, number, attempt, **_settled_data(settlement, recorded))
    wakeups = carry_on(change, recorded)
    change.write()
    return Settled(verdict=Verdict.APPLIED, wakeups=wakeups, run_status=change.status)


def _requeue(change: Change, step: RowMapping, settlement: Settlement, retried: Retried) -> Settled:
    number, attempt = settlement.ref.number, settlement.ref.attempt
    due_at = change.now + timedelta(seconds=retried.due_in_seconds)
    fence = None if settlement.fence_id is None else fence_from(cast(RowMapping, change.run))
    if retried.waits_for_fence and fence is not None:
        due_at = max(due_at, fence.deadline_at + timedelta(seconds=fence.settles_within_seconds or 0))
    is_due = due_at <= change.now
    values: dict[str, Any] = {
        "attempt": attempt + 1,
        "due_at": due_at,
        "dispatched_at": change.now if is_due else None,
        "republished": 0,
        "handed_back_since": None,
        "is_isolated": retried.is_isolated,
        "settled_by": clean_text(settlement.owner),
        **_charged(retried.charge, step, change),
    }
    if fence is not None:
        values["may_have_happened"] = step["may_have_happened"] or leaves_doubt(change.run)
        change.set(**NO_FENCE)
    change.change_step(number, **values)
    change.event(
        EventKind.STEP_REQUEUED,
        number,
        attempt,
        charge=retried.charge.value,
        failure_class=retried.failure_class and retried.failure_class.value,
        error=clean_text(retried.error),
        due_in_seconds=round((due_at - change.now).total_seconds(), 3),
        fence=settlement.fence_id,
    )
    if change.run["cancel_requested"]:
        change.cancel()
    else:
        change.start()
    change.write()
    is_woken = is_due and change.is_active
    wakeup = wakeup_from(cast(RowMapping, {**step, **values, "agent": change.run["agent"]}))
    return Settled(verdict=Verdict.APPLIED, wakeups=(wakeup,) if is_woken else (), run_status=change.status)


def _charged(charge: Charge, step: RowMapping, change: Change) -> dict[str, Any]:
    match charge:
        case Charge.NOTHING:
            return {}
        case Charge.TRY:
            return {"tries": step["tries"] + 1}
        case Charge.CRASH:
            return {"crashes": step["crashes"] + 1}
        case Charge.PATIENCE:
            return {"throttled_since": step["throttled_since"] or change.now}


def _stop(change: Change, step: RowMapping, settlement: Settlement, stopped: Stopped) -> Settled:
    number, attempt = settlement.ref.number, settlement.ref.attempt
    is_unknown = stopped.outcome_unknown and settlement.fence_id is not None
    is_cancelled = bool(change.run["cancel_requested"]) and not is_unknown
    has_doubt = settlement.fence_id is not None and not is_unknown and leaves_doubt(change.run)
    change.change_step(
        number,
        state=StepState.CLOSED.value if is_cancelled else StepState.DEAD_LETTERED.value,
        settled_by=clean_text(settlement.owner),
        finished_at=change.now,
        may_have_happened=bool(step["may_have_happened"]) or has_doubt,
    )
    if is_cancelled:
        change.cancel()
    else:
        change.stop(number, attempt, replace(stopped, outcome_unknown=is_unknown))
    change.write()
    return Settled(verdict=Verdict.APPLIED, run_status=change.status)


def _is_up(change: Change, step: RowMapping, ref: StepRef) -> bool:
    """The attempt is the one that may run now, in a run that is active."""
    return change.is_active and step["state"] == StepState.AVAILABLE and step["attempt"] == ref.attempt


def _fence_of(change: Change, number: int) -> str | None:
    """The id of the fence that stands for that step."""
    fence_id: str | None = change.run["pending_effect_id"]
    return fence_id if change.run["pending_effect_number"] == number else None


def _forbids_requeue(change: Change, number: int) -> bool:
    """A plain write may be in flight: nobody may open another attempt before it is decided."""
    is_plain = change.run["pending_effect_effect"] == ToolEffect.NON_IDEMPOTENT_WRITE
    return _fence_of(change, number) is not None and is_plain and bool(change.run["pending_effect_is_callable"])


def _is_settled_by(owner: str, step: RowMapping, ref: StepRef) -> bool:
    """That owner's settlement of that attempt was applied before: it ended the step, or opened the next attempt."""
    if step["settled_by"] != clean_text(owner):
        return False
    is_ended = step["state"] not in (StepState.AVAILABLE, StepState.WAITING)
    return is_ended or bool(step["attempt"] == ref.attempt + 1)


def _opened_by(change: Change, step: RowMapping) -> tuple[Wakeup, ...]:
    """What the settle that ended (or requeued) the step opened, as far as it still waits: the same moment is on it."""
    if not change.is_active:
        return ()
    if step["state"] == StepState.AVAILABLE:
        rows = [step] if step["dispatched_at"] is not None else []
    else:
        names = {"run_id": change.run_id, "at": step["finished_at"]}
        rows = list(change.connection.execute(_OPENED_AT, names).mappings())
    return tuple(wakeup_from(cast(RowMapping, {**row, "agent": change.run["agent"]})) for row in rows)


def _contradict_ruling(change: Change, step: RowMapping, ref: StepRef, fence_id: str) -> None:
    """ "Not called" is an outcome too: it contradicts whoever said that this attempt's write happened."""
    if step["ruling"] != Decision.HAPPENED or step["attempt"] != ref.attempt or change.run["has_contradiction"]:
        return
    change.set(has_contradiction=True)
    change.event(EventKind.OUTCOME_CONTRADICTED, ref.number, ref.attempt, fence=fence_id, called=False)
    change.write()


def _fence_data(request: FenceRequest) -> dict[str, Any]:
    return {
        "fence": request.id,
        "tool": clean_text(request.tool),
        "effect": request.effect.value,
        "is_callable": request.is_callable,
    }


def _settled_data(settlement: Settlement, recorded: Recorded) -> dict[str, Any]:
    data: dict[str, Any] = {"effect": settlement.effect.value}
    if settlement.fence_id is not None:
        data["fence"] = settlement.fence_id
    if recorded.is_error:
        data["is_error"] = True
    if recorded.note is not None:
        data["note"] = recorded.note
    return data


def _calls_text(turn: Turn) -> str:
    first_batch = min(call.batch for call in turn.calls)
    return json.dumps(
        [
            {
                "batch": call.batch,
                "tool": call.tool and clean_text(call.tool),
                "call_id": call.call_id and clean_text(call.call_id),
                "arguments": encode(call.arguments),
                "effect": call.effect.value,
                "deadline_seconds": call.deadline_seconds,
                "is_open": call.batch == first_batch,
            }
            for call in turn.calls
        ]
    )


def _wakeups(
    run_id: str, agent: str, then: Turn | Join | Answer, first_number: int | None, opened: list[dict[str, Any]] | None
) -> tuple[Wakeup, ...]:
    """What the function opened: the turn's first batch, a batch that waited, or the model's next turn."""
    if isinstance(then, Turn) and first_number is not None:
        first_batch = min(call.batch for call in then.calls)
        return tuple(
            Wakeup(
                ref=StepRef(run_id=run_id, number=number, attempt=1),
                agent=agent,
                kind=StepKind.TOOL,
                tool=call.tool,
                effect=call.effect,
                deadline_seconds=call.deadline_seconds,
            )
            for number, call in enumerate(then.calls, first_number)
            if call.batch == first_batch
        )
    if opened is not None:
        rows = ({**row, "run_id": run_id, "kind": StepKind.TOOL.value, "agent": agent} for row in opened)
        return tuple(wakeup_from(cast(RowMapping, row)) for row in rows)
    if first_number is not None:
        return (Wakeup(ref=StepRef(run_id=run_id, number=first_number, attempt=1), agent=agent, kind=StepKind.MODEL),)
    return ()


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
