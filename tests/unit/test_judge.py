"""What the reaper makes of a step in flight, as a table, and that one run's trouble is its own."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from agentq.adapters.memory_leases import MemoryLeases
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import BrokerUnavailableError, StoreRefusedError, StoreUnavailableError
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, Fence, RunMode, RunStatus, StepKind, StepRef, StepState
from agentq.domain.outcomes import Retried, Stopped
from agentq.ports.dispatch import Wakeup
from agentq.ports.keeping import InFlight
from agentq.ports.leases import DeathNote, LeaseView
from agentq.services.reap import GRACE_SECONDS, REPUBLISH_SECONDS_MIN, Reaped, Reaper, Republish, judge, session_ref
from tests.support.fakes import FakeClock, RecordingDispatcher, ScriptedLeases, ScriptedSteps
from tests.support.spine import PROBES_MAX, policy
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage

NOW = datetime(2030, 1, 1, tzinfo=UTC)
REF = StepRef(run_id="r", number=2, attempt=3)
NOBODY = LeaseView(owner=None, started_attempt=None)
HELD = LeaseView(owner="host/boot/9-1/x", started_attempt=3)
DIED = LeaseView(owner=None, started_attempt=3)
OLD_MARK = LeaseView(owner=None, started_attempt=2)
NEWER = LeaseView(owner=None, started_attempt=4)
PROCESS = "host/boot/9-"
CRASH = Retried(charge=Charge.CRASH, error="the process that ran it died (1 of 3)")
LEFT = Retried(charge=Charge.NOTHING, error="its worker left without an outcome")
UNCALLABLE = Retried(charge=Charge.NOTHING, error="its fence stands over a call that could not be made")
POISON = Stopped(
    reason=DeadLetterReason.RETRIES_EXHAUSTED,
    failure_class=FailureClass.UNKNOWN,
    error="the process that ran it died (3 of 3)",
)
UNKNOWN = Stopped(
    reason=DeadLetterReason.NOT_RETRYABLE,
    failure_class=FailureClass.UNKNOWN,
    error="the process that called 'pay' is gone: whether the write happened is not known",
    outcome_unknown=True,
)


def fence(effect: ToolEffect = PLAIN, *, is_callable: bool = True) -> Fence:
    return Fence(
        id="f",
        number=2,
        attempt=3,
        tool="pay",
        effect=effect,
        owner=f"{PROCESS}1/x",
        stamped_at=NOW,
        deadline_at=NOW,
        settles_within_seconds=None,
        is_callable=is_callable,
    )


def in_flight(
    *,
    seconds: float = 1.0,
    crashes: int = 0,
    republished: int = 0,
    is_cancelled: bool = False,
    over: Fence | None = None,
    is_past: bool = False,
    is_settled: bool = False,
) -> InFlight:
    return InFlight(
        wakeup=Wakeup(ref=REF, agent="support", kind=StepKind.TOOL, tool="pay"),
        crashes=crashes,
        dispatched_seconds=seconds,
        republished=republished,
        is_cancelled=is_cancelled,
        fence=over,
        fence_is_past_deadline=is_past,
        fence_is_settled=is_settled,
    )


READS: dict[str, tuple[InFlight, LeaseView, bool, object]] = {
    "somebody holds it": (in_flight(seconds=9999), HELD, True, None),
    "a newer attempt was started, so what was read is old": (in_flight(seconds=9999), NEWER, True, None),
    "whoever started it died": (in_flight(), DIED, False, CRASH),
    "it killed its third process": (in_flight(crashes=2), DIED, False, POISON),
    "an older attempt's mark tells nothing of this one": (in_flight(), OLD_MARK, False, None),
    "its message may still be on its way": (in_flight(seconds=REPUBLISH_SECONDS_MIN), NOBODY, True, None),
    "no queue holds its message": (in_flight(seconds=REPUBLISH_SECONDS_MIN + 0.1), NOBODY, True, Republish),
    "its message may wait in a queue": (in_flight(seconds=GRACE_SECONDS), NOBODY, False, None),
    "it has waited long enough": (in_flight(seconds=GRACE_SECONDS + 1), NOBODY, False, Republish),
    "it was published again, so it waits longer": (
        in_flight(seconds=GRACE_SECONDS + 1, republished=1),
        NOBODY,
        False,
        None,
    ),
    "... and longer": (in_flight(seconds=4 * GRACE_SECONDS + 1, republished=2), NOBODY, False, Republish),
    "... but not for ever": (in_flight(seconds=128 * GRACE_SECONDS + 1, republished=99), NOBODY, False, Republish),
}


@pytest.mark.parametrize("situation", READS)
def test_a_step_without_a_fence(situation: str) -> None:
    """Lost messages cost nothing; only deaths are charged."""
    step, view, is_drained, expected = READS[situation]
    change = judge(step, view, policy(), is_drained=is_drained, probes_max=PROBES_MAX)
    assert isinstance(change, Republish) if expected is Republish else change == expected


FENCES: dict[str, tuple[InFlight, LeaseView, str | None, object]] = {
    "a plain write in time": (in_flight(over=fence()), DIED, None, None),
    "a plain write past its deadline": (in_flight(over=fence(), is_past=True), DIED, None, UNKNOWN),
    "... is still held": (in_flight(over=fence(), is_past=True), HELD, None, None),
    "... whose worker left": (in_flight(over=fence(), is_past=True), NOBODY, None, UNKNOWN),
    "... is not for a requeue, however long it waits": (
        in_flight(over=fence(), is_past=True, is_settled=True),
        DIED,
        None,
        UNKNOWN,
    ),
    "a plain write whose process was seen dying": (in_flight(over=fence()), DIED, PROCESS, UNKNOWN),
    "... another process": (in_flight(over=fence()), DIED, "host/boot/8-", None),
    "a keyed write past its deadline": (in_flight(over=fence(KEYED), is_past=True), DIED, None, None),
    "a keyed write whose process was seen dying": (in_flight(over=fence(KEYED)), DIED, PROCESS, None),
    "a keyed write whose receiver has settled": (
        in_flight(over=fence(KEYED), is_past=True, is_settled=True),
        DIED,
        None,
        CRASH,
    ),
    "... whose receiver has settled, and whose worker left": (
        in_flight(over=fence(KEYED), is_past=True, is_settled=True),
        NOBODY,
        None,
        LEFT,
    ),
    "... that killed its third process": (
        in_flight(over=fence(KEYED), crashes=2, is_past=True, is_settled=True),
        DIED,
        None,
        POISON,
    ),
    "a cancelled keyed write is like a plain one": (
        in_flight(over=fence(KEYED), is_cancelled=True, is_past=True),
        DIED,
        None,
        UNKNOWN,
    ),
    "... in time": (in_flight(over=fence(KEYED), is_cancelled=True), DIED, None, None),
    "nothing could be called, in time": (in_flight(over=fence(is_callable=False)), DIED, None, None),
    "nothing could be called": (in_flight(over=fence(is_callable=False), is_past=True), DIED, None, UNCALLABLE),
}


@pytest.mark.parametrize("situation", FENCES)
def test_a_step_under_a_fence(situation: str) -> None:
    """A write is judged only after its time, and a plain one is never requeued by the machine."""
    step, view, dead_process, expected = FENCES[situation]
    assert judge(step, view, policy(), is_drained=True, probes_max=PROBES_MAX, dead_process=dead_process) == expected


# --- A pass -----------------------------------------------------------------------------------------------------


class Grave:
    """A reaper over real stores, with leases in memory that are trusted already."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.clock = FakeClock()
        self.leases = ScriptedLeases(MemoryLeases(lease_seconds=1, elapsed_seconds=self.clock.elapsed_seconds))
        self.leases.survey([])
        self.clock.now += 2
        self.steps = ScriptedSteps(stage.steps)
        self.broker = RecordingDispatcher()
        self.reaper = Reaper(
            keeping=stage.keeping,
            steps=self.steps,
            leases=self.leases,
            dispatcher=self.broker,
            policy=policy(),
            probes_max=PROBES_MAX,
        )

    def die_over(self, run_id: str, number: int = FIRST_CALL, *, owner: str = f"{PROCESS}1/x") -> StepRef:
        """A process starts the step and is never heard of again; its lease has run out."""
        ref = self.stage.ref(run_id, number)
        self.leases.acquire(ref, owner, 1)
        self.clock.now += 2
        return ref

    def woken(self, run_id: str) -> list[StepRef]:
        return [wakeup.ref for wakeup in self.broker.published if wakeup.ref.run_id == run_id]


