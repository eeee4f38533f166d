"""Dead letters in SQL, and what people decide about them."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, bindparam, select, update

from agentq.adapters.sql.change import NO_FENCE, Change, EventKind
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.listing import count_of_open, grouped_dead_letters, open_dead_letters, page_of_open
from agentq.adapters.sql.rows import fence_from, step_from
from agentq.adapters.sql.schema import dead_letters, events, steps
from agentq.domain.errors import (
    AgentqError,
    AlreadyDecidedError,
    DecisionRequiredError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    TooEarlyError,
)
from agentq.domain.lifecycle import RunChange, StepChange, run_sources, step_after, step_sources
from agentq.domain.model import DeadLetter, DeadLetterGroup, Decision, Fence, RunMode, RunStatus, Step, StepState
from agentq.ports import OpenDeadLetter, Ruling, RunFilter, Wakeup

_reopen = (
    update(steps)
    .where(
        steps.c.run_id == bindparam("of_run"),
        steps.c.state.in_([state.value for state in step_sources(StepChange.REPLAY)]),
    )
    .values(
        state=StepState.WAITING.value,
        attempt=steps.c.attempt + 1,
        tries=0,
        crashes=0,
        throttled_since=None,
        handed_back_since=None,
        republished=0,
        is_isolated=False,
        due_at=None,
        dispatched_at=None,
        settled_by=None,
        finished_at=None,
    )
)
_is_decided = (
    update(dead_letters)
    .where(dead_letters.c.run_id == bindparam("of_run"), dead_letters.c.closed_at.is_(None))
    .values(outcome_unknown=False)
)
_last_replay = (
    select(events.c.actor, events.c.at)
    .where(events.c.run_id == bindparam("run_id"), events.c.kind == EventKind.RUN_REPLAYED.value)
    .order_by(events.c.sequence.desc())
    .limit(1)
)
_last_ruling = (
    select(steps.c.number, steps.c.ruling, steps.c.ruled_by, steps.c.ruled_at)
    .where(steps.c.run_id == bindparam("run_id"), steps.c.ruling.is_not(None))
    .order_by(steps.c.ruled_at.desc())
    .limit(1)
)


class SqlDecisionStore:
    """`DecisionStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def dead_letters(self, filters: RunFilter) -> list[DeadLetter]:
        with self._database.snapshot() as connection:
            return open_dead_letters(connection, filters)

    def dead_letter_groups(self, filters: RunFilter) -> list[DeadLetterGroup]:
        with self._database.reading() as connection:
            return grouped_dead_letters(connection, filters)

    def count_dead_letters(self, filters: RunFilter) -> tuple[int, int]:
        with self._database.reading() as connection:
            return count_of_open(connection, filters)

    def page_of_dead_letters(
        self, filters: RunFilter, *, after: str, number_max: int, limit: int
    ) -> list[OpenDeadLetter]:
        with self._database.reading() as connection:
            return page_of_open(connection, filters, after=after, number_max=number_max, limit=limit)

    def resolve(self, run_id: str, ruling: Ruling, *, actor: str, reason: str) -> Step:
        result = encode(ruling.result)
        with self._database.locked(run_id) as (connection, row):
            if row is None:
                raise NotFoundError(f"there is no run {run_id!r}")
            change = Change(connection, row, actor=actor)
            refusal = _refusal_to_resolve(change, ruling)
            if refusal is None:
                step = _resolve(change, ruling, result, actor=actor, reason=reason)
            else:
                _note_refusal(change, str(ruling.decision), refusal, reason)
            change.write()
        if refusal is not None:
            raise refusal
        return step

    def replay(self, run_id: str, *, actor: str, reason: str) -> tuple[Wakeup, ...]:
        wakeups: tuple[Wakeup, ...] = ()
        with self._database.locked(run_id) as (connection, row):
            if row is None:
                raise NotFoundError(f"there is no run {run_id!r}")
            change = Change(connection, row, actor=actor)
            refusal = _refusal_to_replay(change)
            if refusal is None:
                wakeups = _replay(change, reason=reason)
            else:
                _note_refusal(change, "replay", refusal, reason)
            change.write()
        if refusal is not None:
            raise refusal
        return wakeups


# --- Resolving ------------------------------------------------------------------------------------------------------


def _refusal_to_resolve(change: Change, ruling: Ruling) -> AgentqError | None:
    fence = _fence(change)
    if fence is None:
        return _nothing_in_doubt(change)
    if change.is_active:
        return RefusedError(
            f"step {fence.number} of run {change.run_id!r} is still being executed: "
            "its outcome is either recorded or listed as unknown soon"
        )
    if ruling.decision is Decision.DID_NOT_HAPPEN:
        return _refusal_of_look(fence, ruling.looked_at, now=change.now)
    return None


def _nothing_in_doubt(change: Change) -> AlreadyDecidedError:
    last = change.connection.execute(_last_ruling, {"run_id": change.run_id}).one_or_none()
    if last is None:
        return AlreadyDecidedError(f"no write of run {change.run_id!r} is in doubt")
    return AlreadyDecidedError(
        f"no write of run {change.run_id!r} is in doubt: {last.ruled_by} decided at {_text(last.ruled_at)} "
        f"that step {last.number} {Decision(last.ruling).value.replace('_', ' ')}"
    )


def _refusal_of_look(fence: Fence, looked_at: datetime | None, *, now: datetime) -> AgentqError | None:
    """Before the deadline the caller, and for `settles_within` after it the receiver, may still be at work: a look then
    says nothing, however late its answer is given."""
    if fence.settles_within_seconds is None and looked_at is None:
        return TooEarlyError(
            f"nobody can say how long {fence.tool!r} may act after the deadline of its call: "
            f"say when you looked and found nothing, later than {_text(fence.deadline_at)}",
            None,
        )
    looked = now if looked_at is None else looked_at
    if looked > now:
        return InvalidInputError(f"looked_at is {_text(looked)}, which is to come: by the database it is {_text(now)}")
    not_before = fence.deadline_at + timedelta(seconds=fence.settles_within_seconds or 0)
    if looked > not_before:
        return None
    wait_seconds = (not_before - now).total_seconds()
    advice = f"wait {wait_seconds:.0f} s, then look again" if wait_seconds > 0 else "look again"
    return TooEarlyError(
        f"a look at {_text(looked)} is too early: {fence.tool!r} may have acted until {_text(not_before)}; {advice}",
        not_before,
    )


def _resolve(change: Change, ruling: Ruling, result: str, *, actor: str, reason: str) -> Step:
    fence = _fence(change)
    assert fence is not None
    has_happened = ruling.decision is Decision.HAPPENED
    values: dict[str, Any] = {"ruling": ruling.decision.value, "ruled_by": clean_text(actor), "ruled_at": change.now}
    if has_happened:
        values |= {
            "state": step_after(StepChange.RESOLVE, StepState.DEAD_LETTERED).value,
            "result": result,
            "is_error": False,
            "may_have_happened": False,
            "finished_at": change.now,
        }
    change.change_step(fence.number, **values)
    change.set(**NO_FENCE)
    change.connection.execute(_is_decided, {"of_run": change.run_id})
    change.event(
        EventKind.WRITE_RESOLVED,
        fence.number,
        fence.attempt,
        decision=ruling.decision.value,
        fence=fence.id,
        tool=fence.tool,
        looked_at=None if ruling.looked_at is None else _text(ruling.looked_at),
        reason=clean_text(reason),
    )
    if change.run["cancel_requested"]:
        change.cancel()  # It only waited for this write.
    return step_from(_existing_step(change, fence.number))


# --- Replaying ------------------------------------------------------------------------------------------------------


def _refusal_to_replay(change: Change) -> AgentqError | None:
    run, run_id = change.run, change.run_id
    if run["cancel_requested"] or change.status is RunStatus.CANCELLED:
        return RefusedError(f"run {run_id!r} was cancelled: it can't be resumed")
    if change.status not in run_sources(RunChange.REPLAY):
        last = change.connection.execute(_last_replay, {"run_id": run_id}).one_or_none()
        if last is None:
            return AlreadyDecidedError(f"run {run_id!r} is {change.status}; only a failed run can be replayed")
        return AlreadyDecidedError(
            f"run {run_id!r} is {change.status}: {last.actor} replayed it at {_text(last.at)} already"
        )
    fence = _fence(change)
    if fence is not None:
        return DecisionRequiredError(
            f"whether {fence.tool!r} of step {fence.number} happened is not known: "
            "say that it happened, with its result, or that it did not happen"
        )
    if run["next_step"] == 1:
        return RefusedError(f"run {run_id!r} was refused when it was to be enqueued ({run['error']}): enqueue it anew")
    return None


def _replay(change: Change, *, reason: str) -> tuple[Wakeup, ...]:
    change.connection.execute(_reopen, {"of_run": change.run_id})
    change.activate()
    change.set(mode=RunMode.QUEUED.value)  # A lost caller doesn't come back; workers take it on.
    change.close_dead_letter("replayed")
    wakeups = change.go_on()
    change.event(
        EventKind.RUN_REPLAYED,
        reason=clean_text(reason),
        opened=[wakeup.ref.number for wakeup in wakeups],
    )
    return wakeups


# --- Both -----------------------------------------------------------------------------------------------------------


def _note_refusal(change: Change, asked: str, refusal: AgentqError, reason: str) -> None:
    change.event(EventKind.DECISION_REFUSED, asked=asked, refusal=clean_text(str(refusal)), reason=clean_text(reason))


def _fence(change: Change) -> Fence | None:
    return fence_from(change.run)


def _existing_step(change: Change, number: int) -> RowMapping:
    row = change.step(number)
    assert row is not None
    return row


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
