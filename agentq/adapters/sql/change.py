"""One change of a run under its lock: what becomes of its row, its steps, its dead letter and its audit log."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, bindparam, insert, select, update

from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.errors import auditing
from agentq.adapters.sql.rows import step_from, wakeup_from
from agentq.adapters.sql.schema import dead_letters, events, runs, steps
from agentq.adapters.sql.sealing import seal
from agentq.domain.effects import ToolEffect
from agentq.domain.events import EventKind
from agentq.domain.fingerprint import fingerprint
from agentq.domain.model import NewStep, RunMode, RunStatus, StepKind, StepState
from agentq.domain.outcomes import Stopped
from agentq.domain.resume import AddCalls, AddModelStep, Finish, OpenBatch, StillOpen, next_after
from agentq.ports.dispatch import Wakeup

ACTIVE = (RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.WAITING_FOR_APPROVAL)
OPEN = (StepState.AVAILABLE, StepState.WAITING)

NO_FENCE: dict[str, Any] = {column.name: None for column in runs.c if column.name.startswith("pending_effect_")}

_step = select(steps).where(steps.c.run_id == bindparam("run_id"), steps.c.number == bindparam("number"))
_steps = select(steps).where(steps.c.run_id == bindparam("run_id")).order_by(steps.c.number)
_waiting = (
    select(steps)
    .where(steps.c.run_id == bindparam("run_id"), steps.c.state == StepState.WAITING.value)
    .order_by(steps.c.number)
)
_close_open = update(steps).where(
    steps.c.run_id == bindparam("of_run"), steps.c.state.in_([state.value for state in OPEN])
)
_reopen_closed = update(steps).where(steps.c.run_id == bindparam("of_run"), steps.c.state == StepState.CLOSED.value)
_change_step = update(steps).where(steps.c.run_id == bindparam("of_run"), steps.c.number == bindparam("of_number"))
_change_run = update(runs).where(runs.c.id == bindparam("of_run"))
_insert_steps = insert(steps)
_insert_events = insert(events)
_insert_dead_letter = insert(dead_letters).values(
    tool=select(steps.c.tool)
    .where(steps.c.run_id == bindparam("of_run"), steps.c.number == bindparam("of_number"))
    .scalar_subquery()
)
_close_dead_letter = update(dead_letters).where(
    dead_letters.c.run_id == bindparam("of_run"), dead_letters.c.closed_at.is_(None)
)
_answer_dead_letter = (
    update(dead_letters)
    .where(dead_letters.c.run_id == bindparam("of_run"), dead_letters.c.closed_at.is_(None))
    .values(outcome_unknown=False)
)
_open_dead_letter = select(dead_letters).where(
    dead_letters.c.run_id == bindparam("run_id"), dead_letters.c.closed_at.is_(None)
)


class Change:
    """Made from what `Database.locked` yields. Steps and dead letters are written at once; what becomes of the run's
    row, and the events, are collected and written by `write`."""

    def __init__(self, connection: Connection, row: Row[Any], *, actor: str, with_events: bool = True) -> None:
        """`with_events` False: events aren't stored, only counted as lost."""
        self.connection = connection
        self.run: dict[str, Any] = dict(row._mapping)
        self.now: datetime = self.run.pop("now")
        self.run_id: str = self.run["id"]
        self.actor = clean_text(actor)
        self._with_events = with_events
        self._changed: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []
        self._has_ended = False

    # --- the run's row and its events

    @property
    def is_active(self) -> bool:
        return self.run["status"] in ACTIVE

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.run["status"])

    def set(self, **values: Any) -> None:
        """Columns of the run's row that become these."""
        self.run.update(values)
        self._changed.update(values)

    def event(self, kind: EventKind, number: int | None = None, attempt: int | None = None, **data: Any) -> None:
        """An event to store. `data` holds ids, names and reasons, never a payload; what is None is left out."""
        known = {name: value for name, value in data.items() if value is not None}
        self._events.append({"kind": kind.value, "number": number, "attempt": attempt, "data": encode(known)})

    def write(self) -> None:
        """Store the events and the run's row, and seal a run that ended. Raises AuditRefusedError when the database
        refuses the events or the seal."""
        if self._events and self._with_events:
            first = self.run["events_count"] + 1
            rows = [
                {"run_id": self.run_id, "sequence": sequence, "at": self.now, "actor": self.actor, **each}
                for sequence, each in enumerate(self._events, first)
            ]
            with auditing():
                self.connection.execute(_insert_events, rows)
            self.set(events_count=first + len(rows) - 1)
        elif self._events:
            self.set(events_lost=self.run["events_lost"] + len(self._events))
        if self._has_ended and self._with_events:
            sealed = {"sequence": self.run["events_count"], "events_lost": self.run["events_lost"], "at": self.now}
            seal(self.connection, self.run_id, **sealed)
        if self._changed:
            self.connection.execute(_change_run, {"of_run": self.run_id, **self._changed})
        self._events, self._changed, self._has_ended = [], {}, False

    def start(self) -> None:
        """The run is running, if it was queued."""
        if self.run["status"] == RunStatus.QUEUED:
            self.set(status=RunStatus.RUNNING.value, started_at=self.run["started_at"] or self.now)

    def activate(self) -> None:
        """The ended run is running again."""
        self._has_ended = False
        started_at = self.run["started_at"] or self.now
        self.set(status=RunStatus.RUNNING.value, started_at=started_at, finished_at=None, error=None, output=None)

    def end(self, status: RunStatus, **values: Any) -> None:
        """The run has ended; `values` are further columns of its row."""
        self._has_ended = True
        started_at = self.run["started_at"] or self.now
        self.set(status=status.value, started_at=started_at, finished_at=self.now, open_calls=0, **values)

    def cancel(self) -> None:
        """The run ends as cancelled: open steps close with it, no fence stands, a dead letter is closed."""
        self.close_open_steps()
        self.close_dead_letter("cancelled")
        self.end(RunStatus.CANCELLED, error=None, **NO_FENCE)
        self.event(
            EventKind.RUN_CANCELLED,
            requested_by=self.run["cancel_requested_by"],
            reason=self.run["cancel_requested_reason"],
        )

    # --- steps

    def step(self, number: int) -> RowMapping | None:
        row = self.connection.execute(_step, {"run_id": self.run_id, "number": number}).one_or_none()
        return None if row is None else row._mapping

    def steps(self) -> Sequence[RowMapping]:
        return self.connection.execute(_steps, {"run_id": self.run_id}).mappings().all()

    def change_step(self, number: int, **values: Any) -> None:
        self.connection.execute(_change_step, {"of_run": self.run_id, "of_number": number, **values})

    def close_open_steps(self) -> None:
        values = {"state": StepState.CLOSED.value, "finished_at": self.now}
        self.connection.execute(_close_open, {"of_run": self.run_id, **values})

    def reopen_closed_steps(self) -> None:
        """What the run's end closed waits again."""
        values = {"state": StepState.WAITING.value, "finished_at": None, "due_at": None, "dispatched_at": None}
        self.connection.execute(_reopen_closed, {"of_run": self.run_id, **values})

    def add_model_step(self) -> tuple[Wakeup, ...]:
        """The model's next turn, open, and marked as dispatched."""
        turn = NewStep(kind=StepKind.MODEL)
        return self._add([turn], turn.batch)

    def add_calls(self, calls: Sequence[NewStep]) -> tuple[Wakeup, ...]:
        """The calls of a turn: the first batch is open, and marked as dispatched; the others wait.

        Those that can't be made are completed as error results; with no other, the model's turn comes next at once.
        """
        possible = [call for call in calls if call.error is None]
        first_batch = min((call.batch for call in possible), default=None)
        self.set(open_calls=sum(call.batch == first_batch for call in possible))
        opened = self._add(calls, first_batch) if calls else ()
        return opened or self.add_model_step()

    def join(self) -> tuple[Wakeup, ...]:
        """One call of the open batch is done: the last one opens what comes next. Returns what was opened."""
        left = self.run["open_calls"] - 1
        if left > 0:
            self.set(open_calls=left)
            return ()
        waiting = self.connection.execute(_waiting, {"run_id": self.run_id}).mappings().all()
        if not waiting:
            self.set(open_calls=0)
            return self.add_model_step()
        batch = min(row["batch"] for row in waiting)
        return self.open([row for row in waiting if row["batch"] == batch])

    def open(self, rows: Iterable[RowMapping]) -> tuple[Wakeup, ...]:
        """These steps are available now, and marked as dispatched."""
        opened = list(rows)
        for row in opened:
            self.change_step(row["number"], **self._opening())
        self.set(open_calls=sum(row["kind"] == StepKind.TOOL for row in opened))
        return tuple(wakeup_from(self._with_agent(row)) for row in opened)

    def go_on(self) -> tuple[Wakeup, ...]:
        """What comes next, computed anew from the recorded steps; for runs that nothing carries on by itself."""
        rows = self.steps()
        match next_after([step_from(row) for row in rows]):
            case StillOpen():
                available = [row for row in rows if row["state"] == StepState.AVAILABLE]
                self.set(open_calls=sum(row["kind"] == StepKind.TOOL for row in available))
                return ()
            case OpenBatch(numbers=numbers):
                return self.open(row for row in rows if row["number"] in numbers)
            case AddModelStep():
                self.set(next_step=len(rows) + 1, open_calls=0)
                return self.add_model_step()
            case AddCalls(calls=calls):
                self.set(next_step=len(rows) + 1)
                return self.add_calls(calls)
            case Finish(output=output):
                self.complete(encode(output))
                return ()

    def complete(self, output: str) -> None:
        """The run has its answer (JSON text)."""
        self.end(RunStatus.COMPLETED, output=output, error=None)
        self.event(EventKind.RUN_COMPLETED)

    # --- dead letters

    def stop(self, number: int, attempt: int, stopped: Stopped, **told: Any) -> None:
        """The run ends as failed over that step. A queued run's is a dead letter, as is every unknown write. `told` is
        what its event says besides."""
        error = clean_text(stopped.error)
        is_dead_letter = self.run["mode"] == RunMode.QUEUED or stopped.outcome_unknown
        if is_dead_letter:
            self.connection.execute(
                _insert_dead_letter,
                {
                    "run_id": self.run_id,
                    "number": number,
                    "of_run": self.run_id,
                    "of_number": number,
                    "agent": self.run["agent"],
                    "reason": stopped.reason.value,
                    "failure_class": stopped.failure_class.value,
                    "error": error,
                    "fingerprint": fingerprint(error),
                    "outcome_unknown": stopped.outcome_unknown,
                    "created_at": self.now,
                },
            )
        self.close_open_steps()
        self.end(RunStatus.FAILED, error=error, **({} if stopped.outcome_unknown else NO_FENCE))
        self.event(
            EventKind.RUN_DEAD_LETTERED if is_dead_letter else EventKind.RUN_FAILED,
            number,
            attempt,
            reason=stopped.reason.value,
            failure_class=stopped.failure_class.value,
            outcome_unknown=stopped.outcome_unknown or None,
            error=error,
            **told,
        )

    def dead_letter(self) -> RowMapping | None:
        """The open one."""
        row = self.connection.execute(_open_dead_letter, {"run_id": self.run_id}).one_or_none()
        return None if row is None else row._mapping

    def answer_dead_letter(self) -> None:
        """Nothing is in doubt any more; it stays open."""
        self.connection.execute(_answer_dead_letter, {"of_run": self.run_id})

    def close_dead_letter(self, closed_as: str) -> None:
        values = {"closed_at": self.now, "closed_by": self.actor, "closed_as": closed_as}
        self.connection.execute(_close_dead_letter, {"of_run": self.run_id, **values})

    def _add(self, new: Sequence[NewStep], first_batch: int | None) -> tuple[Wakeup, ...]:
        rows = [self._row(number, each, first_batch) for number, each in enumerate(new, self.run["next_step"])]
        self.connection.execute(_insert_steps, rows)
        for row in rows:
            if row["is_error"]:
                self.event(EventKind.STEP_SETTLED, row["number"], 1, effect=row["effect"], note="not_called")
        self.set(next_step=self.run["next_step"] + len(rows))
        opened = (row for row in rows if row["state"] == StepState.AVAILABLE)
        return tuple(wakeup_from(self._with_agent(row)) for row in opened)

    def _row(self, number: int, new: NewStep, first_batch: int | None) -> dict[str, Any]:
        is_open = new.error is None and new.batch == first_batch
        still_to_do = StepState.AVAILABLE if is_open else StepState.WAITING
        return {
            "run_id": self.run_id,
            "number": number,
            "kind": new.kind.value,
            "state": (still_to_do if new.error is None else StepState.COMPLETED).value,
            "attempt": 1,
            "batch": new.batch,
            "tool": new.tool and clean_text(new.tool),
            "call_id": new.call_id and clean_text(new.call_id),
            "arguments": None if new.kind is StepKind.MODEL else encode(new.arguments),
            "effect": new.effect.value,
            "deadline_seconds": new.deadline_seconds,
            "result": None if new.error is None else encode(clean_text(new.error)),
            "is_error": new.error is not None,
            "finished_at": None if new.error is None else self.now,
            "is_isolated": False,
            "due_at": self.now if is_open else None,
            "dispatched_at": self.now if is_open else None,
        }

    def _opening(self) -> dict[str, Any]:
        return {"state": StepState.AVAILABLE.value, "due_at": self.now, "dispatched_at": self.now, "finished_at": None}

    def _with_agent(self, row: Any) -> Any:
        return {**row, "agent": self.run["agent"]}


def leaves_doubt(run: dict[str, Any]) -> bool:
    """The fence on that row is a keyed write's that may have been called: clearing it leaves *may have happened*."""
    is_keyed = run["pending_effect_effect"] == ToolEffect.IDEMPOTENT_WRITE
    return is_keyed and bool(run["pending_effect_is_callable"])
