"""Dead letters in SQL, and what people decide about them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import assert_never

from sqlalchemy import RowMapping, bindparam, select

from agentq.adapters.sql.asking import ask_anew, refusal_to_ask
from agentq.adapters.sql.change import Change
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.copying import copied_already, copy_run
from agentq.adapters.sql.discarding import discard, refusal_to_discard
from agentq.adapters.sql.engine import Database, now_plus
from agentq.adapters.sql.listing import count_of_open, grouped_dead_letters, open_dead_letters, page_of_open
from agentq.adapters.sql.planning import recorded_of, run_and_now
from agentq.adapters.sql.replaying import ReplayOfMany, refusal_to_replay, replay_run
from agentq.adapters.sql.resolving import nothing_in_doubt, refusal_to_resolve, resolve
from agentq.adapters.sql.rows import fence_from, step_from
from agentq.adapters.sql.schema import runs
from agentq.domain.decisions import Asking, Choice, Discarding, Replaying, Ruling
from agentq.domain.errors import AgentqError, InvalidInputError, NotFoundError, StalePlanError
from agentq.domain.events import EventKind
from agentq.domain.model import DeadLetter, DeadLetterGroup, RunStatus, Step
from agentq.domain.replay import Copying, ReplayPlan, plan_copy, plan_replay, refusal_to_copy
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
        return self._resolve(run_id, ruling, actor=actor, reason=reason)

    def resolve_by_probe(self, run_id: str, *, actor: str, reason: str) -> Step:
        return self._resolve(run_id, Asking(), actor=actor, reason=reason)

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

    def _resolve(self, run_id: str, choice: Ruling | Asking, *, actor: str, reason: str) -> Step:
        with self._changing(run_id, actor) as change:
            number = change.run["pending_effect_number"]
            refusal, _ = _decide(change, choice, reason=reason)
            if refusal is None:
                step = step_from(_existing_step(change, number))
        if refusal is not None:
            raise refusal
        return step

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
            asked, refusal = str(choice.decision), refusal_to_resolve(change, choice)
            if refusal is None:
                resolve(change, choice, reason=reason)
        case Replaying():
            asked, refusal = "replay", refusal_to_replay(change)
            if refusal is None:
                wakeups = replay_run(change, reason=reason)
        case Discarding():
            asked, refusal = "discard", refusal_to_discard(change)
            if refusal is None:
                discard(change, reason=reason)
        case Asking():
            fence = fence_from(change.run)
            asked, refusal = "by_probe", nothing_in_doubt(change) if fence is None else refusal_to_ask(change, fence)
            if fence is not None and refusal is None:
                ask_anew(change, fence, reason=reason)
        case _:
            assert_never(choice)
    if refusal is not None:
        _note_refusal(change, asked, refusal, reason)
    return refusal, wakeups


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


def _existing_step(change: Change, number: int) -> RowMapping:
    row = change.step(number)
    assert row is not None
    return row