@pytest.fixture
def grave(stage: Stage) -> Grave:
    for step in stage.keeping.in_flight(after=None, limit=500):
        run = stage.runs.run(step.wakeup.ref.run_id)
        stage.stop(run.id, step.wakeup.ref.number, fence_id=run.pending_effect.id if run.pending_effect else None)
    return Grave(stage)


def test_a_dead_workers_step_is_requeued_and_woken(stage: Stage, grave: Grave) -> None:
    """The crash is charged, the next attempt is published at once."""
    run_id = stage.asked(READ)
    ref = grave.die_over(run_id)
    assert grave.reaper.reap() == Reaped(requeued=1)
    step = stage.runs.run(run_id).steps[FIRST_CALL - 1]
    assert (step.attempt, step.crashes, step.tries) == (2, 1, 0)
    assert grave.woken(run_id) == [replace(ref, attempt=2)]


def test_the_requeue_of_a_dead_workers_step_says_who_died_and_keeps_the_count(stage: Stage, grave: Grave) -> None:
    """The keeper is the last that can: the mark of the attempt goes with the next one."""
    run_id = stage.asked(READ)
    stage.change_run(run_id, created_at=datetime.now(UTC))
    grave.clock.now += 60
    ref = grave.die_over(run_id, owner=f"{PROCESS}1/x")
    grave.leases.acquire(ref, "another", 1)
    grave.reaper.reap()
    [requeued] = [event for event in stage.runs.events(run_id) if event.kind == "step.requeued"]
    assert (requeued.data["worker"], requeued.data["seconds"]) == (f"{PROCESS}1/x", 2.0)
    assert stage.runs.run(run_id).steps[FIRST_CALL - 1].suppressed == 1


