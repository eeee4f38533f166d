"""The step store: what a worker does to a step. Each change holds the run's lock and decides on what it reads then.

Two paths lead to the same place. The general one locks, reads, decides here and writes. On PostgreSQL, what every step
does (fence, and a settle that fits) is one call of a function in the database; what doesn't fit takes the general path.
"""

from datetime import timedelta

from sqlalchemy import RowMapping, bindparam, select

from agentq.adapters.sql.change import NO_FENCE, Change
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.functions import fence_by_function, settle_by_function
from agentq.adapters.sql.loading import AttemptReader
from agentq.adapters.sql.pausing import is_paused, parked_for, read_pauses
from agentq.adapters.sql.rows import fence_from
from agentq.adapters.sql.schema import runs
from agentq.adapters.sql.settling import fence_data, fence_of, is_up, settle_under_lock
from agentq.domain.events import EventKind
from agentq.domain.model import Decision, RunStatus, StepRef, StepState
from agentq.domain.outcomes import Recorded
from agentq.domain.pauses import Pause, pause_of
from agentq.ports.steps import FenceRequest, FenceVerdict, Loaded, NextProbe, Settled, Settlement, Verdict

JUST_AFTER = timedelta(milliseconds=50)  # A moment that is later than another, to any clock.

_STANDING = select(runs.c.status, runs.c.cancel_requested).where(runs.c.id == bindparam("run_id"))


class SqlStepStore:
    """A `StepStore`; see there for what each method promises."""

    def __init__(self, database: Database, *, always_general: bool = False) -> None:
        """`always_general`: leave the database's functions alone; SQLite has none."""
        self._database = database
        self._has_functions = database.is_postgresql and not always_general
        self._reader = AttemptReader(is_postgresql=database.is_postgresql)

    def load(self, ref: StepRef) -> Loaded | None:
        with self._database.raw() as connection:
            return self._reader.load(connection, ref)

    def fence(self, request: FenceRequest) -> FenceVerdict:
        if not self._has_functions:
            return self._fence_generally(request)
        with self._database.raw() as connection:
            return fence_by_function(connection, request)

    def settle(self, settlement: Settlement) -> Settled:
        if self._has_functions and isinstance(settlement.change, Recorded) and settlement.probe is None:
            with self._database.raw() as connection:
                settled = settle_by_function(connection, settlement, settlement.change)
            if settled is not None:
                return settled
        with self._database.locked(settlement.ref.run_id) as (connection, row):
            if row is None:
                return Settled(verdict=Verdict.MOVED_ON)
            change = Change(connection, row, actor=settlement.owner, with_events=settlement.with_events)
            return settle_under_lock(change, settlement)

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

    def hand_back(self, ref: StepRef, *, due_in_seconds: float, why: str, owner: str = "agentq") -> bool:
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return False
            change = Change(connection, row, actor=owner)
            step = change.step(ref.number)
            if step is None or not is_up(change, step, ref) or fence_of(change, ref.number) is not None:
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

    def park(self, ref: StepRef) -> bool:
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return False
            change = Change(connection, row, actor="agentq")
            step = change.step(ref.number)
            if step is None or not is_up(change, step, ref) or fence_of(change, ref.number) is not None:
                return False
            pause = pause_of(read_pauses(connection), agent=row.agent, tool=step["tool"], is_write=True)
            due_at = change.now + parked_for(None if pause is None else change.now - pause.paused_at)
            is_first = step["parked_since"] is None
            change.change_step(
                ref.number, due_at=due_at, dispatched_at=None, parked_since=step["parked_since"] or change.now
            )
            if is_first:
                change.event(EventKind.STEP_PARKED, ref.number, ref.attempt, tool=step["tool"])
            change.write()
            return True

    def pauses(self) -> tuple[Pause, ...]:
        with self._database.reading() as connection:
            return read_pauses(connection)

    def ask_again(self, request: NextProbe) -> bool:
        """Sent again after a lost reply, it counts one question more."""
        ref = request.ref
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return False
            change = Change(connection, row, actor=request.owner)
            step = change.step(ref.number)
            fence = fence_from(change.run)
            if step is None or fence is None or not is_up(change, step, ref) or fence.id != request.fence_id:
                return False
            due_at = change.now + timedelta(seconds=request.wait_seconds)
            if request.waits_for_fence:
                due_at = max(due_at, (fence.settled_at or fence.deadline_at) + JUST_AFTER)
            change.change_step(ref.number, due_at=due_at, dispatched_at=None, republished=0, parked_since=None)
            change.set(pending_effect_probes=fence.probes + 1)
            if request.error is not None and fence.error is None:
                failure_class = request.failure_class and request.failure_class.value
                change.set(pending_effect_failure_class=failure_class, pending_effect_error=clean_text(request.error))
            change.event(
                EventKind.PROBE_ANSWERED,
                ref.number,
                ref.attempt,
                fence=fence.id,
                answer=request.verdict.value,
                asked_again_in_seconds=round((due_at - change.now).total_seconds(), 3),
            )
            change.write()
            return True

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

    def _fence_generally(self, request: FenceRequest) -> FenceVerdict:
        ref = request.ref
        with self._database.locked(ref.run_id) as (connection, row):
            if row is None:
                return FenceVerdict.MOVED_ON
            change = Change(connection, row, actor=request.owner)
            if change.run["pending_effect_id"] == request.id:
                return FenceVerdict.STAMPED
            step = change.step(ref.number)
            if step is None or not is_up(change, step, ref) or change.run["cancel_requested"]:
                return FenceVerdict.MOVED_ON
            if change.run["pending_effect_id"] is not None:
                return FenceVerdict.FENCE_STANDS
            if is_paused(connection, agent=row.agent, tool=request.tool, is_postgresql=self._database.is_postgresql):
                return FenceVerdict.PAUSED
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
                pending_effect_has_probe=request.has_probe,
                pending_effect_probes=0,
            )
            change.event(EventKind.FENCE_STAMPED, ref.number, ref.attempt, **fence_data(request))
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


def _contradict_ruling(change: Change, step: RowMapping, ref: StepRef, fence_id: str) -> None:
    """ "Not called" is an outcome too: it contradicts whoever said that this attempt's write happened."""
    if step["ruling"] != Decision.HAPPENED or step["attempt"] != ref.attempt or change.run["has_contradiction"]:
        return
    change.set(has_contradiction=True)
    change.event(EventKind.OUTCOME_CONTRADICTED, ref.number, ref.attempt, fence=fence_id, called=False)
    change.write()
