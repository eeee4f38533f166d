"""The simulation has teeth: without any one of these rules of the protocol it finds a broken promise."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from agentq.adapters.sql.change import NO_FENCE
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.schema import runs, steps
from agentq.domain.decisions import Ruling
from agentq.domain.errors import StoreUnavailableError
from agentq.domain.model import Charge, Decision, RunStatus, StepRef, StepState
from agentq.domain.outcomes import Recorded, Retried, Stopped
from agentq.domain.retry import RetryPolicy
from agentq.domain.tools import Tool
from agentq.ports.keeping import InFlight
from agentq.ports.leases import Acquired, LeaseAnswer, LeaseSurvey, LeaseView
from agentq.ports.steps import FenceRequest, FenceVerdict, Loaded, Settled, Settlement, Verdict
from agentq.services.execute import StepExecutor
from tests.support.simulated_moves import KEEP, LANDED, SENT, SHOWN, STALLED, play
from tests.support.simulated_process import Parts, real_parts
from tests.support.simulated_world import Time
from tests.support.simulation import Broken, Simulation


class Altered:
    """A part that does something else than the real one in one respect."""

    def __init__(self, real: Any, database: Database) -> None:
        self.real = real
        self.database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def row(self) -> Any:
        with self.database.reading() as connection:
            return connection.execute(select(runs)).mappings().one()

    def step(self, number: int) -> Any:
        with self.database.reading() as connection:
            return connection.execute(select(steps).where(steps.c.number == number)).mappings().one()

    def change_run(self, **values: Any) -> None:
        with self.database.writing() as connection:
            connection.execute(update(runs).values(values))

    def change_step(self, number: int, **values: Any) -> None:
        with self.database.writing() as connection:
            connection.execute(update(steps).where(steps.c.number == number).values(values))


# --- The stamp ------------------------------------------------------------------------------------------------------


class StampsOverAFence(Altered):
    def load(self, ref: StepRef) -> Loaded | None:
        loaded: Loaded | None = self.real.load(ref)
        return None if loaded is None else replace(loaded, fence=None)

    def fence(self, request: FenceRequest) -> FenceVerdict:
        verdict: FenceVerdict = self.real.fence(request)
        if verdict is FenceVerdict.FENCE_STANDS:
            self.change_run(**NO_FENCE)
            verdict = self.real.fence(request)
        return verdict


class GivesUpALostStamp(Altered):
    def fence(self, request: FenceRequest) -> FenceVerdict:
        try:
            verdict: FenceVerdict = self.real.fence(request)
        except StoreUnavailableError:
            return FenceVerdict.MOVED_ON
        return verdict


class TakesALostStampForAFence(Altered):
    def fence(self, request: FenceRequest) -> FenceVerdict:
        try:
            verdict: FenceVerdict = self.real.fence(request)
        except StoreUnavailableError:
            return FenceVerdict.STAMPED
        return verdict


class KeepsTheFence(Altered):
    def take_back(self, ref: StepRef, fence_id: str, owner: str) -> bool:
        return False


class NeverLooksLast(StepExecutor):
    def _perform_in_time(self, attempt: Any, tool: Tool, ends_at: float) -> Any:
        return self._perform(attempt, tool, ends_at)


# --- The settle -----------------------------------------------------------------------------------------------------


class RequeuesWhateverAttempt(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        if isinstance(settlement.change, Retried):
            self.change_step(settlement.ref.number, state=StepState.AVAILABLE.value)
            ref = replace(settlement.ref, attempt=self.step(settlement.ref.number)["attempt"])
            settlement = replace(settlement, ref=ref)
        settled: Settled = self.real.settle(settlement)
        return settled


class SettlesWhateverFence(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        row = self.row()
        stands = row["pending_effect_number"] == settlement.ref.number
        settled: Settled = self.real.settle(replace(settlement, fence_id=row["pending_effect_id"] if stands else None))
        return settled


class ForgetsWhoSettled(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        settled: Settled = self.real.settle(settlement)
        self.change_step(settlement.ref.number, settled_by=None)
        return settled


class DropsLateOutcomes(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        step, run = self.step(settlement.ref.number), self.row()
        fits = step["attempt"] == settlement.ref.attempt and step["state"] == StepState.AVAILABLE
        if not fits or (settlement.fence_id is not None and run["pending_effect_id"] != settlement.fence_id):
            return Settled(verdict=Verdict.MOVED_ON)
        settled: Settled = self.real.settle(settlement)
        return settled


class HidesContradictions(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        change, step = settlement.change, self.step(settlement.ref.number)
        if isinstance(change, Recorded) and step["attempt"] != settlement.ref.attempt:
            settlement = replace(settlement, change=replace(change, is_error=True))  # As if nothing had happened.
        settled: Settled = self.real.settle(settlement)
        return settled


class CountsASettleTwice(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        settled: Settled = self.real.settle(settlement)
        left = self.row()["open_calls"]
        if settled.verdict in (Verdict.ALREADY, Verdict.MOVED_ON) and left > 0:
            self.change_run(open_calls=left - 1)
        return settled


class RequeueForgetsTheDoubt(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        settled: Settled = self.real.settle(settlement)
        if isinstance(settlement.change, Retried) and settled.verdict is Verdict.APPLIED:
            self.change_step(settlement.ref.number, may_have_happened=False)
        return settled


class RequeueKeepsTheFence(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        before = self.row()
        settled: Settled = self.real.settle(settlement)
        if isinstance(settlement.change, Retried) and settled.verdict is Verdict.APPLIED:
            self.change_run(**{name: before[name] for name in NO_FENCE})
        return settled


# --- The reaper -----------------------------------------------------------------------------------------------------


class RequeuesPlainWrites(Altered):
    def settle(self, settlement: Settlement) -> Settled:
        if isinstance(settlement.change, Stopped) and settlement.change.outcome_unknown:
            self.change_run(**NO_FENCE)
            again = Retried(charge=Charge.CRASH, error="the process that ran it died")
            settlement = replace(settlement, change=again, fence_id=None)
        settled: Settled = self.real.settle(settlement)
        return settled


class RequeuesKeyedWritesAtTheDeadline(Altered):
    def in_flight(self, *, after: StepRef | None, limit: int) -> list[InFlight]:
        found: list[InFlight] = self.real.in_flight(after=after, limit=limit)
        return [replace(each, fence_is_settled=each.fence_is_past_deadline) for each in found]


class NeverRepublishes(Altered):
    def in_flight(self, *, after: StepRef | None, limit: int) -> list[InFlight]:
        found: list[InFlight] = self.real.in_flight(after=after, limit=limit)
        return [replace(each, dispatched_seconds=0.0) for each in found]


class ForgivesCrashes(RetryPolicy):
    def after_crash(self, crashes: int, *, is_charged: bool = True) -> Retried | Stopped:
        return super().after_crash(0, is_charged=is_charged)


class ChargesWhoeverLeft(Altered):
    def survey(self, refs: list[StepRef]) -> LeaseSurvey:
        survey: LeaseSurvey = self.real.survey(refs)
        views = tuple(
            LeaseView(owner=view.owner, started_attempt=view.started_attempt or ref.attempt)
            for ref, view in zip(refs, survey.views, strict=True)
        )
        return replace(survey, views=views)


# --- Leases ---------------------------------------------------------------------------------------------------------


class StartsAnAttemptAgain(Altered):
    def acquire(self, ref: StepRef, owner: str, seconds: float) -> Acquired:
        acquired: Acquired = self.real.acquire(ref, owner, seconds)
        if acquired.answer is LeaseAnswer.ALREADY_STARTED:
            self.real.renew(ref, owner, seconds)
            return replace(acquired, answer=LeaseAnswer.HELD)
        return acquired


# --- People ---------------------------------------------------------------------------------------------------------


class BelievesAtOnce(Altered):
    def resolve(self, run_id: str, ruling: Ruling, **named: Any) -> Any:
        if ruling.decision is Decision.DID_NOT_HAPPEN and self.row()["pending_effect_id"] is not None:
            self.change_run(pending_effect_deadline_at=self.row()["pending_effect_stamped_at"] - timedelta(seconds=60))
        return self.real.resolve(run_id, ruling, **named)


class ForgetsWhenTheyLooked(Altered):
    def resolve(self, run_id: str, ruling: Ruling, **named: Any) -> Any:
        return self.real.resolve(run_id, replace(ruling, looked_at=None), **named)


class CancelsOverAFence(Altered):
    def cancel(self, run_id: str, **named: Any) -> RunStatus:
        self.change_run(**NO_FENCE)
        status: RunStatus = self.real.cancel(run_id, **named)
        return status


class CancelsLater(Altered):
    def cancel(self, run_id: str, **named: Any) -> RunStatus:
        self.change_run(cancel_requested=True)
        status: RunStatus = self.real.status(run_id)
        return status


class ResumesTheCancelled(Altered):
    def resolve(self, run_id: str, ruling: Ruling, **named: Any) -> Any:
        self.change_run(cancel_requested=False)
        return self.real.resolve(run_id, ruling, **named)


# --- The mutants ----------------------------------------------------------------------------------------------------

Alter = Callable[[Parts], Parts]


def _stores(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, steps=altered(parts.steps, parts.database))


def _workers_store(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, worker_steps=lambda store: altered(store, parts.database))


def _reapers_store(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, reaper_steps=altered(parts.steps, parts.database))


def _keeping(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, keeping=altered(parts.keeping, parts.database))


def _leases(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, leases=altered(parts.leases, parts.database))


def _decisions(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, decisions=altered(parts.decisions, parts.database))


def _runs(altered: type[Altered]) -> Alter:
    return lambda parts: replace(parts, runs=altered(parts.runs, parts.database))


DENIED = ("the judge answers", "the judge replays")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A rule that is switched off, and the shortest story that shows what it is for."""

    without: str
    alter: Alter
    tools: tuple[str, ...] = ("pay",)
    story: tuple[str, ...]
    breaks: str