def test_a_count_that_may_lack_something_is_not_kept(stage: Stage, grave: Grave) -> None:
    """The run is older than what Redis remembers."""
    run_id = stage.asked(READ)
    stage.change_run(run_id, created_at=datetime.now(UTC) - timedelta(hours=1))
    grave.leases.acquire(grave.die_over(run_id), "another", 1)
    grave.reaper.reap()
    assert stage.runs.run(run_id).steps[FIRST_CALL - 1].suppressed is None


def test_a_lost_message_is_published_again_at_no_charge(stage: Stage, grave: Grave) -> None:
    """Losing one costs seconds."""
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, dispatched_at=datetime.now(UTC) - timedelta(seconds=5))
    grave.broker.drained = True
    assert grave.reaper.reap() == Reaped(republished=1)
    assert grave.woken(run_id) == [stage.ref(run_id, FIRST_CALL)]
    assert grave.reaper.reap() == Reaped(), "it is on its way again"


def test_what_moved_on_meanwhile_is_left_alone(stage: Stage, grave: Grave) -> None:
    """Between reading and writing a worker may have settled: every write checks again."""
    run_id = stage.asked(READ)
    grave.die_over(run_id)
    grave.steps.script.before["settle"] = lambda: stage.complete(run_id, FIRST_CALL)
    assert grave.reaper.reap() == Reaped()
    assert stage.runs.run(run_id).steps[FIRST_CALL - 1].state is StepState.COMPLETED


def test_after_a_flush_nothing_is_judged(stage: Stage, grave: Grave) -> None:
    """Holders need a lease's time to take theirs again."""
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, dispatched_at=datetime.now(UTC) - timedelta(days=1))
    fresh = MemoryLeases(lease_seconds=1, elapsed_seconds=grave.clock.elapsed_seconds)
    grave.reaper.leases = fresh
    assert grave.reaper.reap() == Reaped() and grave.broker.published == []
    grave.clock.now += 2
    assert grave.reaper.reap() == Reaped(republished=1)


def test_a_death_that_a_parent_saw_is_acted_on_at_once(stage: Stage, grave: Grave) -> None:
    """What the process was calling is shown as unknown; its lease would have lasted."""
    run_id = stage.fenced(PLAIN)
    ref = stage.ref(run_id, FIRST_CALL)
    stage.change_run(run_id, pending_effect_owner=f"{PROCESS}1/x")
    grave.leases.acquire(ref, f"{PROCESS}1/x", 1000)
    grave.reaper.bury([DeathNote(ref=ref, process=PROCESS)])
    dead_letter = stage.runs.run(run_id).dead_letter
    assert dead_letter is not None and dead_letter.outcome_unknown


def test_a_note_about_somebody_elses_lease_changes_nothing(stage: Stage, grave: Grave) -> None:
    """The message came twice; the process that died wasn't the one that holds it."""
    run_id = stage.asked(READ)
    ref = stage.ref(run_id, FIRST_CALL)
    grave.leases.acquire(ref, "host/boot/8-1/x", 1000)
    grave.reaper.bury(
        [DeathNote(ref=ref, process=PROCESS), DeathNote(ref=replace(ref, run_id="none"), process=PROCESS)]
    )
    assert stage.ref(run_id, FIRST_CALL) == ref and grave.broker.published == []


