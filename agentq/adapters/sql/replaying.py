"""Running failed runs again in SQL: one at a time, or many in one transaction with a few statements for all."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, and_, bindparam, insert, select, update

from agentq.adapters.sql.change import Change
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.discarding import discarded_already
from agentq.adapters.sql.errors import auditing
from agentq.adapters.sql.rows import fence_from, wakeup_from
from agentq.adapters.sql.schema import dead_letters, events, runs, steps
from agentq.domain.errors import AgentqError, AlreadyDecidedError, DecisionRequiredError, RefusedError
from agentq.domain.events import EventKind
from agentq.domain.lifecycle import RunChange, StepChange, run_after, run_sources, step_after, step_sources
from agentq.domain.model import RunMode, RunStatus, Step, StepKind, StepState
from agentq.domain.resume import OpenBatch, next_after
from agentq.domain.times import time_text
from agentq.ports.dispatch import Wakeup

REPLAYED = "replayed"

_SOURCES = [state.value for state in step_sources(StepChange.REPLAY)]
_ANEW: dict[str, Any] = {
    "attempt": steps.c.attempt + 1,
    "tries": 0,
    "crashes": 0,
    "throttled_since": None,
    "handed_back_since": None,
    "parked_since": None,
    "republished": 0,
    "is_isolated": False,
    "settled_by": None,
    "finished_at": None,
}
"""What becomes of every step that a replay opens again: a new attempt, with new budgets."""

_WAITING: dict[str, Any] = {"state": StepState.WAITING.value, "due_at": None, "dispatched_at": None}
_reopen = (
    update(steps).where(steps.c.run_id == bindparam("of_run"), steps.c.state.in_(_SOURCES)).values(**_ANEW, **_WAITING)
)
_stands_at = and_(
    steps.c.run_id.in_(bindparam("run_ids", expanding=True)),
    steps.c.number.between(bindparam("first"), bindparam("last")),
    steps.c.state.in_(_SOURCES),
)
_last_replay = (
    select(events.c.actor, events.c.at)
    .where(events.c.run_id == bindparam("run_id"), events.c.kind == EventKind.RUN_REPLAYED.value)
    .order_by(events.c.sequence.desc())
    .limit(1)
)


def refusal_to_replay(change: Change) -> AgentqError | None:
    """Why the run can't be run again as it is; None: it can."""
    run, run_id = change.run, change.run_id
    if run["cancel_requested"] or change.status is RunStatus.CANCELLED:
        return RefusedError(f"run {run_id!r} was cancelled: it can't be resumed")
    if change.status not in run_sources(RunChange.REPLAY):
        last = change.connection.execute(_last_replay, {"run_id": run_id}).one_or_none()
        if last is None:
            return AlreadyDecidedError(f"run {run_id!r} is {change.status}; only a failed run can be replayed")
        return AlreadyDecidedError(
            f"run {run_id!r} is {change.status}: {last.actor} replayed it at {time_text(last.at)} already"
        )
    fence = fence_from(run)
    if fence is not None:
        return DecisionRequiredError(
            f"whether {fence.tool!r} of step {fence.number} happened is not known: "
            "say that it happened, with its result, or that it did not happen"
        )
    if run["next_step"] == 1:
        return RefusedError(f"run {run_id!r} was refused when it was to be enqueued ({run['error']}): enqueue it anew")
    return discarded_already(change)


def replay_run(change: Change, *, reason: str) -> tuple[Wakeup, ...]:
    """Run it on from where it stopped; nothing refuses."""
    change.connection.execute(_reopen, {"of_run": change.run_id})
    change.activate()
    change.set(mode=RunMode.QUEUED.value)  # A lost caller doesn't come back; workers take it on.
    change.close_dead_letter(REPLAYED)
    wakeups = change.go_on()
    change.event(
        EventKind.RUN_REPLAYED,
        reason=clean_text(reason),
        opened=[wakeup.ref.number for wakeup in wakeups],
    )
    return wakeups


