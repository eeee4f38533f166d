"""Dead letters in SQL, and what people decide about them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, assert_never

from sqlalchemy import RowMapping, bindparam, select

from agentq.adapters.sql.asking import ask_anew, being_asked, refusal_to_ask
from agentq.adapters.sql.change import NO_FENCE, Change
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.copying import copied_already, copy_run
from agentq.adapters.sql.engine import Database, now_plus
from agentq.adapters.sql.listing import count_of_open, grouped_dead_letters, open_dead_letters, page_of_open
from agentq.adapters.sql.planning import recorded_of, run_and_now
from agentq.adapters.sql.replaying import (
    DISCARDED,
    ReplayOfMany,
    discarded_already,
    refusal_to_replay,
    replay_run,
)
from agentq.adapters.sql.rows import fence_from, step_from
from agentq.adapters.sql.schema import runs, steps
from agentq.domain.decisions import Asking, Choice, Discarding, Replaying, Ruling
from agentq.domain.errors import (
    AgentqError,
    AlreadyDecidedError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    StalePlanError,
    TooEarlyError,
)
from agentq.domain.events import EventKind
from agentq.domain.lifecycle import StepChange, step_after
from agentq.domain.model import DeadLetter, DeadLetterGroup, Decision, Fence, RunStatus, Step, StepState
from agentq.domain.replay import Copying, ReplayPlan, plan_copy, plan_replay, refusal_to_copy
from agentq.domain.times import time_text
from agentq.ports.deciding import Decided
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import RunFilter

# In the order of their ids, as everybody locks several.
_lock_runs = (
    select(runs, now_plus().label("now"))
    .where(runs.c.id.in_(bindparam("run_ids", expanding=True)))
    .order_by(runs.c.id)
    .with_for_update(key_share=True)
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

    def page_of_dead_letters(self, filters: RunFilter, *, after: str, number_max: int, limit: int) -> list[str]:
        with self._database.reading() as connection:
            return list(page_of_open(connection, filters, after=after, number_max=number_max, limit=limit))

    def resolve(self, run_id: str, ruling: Ruling, *, actor: str, reason: str) -> Step:
        with self._changing(run_id, actor) as change:
            number = change.run["pending_effect_number"]
            refusal, _ = _decide(change, ruling, reason=reason)
            if refusal is None:
                step = step_from(_existing_step(change, number))
        if refusal is not None:
            raise refusal
        return step

    def resolve_by_probe(self, run_id: str, *, actor: str, reason: str) -> Step:
        with self._changing(run_id, actor) as change:
            refusal, _ = _decide(change, Asking(), reason=reason)
            if refusal is None:
                step = step_from(_existing_step(change, change.run["pending_effect_number"]))
        if refusal is not None:
            raise refusal
        return step

    def discard(self, run_id: str, *, actor: str, reason: str) -> RunStatus:
        with self._changing(run_id, actor) as change:
            refusal, _ = _decide(change, Discarding(), reason=reason)
        if refusal is not None:
            raise refusal
        return change.status

    def replay_plan(self, run_id: str, copying: Copying | None = None) -> ReplayPlan:
        with self._database.snapshot() as connection:
            row = connection.execute(run_and_now, {"run_id": run_id}).one_or_none()
            if row is None:
                raise NotFoundError(f"there is no run {run_id!r}")
            change = Change(connection, row, actor="")
            recorded = recorded_of(change)
            if copying is None:
                return plan_replay(recorded, refusal=_text_of(refusal_to_replay(change)))
        refusal = refusal_to_copy(recorded, copying)
        if isinstance(refusal, InvalidInputError):
            raise refusal
        return plan_copy(recorded, copying, refusal=_text_of(refusal))

    def replay(
        self, run_id: str, *, actor: str, reason: str, ruling: Ruling | None = None, digest: str | None = None
    ) -> tuple[Wakeup, ...]:
        wakeups: tuple[Wakeup, ...] = ()
        with self._changing(run_id, actor) as change:
            refusal = (
                None if digest is None else _refusal_of_digest(plan_replay(recorded_of(change), refusal=""), digest)
            )
            if refusal is not None:
                _note_refusal(change, "replay", refusal, reason)
            if refusal is None and ruling is not None:
                refusal, _ = _decide(change, ruling, reason=reason)
            if refusal is None:
                refusal, wakeups = _decide(change, Replaying(), reason=reason)
        if refusal is not None:
            raise refusal
        return wakeups

    def copy(
        self, run_id: str, new_run_id: str, copying: Copying, *, actor: str, reason: str, digest: str | None = None
    ) -> tuple[Wakeup, ...]:
        wakeups: tuple[Wakeup, ...] = ()
        with self._changing(run_id, actor) as change:
            recorded = recorded_of(change)
            refusal = refusal_to_copy(recorded, copying)
            if refusal is None:
                refusal = copied_already(recorded) if digest is None else None
            if refusal is None and digest is not None:
                refusal = _refusal_of_digest(plan_copy(recorded, copying, refusal=None), digest)
            if refusal is None:
                wakeups = copy_run(change, recorded, new_run_id, copying, actor=actor, reason=reason)
            else:
                _note_refusal(change, "copy", refusal, reason)
        if refusal is not None:
            raise refusal
        return wakeups

    def decide_many(
        self, run_ids: Sequence[str], choice: Choice, *, actor: str, reason: str, is_rehearsal: bool = False
    ) -> list[Decided]:
        decided: list[Decided] = []
        with suppress(_RehearsalIsOver), self._database.writing() as connection:
            rows = {row.id: row for row in connection.execute(_lock_runs, {"run_ids": sorted(set(run_ids))})}
            replayed: dict[str, tuple[Wakeup, ...]] = {}
            if isinstance(choice, Replaying):
                replayed = ReplayOfMany(connection, list(rows.values()), actor=actor, reason=reason).replay()
            for run_id in sorted(set(run_ids)):
                if run_id in replayed:
                    decided.append(Decided(run_id=run_id, wakeups=replayed[run_id]))
                elif run_id in rows:
                    change = Change(connection, rows[run_id], actor=actor)
                    refusal, wakeups = _decide(change, choice, reason=reason)
                    change.write()
                    decided.append(Decided(run_id=run_id, refusal=refusal, wakeups=wakeups))
                else:
                    decided.append(Decided(run_id=run_id, refusal=NotFoundError(f"there is no run {run_id!r}")))
            if is_rehearsal:
                raise _RehearsalIsOver
        return decided

    @contextmanager
    def _changing(self, run_id: str, actor: str) -> Iterator[Change]:
        """One run under its lock; what was changed is written at the end. Raises NotFoundError."""
        with self._database.locked(run_id) as (connection, row):
            if row is None:
                raise NotFoundError(f"there is no run {run_id!r}")
            change = Change(connection, row, actor=actor)
            yield change
            change.write()


class _RehearsalIsOver(Exception):
    """Takes the transaction back."""


def _decide(change: Change, choice: Choice, *, reason: str) -> tuple[AgentqError | None, tuple[Wakeup, ...]]:
    """Do what was chosen, or note why not."""
    wakeups: tuple[Wakeup, ...] = ()
    match choice:
        case Ruling():
            asked, refusal = str(choice.decision), _refusal_to_resolve(change, choice)
            if refusal is None:
                _resolve(change, choice, reason=reason)
        case Replaying():
            asked, refusal = "replay", refusal_to_replay(change)
            if refusal is None:
                wakeups = replay_run(change, reason=reason)
        case Discarding():
            asked, refusal = "discard", _refusal_to_discard(change)
            if refusal is None:
                _discard(change, reason=reason)
        case Asking():
            fence = _fence(change)
            asked, refusal = "by_probe", _nothing_in_doubt(change) if fence is None else refusal_to_ask(change, fence)
            if fence is not None and refusal is None:
                ask_anew(change, fence, reason=reason)
        case _:
            assert_never(choice)
    if refusal is not None:
        _note_refusal(change, asked, refusal, reason)
    return refusal, wakeups


# --- Resolving ------------------------------------------------------------------------------------------------------


def _refusal_to_resolve(change: Change, ruling: Ruling) -> AgentqError | None:
    fence = _fence(change)
    if fence is None:
        return _nothing_in_doubt(change)
    if change.is_active:
        return being_asked(change, fence) or RefusedError(
            f"step {fence.number} of run {change.run_id!r} is still being executed: "
            "its outcome is either recorded or listed as unknown soon"
        )
    if ruling.decision is Decision.DID_NOT_HAPPEN:
        return _refusal_of_look(fence, ruling.looked_at, now=change.now)
    return None


def _nothing_in_doubt(change: Change) -> AlreadyDecidedError:
    discarded = discarded_already(change)
    if discarded is not None:
        return discarded
    last = change.connection.execute(_last_ruling, {"run_id": change.run_id}).one_or_none()
    if last is None:
        return AlreadyDecidedError(f"no write of run {change.run_id!r} is in doubt")
    return AlreadyDecidedError(
        f"no write of run {change.run_id!r} is in doubt: {last.ruled_by} decided at {time_text(last.ruled_at)} "
        f"that step {last.number} {Decision(last.ruling).value.replace('_', ' ')}"
    )


def _refusal_of_look(fence: Fence, looked_at: datetime | None, *, now: datetime) -> AgentqError | None:
    """Before the deadline the caller, and for `settles_within` after it the receiver, may still be at work: a look then
    says nothing, however late its answer is given."""
    looked = now if looked_at is None else looked_at
    if looked > now:
        return InvalidInputError(
            f"looked_at is {time_text(looked)}, which is to come: by the database it is {time_text(now)}"
        )
    not_before = fence.deadline_at + timedelta(seconds=fence.settles_within_seconds or 0)
    if looked > not_before:
        return None
    wait_seconds = (not_before - now).total_seconds()
    advice = f"wait {wait_seconds:.0f} s, then look again" if wait_seconds > 0 else "look again"
    return TooEarlyError(
        f"a look at {time_text(looked)} is too early: {fence.tool!r} may have acted until {time_text(not_before)}; "
        f"{advice}",
        not_before,
    )


def _resolve(change: Change, ruling: Ruling, *, reason: str) -> None:
    fence = _fence(change)
    assert fence is not None
    has_happened = ruling.decision is Decision.HAPPENED
    values: dict[str, Any] = {"ruling": ruling.decision.value, "ruled_by": change.actor, "ruled_at": change.now}
    if has_happened:
        values |= {
            "state": step_after(StepChange.RESOLVE, StepState.DEAD_LETTERED).value,
            "result": encode(ruling.result),
            "is_error": False,
            "may_have_happened": False,
            "finished_at": change.now,
        }
    change.change_step(fence.number, **values)
    change.set(**NO_FENCE)
    change.answer_dead_letter()
    change.event(
        EventKind.WRITE_RESOLVED,
        fence.number,
        fence.attempt,
        decision=ruling.decision.value,
        fence=fence.id,
        tool=fence.tool,
        looked_at=None if ruling.looked_at is None else time_text(ruling.looked_at),
        reason=clean_text(reason),
    )
    if change.run["cancel_requested"]:
        change.cancel()  # It only waited for this write.


# --- Discarding -----------------------------------------------------------------------------------------------------


def _refusal_to_discard(change: Change) -> AgentqError | None:
    if change.dead_letter() is not None:
        return None
    discarded = discarded_already(change)
    if discarded is not None:
        return discarded
    return RefusedError(f"run {change.run_id!r} is {change.status} and no dead letter: there is nothing to give up")


def _discard(change: Change, *, reason: str) -> None:
    fence = _fence(change)
    if fence is not None:
        # It blocks nothing any more, since the run is over; that nobody knows stays written on the step.
        if fence.is_callable:
            change.change_step(fence.number, may_have_happened=True)
        change.set(**NO_FENCE)
        change.event(
            EventKind.WRITE_GIVEN_UP,
            fence.number,
            fence.attempt,
            fence=fence.id,
            tool=fence.tool,
            reason=clean_text(reason),
        )
    letter = change.dead_letter()
    assert letter is not None
    change.close_dead_letter(DISCARDED)
    change.event(EventKind.DEAD_LETTER_DISCARDED, letter["number"], reason=clean_text(reason))
    if change.run["cancel_requested"]:
        change.cancel()  # It only waited for this write.


# --- All ------------------------------------------------------------------------------------------------------------


def _note_refusal(change: Change, asked: str, refusal: AgentqError, reason: str) -> None:
    change.event(EventKind.DECISION_REFUSED, asked=asked, refusal=clean_text(str(refusal)), reason=clean_text(reason))


def _refusal_of_digest(plan: ReplayPlan, digest: str) -> AgentqError | None:
    if plan.digest == digest:
        return None
    return StalePlanError(
        f"run {plan.run_id!r} is not as it was in the plan {digest!r}: its plan is {plan.digest!r} now; read that first"
    )


def _text_of(refusal: AgentqError | None) -> str | None:
    return None if refusal is None else str(refusal)


def _fence(change: Change) -> Fence | None:
    return fence_from(change.run)


def _existing_step(change: Change, number: int) -> RowMapping:
    row = change.step(number)
    assert row is not None
    return row