MUTANTS = (
    Mutant(
        without="the stamp refuses a standing fence",
        alter=_stores(StampsOverAFence),
        story=(*LANDED, "the fence's deadline passes", "! redis is flushed"),
        breaks="happened 2 times",
    ),
    Mutant(
        without="the reaper asks for the attempt again",
        alter=_reapers_store(RequeuesWhateverAttempt),
        story=(
            *("w0 gets s2a1", "w0 until StepStore.fence", "! w0 stalls past its lease"),
            *("the keeper begins", "the keeper goes on: Leases.survey"),
            *("w0 until World.reply", "the request of step 2 lands", "w0 ends", "the keeper ends"),
        ),
        breaks="its join counter",
    ),
    Mutant(
        without="the reaper asks for the fence again",
        alter=_reapers_store(SettlesWhateverFence),
        story=(
            *("w0 gets s2a1", "w0 until Leases.renew", *STALLED),
            *("the keeper begins", "the keeper goes on: Leases.survey", "w0 ends", "the keeper ends"),
        ),
        breaks="a false dead letter",
    ),
    Mutant(
        without="a caller is ended at its deadline",
        alter=lambda parts: replace(parts, ends_calls=False),
        story=(
            *(
                "w0 gets s2a1",
                "w0 until World.send",
                "the fence's deadline passes",
                "the fence's time to settle passes",
            ),
            *("! w0 stalls past its lease", *KEEP, "w0 goes on: World.send", "the judge looks"),
            *("the request of step 2 lands", *DENIED),
        ),
        breaks="though nobody lied",
    ),
    Mutant(
        without="a plain write is never requeued",
        alter=_reapers_store(RequeuesPlainWrites),
        story=(*LANDED, "the fence's deadline passes, noted", *KEEP),
        breaks="happened 2 times",
    ),
    Mutant(
        without="did not happen waits",
        alter=_decisions(BelievesAtOnce),
        story=(*SHOWN, "the judge looks", "the request of step 2 lands", *DENIED),
        breaks="is hidden",
    ),
    Mutant(
        without="the look waits too",
        alter=_decisions(ForgetsWhenTheyLooked),
        story=(
            *(*SHOWN, "the judge looks", "the request of step 2 lands"),
            *("the fence's time to settle passes", *DENIED),
        ),
        breaks="is hidden",
    ),
    Mutant(
        without="a keyed write is requeued only when it is settled",
        alter=_keeping(RequeuesKeyedWritesAtTheDeadline),
        tools=("tag",),
        story=(*SHOWN, "w0 gets s2a2", "w0 until World.send", "w0 goes on: World.send"),
        breaks="a false dead letter",
    ),
    Mutant(
        without="the last look before the call",
        alter=lambda parts: replace(parts, executor=NeverLooksLast),
        story=(
            *("w0 gets s2a1", "w0 until StepStore.fence", "w0 goes on, held: StepStore.fence"),
            *("the fence's deadline passes", "the fence's time to settle passes", "w0 goes on: StepStore.fence"),
            *("! w0 stalls past its lease", *KEEP, "the judge looks"),
            *("w0 goes on: World.send", "the request of step 2 lands", *DENIED),
        ),
        breaks="though nobody lied",
    ),
    Mutant(
        without="who doesn't call takes the fence back",
        alter=_stores(KeepsTheFence),
        story=("w0 gets s2a1", "w0 until Leases.renew", "the fence's deadline passes", "w0 ends"),
        breaks="a false dead letter",
    ),
    Mutant(
        without="a stamp whose answer was lost is asked for again",
        alter=_workers_store(GivesUpALostStamp),
        story=("w0 gets s2a1", "w0 until StepStore.fence", "! w0 loses the answer: StepStore.fence", "w0 ends"),
        breaks="a false dead letter",
    ),
    Mutant(
        without="a lost stamp is no permission",
        alter=_workers_store(TakesALostStampForAFence),
        story=(
            *("w0 gets s2a1", "w0 until StepStore.fence", "! w0 finds it away: StepStore.fence"),
            *("w0 until World.send", "w0 goes on: World.send", "the request of step 2 lands"),
            "! w0 is killed: World.reply",
        ),
        breaks="happened 2 times",
    ),
    Mutant(
        without="asking again comes after the lost statement",
        alter=lambda parts: replace(parts, waits_for_lost_statements=False),
        story=(
            *("w0 gets s2a1", "w0 until StepStore.fence", "! w0 loses the connection", "w0 until Leases.renew"),
            *("the fence's deadline passes", "w0 ends", "w0's StepStore.fence lands"),
        ),
        breaks="a false dead letter",
    ),
    Mutant(
        without="a settle knows itself again",
        alter=_stores(ForgetsWhoSettled),
        story=(*LANDED, "w0 until StepStore.settle", "! w0 loses the answer: StepStore.settle", "w0 ends"),
        breaks="though nobody lied",
    ),
    Mutant(
        without="a late outcome is the result",
        alter=_stores(DropsLateOutcomes),
        story=(*LANDED, "w0 until StepStore.settle", *STALLED, *KEEP, "w0 ends"),
        breaks="a false dead letter",
    ),
    Mutant(
        without="a contradiction is recorded",
        alter=_stores(HidesContradictions),
        story=(
            *(*LANDED, "w0 until StepStore.settle", *STALLED, *KEEP, "the judge looks, and errs", *DENIED),
            *("w1 gets s2a2", "w1 until World.send", "w1 goes on: World.send", "the request of step 2 lands"),
            *("w0 ends", "w1 ends"),
        ),
        breaks="is hidden",
    ),
    Mutant(
        without="a requeue keeps the doubt",
        alter=_stores(RequeueForgetsTheDoubt),
        tools=("tag",),
        story=(
            *(*LANDED, "the fence's deadline passes, noted", "the fence's time to settle passes"),
            *(*KEEP, "cancel"),
        ),
        breaks="is hidden",
    ),
    Mutant(
        without="a requeue clears the fence",
        alter=_stores(RequeueKeepsTheFence),
        tools=("tag",),
        story=(*SENT, "the fence's deadline passes, noted", "the fence's time to settle passes", *KEEP),
        breaks="the limit is",
    ),
    Mutant(
        without="a cancel ends a step without a fence",
        alter=_runs(CancelsLater),
        story=("cancel",),
        breaks="its cancel is requested, no fence stands, and it goes on",
    ),
    Mutant(
        without="a cancel waits for the fence",
        alter=_runs(CancelsOverAFence),
        story=(*LANDED, "the fence's deadline passes", "cancel"),
        breaks="is hidden",
    ),
    Mutant(
        without="a cancelled run is not resumed",
        alter=_decisions(ResumesTheCancelled),
        story=(
            *("w0 gets s2a1", "w0 until World.send", "cancel", "the fence's deadline passes, noted"),
            *("the fence's time to settle passes", *KEEP, "the judge looks", *DENIED),
        ),
        breaks="a fence was stamped after the cancel",
    ),
    Mutant(
        without="the budget of crashes",
        alter=lambda parts: replace(parts, policy=_forgiving(parts.policy)),
        tools=("die",),
        story=(),
        breaks="the limit is",
    ),
    Mutant(
        without="only deaths are charged",
        alter=_leases(ChargesWhoeverLeft),
        story=("! the message s2a1 is lost",),
        breaks="charged 1 crashes",
    ),
    Mutant(
        without="a started attempt starts once",
        alter=_leases(StartsAnAttemptAgain),
        tools=("die",),
        story=("w0 gets s2a1", "w0 until World.die", "w0 dies of the step", "a lease's time passes") * 4,
        breaks="again and again",
    ),
    Mutant(
        without="a lost message is published again",
        alter=_keeping(NeverRepublishes),
        story=("! the message s2a1 is lost",),
        breaks="the run is lost",
    ),
    Mutant(
        without="only a settle that changed the step counts",
        alter=_stores(CountsASettleTwice),
        tools=("look", "look"),
        story=(
            *("w0 gets s2a1", "w0 until StepStore.settle", "! w0 stalls past its lease", *KEEP, "w1 gets s2a2"),
            *("w1 until StepStore.settle", "w0 ends", "w1 ends"),
        ),
        breaks="its join counter",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.without)
def test_without_this_rule_a_promise_breaks(database: Database, time: Time, mutant: Mutant) -> None:
    """A check that finds nothing proves nothing unless it would."""
    with pytest.raises(Broken, match=mutant.breaks):
        tell(mutant, mutant.alter(real_parts(database, time)))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.without)
def test_with_this_rule_the_same_story_ends_well(database: Database, time: Time, mutant: Mutant) -> None:
    """It is the rule that makes the difference."""
    tell(mutant, real_parts(database, time))


def tell(mutant: Mutant, parts: Parts) -> None:
    """What the story tells, as far as it is possible, then to the end of the run."""
    simulation = Simulation(parts, mutant.tools)
    try:
        play(simulation, *mutant.story, skips_impossible=True)
        simulation.drain()
    finally:
        simulation.end()


def _forgiving(policy: RetryPolicy) -> RetryPolicy:
    return ForgivesCrashes(policy._classifier, policy._budgets)