class ReplayOfMany:
    """Replays of locked runs with a few statements for all: each run comes to what `replay_run` brings it to.

    It takes those that stand as most dead letters do: failed, no cancel, no fence, and steps to open. The others are
    for the one way that knows every case.
    """

    def __init__(self, connection: Connection, rows: Sequence[Row[Any]], *, actor: str, reason: str) -> None:
        self._connection = connection
        self._actor = clean_text(actor)
        self._reason = clean_text(reason)
        letters = self._open_dead_letters([row.id for row in rows if _is_plain(row)])
        undone = self._undone(letters)
        self._rows = {row.id: row for row in rows if row.id in undone}
        self._undone_rows = undone

    @property
    def run_ids(self) -> Iterable[str]:
        """Those that it takes."""
        return self._rows.keys()

    def replay(self) -> dict[str, tuple[Wakeup, ...]]:
        """Replay them all: what to wake, by run."""
        if not self._rows:
            return {}
        now: datetime = next(iter(self._rows.values())).now
        opened = {run_id: _first_batch(rows) for run_id, rows in self._undone_rows.items()}
        self._open(opened, now)
        self._let_wait([run_id for run_id, rows in opened.items() if len(rows) < len(self._undone_rows[run_id])])
        self._close_dead_letters(now)
        self._tell(opened, now)
        self._activate(opened, now)
        return {
            run_id: tuple(
                wakeup_from(
                    {
                        **row,
                        "attempt": row["attempt"] + 1,
                        "is_isolated": False,
                        "agent": self._rows[run_id].agent,
                    }
                )
                for row in rows
            )
            for run_id, rows in opened.items()
        }

    def _open_dead_letters(self, run_ids: list[str]) -> list[str]:
        is_open = and_(dead_letters.c.run_id.in_(run_ids), dead_letters.c.closed_at.is_(None))
        return list(self._connection.execute(select(dead_letters.c.run_id).where(is_open)).scalars())

    def _undone(self, run_ids: list[str]) -> dict[str, list[RowMapping]]:
        columns = ("run_id", "number", "kind", "state", "attempt", "batch", "tool", "effect", "deadline_seconds")
        undone = (
            select(*(steps.c[name] for name in columns))
            .where(steps.c.run_id.in_(run_ids), steps.c.state.in_(_SOURCES))
            .order_by(steps.c.run_id, steps.c.number)
        )
        found: defaultdict[str, list[RowMapping]] = defaultdict(list)
        for row in self._connection.execute(undone).mappings():
            found[row["run_id"]].append(row)
        return found

    def _open(self, opened: dict[str, list[RowMapping]], now: datetime) -> None:
        waiting = step_after(StepChange.REPLAY, StepState.DEAD_LETTERED)
        values = {**_ANEW, "state": step_after(StepChange.OPEN, waiting).value, "due_at": now, "dispatched_at": now}
        # What is to be opened of a run stands side by side; in one outage most runs stopped at the same few places.
        by_place: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for run_id, rows in opened.items():
            by_place[rows[0]["number"], rows[-1]["number"]].append(run_id)
        for (first, last), run_ids in by_place.items():
            names = {"run_ids": run_ids, "first": first, "last": last}
            self._connection.execute(update(steps).where(_stands_at).values(values), names)

    def _let_wait(self, run_ids: list[str]) -> None:
        if run_ids:
            rest = and_(steps.c.run_id.in_(run_ids), steps.c.state.in_(_SOURCES))
            self._connection.execute(update(steps).where(rest).values(**_ANEW, **_WAITING))

    def _close_dead_letters(self, now: datetime) -> None:
        closed = (
            update(dead_letters)
            .where(dead_letters.c.run_id.in_(self._rows), dead_letters.c.closed_at.is_(None))
            .values(closed_at=now, closed_by=self._actor, closed_as=REPLAYED)
        )
        self._connection.execute(closed)

    def _tell(self, opened: dict[str, list[RowMapping]], now: datetime) -> None:
        told = [
            {
                "run_id": run_id,
                "sequence": self._rows[run_id].events_count + 1,
                "at": now,
                "kind": EventKind.RUN_REPLAYED.value,
                "actor": self._actor,
                "data": encode({"reason": self._reason, "opened": [row["number"] for row in rows]}),
            }
            for run_id, rows in opened.items()
        ]
        with auditing():
            self._connection.execute(insert(events), told)

    def _activate(self, opened: dict[str, list[RowMapping]], now: datetime) -> None:
        by_open_calls: defaultdict[int, list[str]] = defaultdict(list)
        for run_id, rows in opened.items():
            by_open_calls[sum(row["kind"] == StepKind.TOOL for row in rows)].append(run_id)
        for open_calls, run_ids in by_open_calls.items():
            running = update(runs).where(runs.c.id.in_(run_ids))
            self._connection.execute(
                running.values(
                    status=run_after(RunChange.REPLAY, RunStatus.FAILED).value,
                    mode=RunMode.QUEUED.value,
                    finished_at=None,
                    error=None,
                    output=None,
                    open_calls=open_calls,
                    events_count=runs.c.events_count + 1,
                )
            )


def _is_plain(row: Row[Any]) -> bool:
    is_failed = row.status in run_sources(RunChange.REPLAY)
    # Without a start the run would get one: a case for the other way, as is a cancelled or doubtful run.
    return is_failed and not row.cancel_requested and row.pending_effect_id is None and row.started_at is not None


def _first_batch(rows: list[RowMapping]) -> list[RowMapping]:
    following = next_after(
        [
            Step(
                run_id=row["run_id"],
                number=row["number"],
                kind=StepKind(row["kind"]),
                state=StepState(row["state"]),
                attempt=row["attempt"],
                batch=row["batch"],
            )
            for row in rows
        ]
    )
    assert isinstance(following, OpenBatch)  # None of them is completed or open.
    return [row for row in rows if row["number"] in following.numbers]