@pytest.mark.parametrize("error", [StoreRefusedError("no"), ValueError("a defect")])
def test_a_run_that_can_not_be_changed_keeps_nobody_waiting(stage: Stage, grave: Grave, error: Exception) -> None:
    """It is logged, and tried again at the next pass."""
    run_ids = [stage.asked(READ) for _ in range(3)]
    for run_id in run_ids:
        grave.die_over(run_id)
    grave.steps.script.fail("settle", error)
    assert grave.reaper.reap() == Reaped(requeued=2)
    assert grave.reaper.reap() == Reaped(requeued=1)


def test_a_database_that_is_away_ends_the_pass(stage: Stage, grave: Grave) -> None:
    """Every other run would meet the same."""
    for _ in range(2):
        grave.die_over(stage.asked(READ))
    grave.steps.script.fail("settle", StoreUnavailableError("away"))
    with pytest.raises(StoreUnavailableError):
        grave.reaper.reap()
    assert len(grave.steps.settlements) == 1


def test_a_broker_that_is_away_ends_the_pass(stage: Stage, grave: Grave) -> None:
    """Nothing is marked as published that isn't."""
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, dispatched_at=datetime.now(UTC) - timedelta(days=1))
    grave.broker.is_away = True
    with pytest.raises(BrokerUnavailableError):
        grave.reaper.reap()
    grave.broker.is_away = False
    assert grave.reaper.reap() == Reaped(republished=1)


class DyingDispatcher(RecordingDispatcher):
    """Its process ends in the middle of a publish."""

    def publish(self, wakeups: Sequence[Wakeup]) -> None:
        raise SystemExit


def test_a_keeper_that_ends_before_it_publishes_costs_no_longer_wait(stage: Stage, grave: Grave) -> None:
    """Its next one finds the message as lost as before: a step marked first would wait for twice the grace period."""
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, dispatched_at=datetime.now(UTC) - timedelta(seconds=GRACE_SECONDS + 1))
    grave.reaper.dispatcher = DyingDispatcher()
    with pytest.raises(SystemExit):
        grave.reaper.reap()
    grave.reaper.dispatcher = grave.broker
    assert grave.reaper.reap() == Reaped(republished=1)
    assert grave.woken(run_id) == [stage.ref(run_id, FIRST_CALL)]


def test_a_run_without_an_open_step_is_computed_anew(stage: Stage, grave: Grave) -> None:
    """Whatever left it so: it goes on."""
    run_id = stage.asked(READ)
    stage.complete(run_id, FIRST_CALL)
    stage.change_step(run_id, FIRST_CALL + 1, state=StepState.WAITING.value, dispatched_at=None)
    grave.reaper.reap()
    assert [ref.number for ref in grave.woken(run_id)] == [FIRST_CALL + 1]


class TestInteractiveRuns:
    """Their steps are no worker's; their caller holds one lease for as long as it drives them."""

    def test_a_living_callers_run_is_left_alone(self, stage: Stage, grave: Grave) -> None:
        """However long its steps take."""
        run_id = stage.asked(READ, mode=RunMode.INTERACTIVE)
        grave.leases.acquire(session_ref(run_id), "me", 1000)
        assert grave.reaper.reap() == Reaped()
        assert stage.runs.run(run_id).status is RunStatus.RUNNING
        stage.stop(run_id, FIRST_CALL)

    def test_a_lost_callers_run_fails(self, stage: Stage, grave: Grave) -> None:
        """Nobody else may go on with it."""
        run_id = stage.asked(READ, mode=RunMode.INTERACTIVE)
        grave.reaper.reap()
        run = stage.runs.run(run_id)
        assert (run.status, run.error) == (RunStatus.FAILED, "the process that drove this run is gone")
        assert grave.woken(run_id) == []

    def test_a_lost_callers_write_is_listed_after_its_deadline(self, stage: Stage, grave: Grave) -> None:
        """Until then the process may still be at it, with its lease gone."""
        run_id = stage.fenced(PLAIN, mode=RunMode.INTERACTIVE)
        grave.reaper.reap()
        assert stage.runs.run(run_id).status is RunStatus.RUNNING
        stage.age_fence(run_id, timedelta(minutes=1))
        grave.reaper.reap()
        run = stage.runs.run(run_id)
        assert run.status is RunStatus.FAILED
        assert run.dead_letter is not None and run.dead_letter.outcome_unknown
