"""What a pause stops and what it leaves alone: the contract of `PauseStore`, and of the fences that obey it."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from agentq.adapters.sql.deployment_log import DEPLOYMENT
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.pausing import PARKED_MAX, PARKED_MIN, parked_for
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.errors import NotFoundError
from agentq.domain.model import Charge, StepState
from agentq.domain.outcomes import Retried
from agentq.ports.steps import FenceRequest, FenceVerdict
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.invariants import check_invariants
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage

PATHS = ("sqlite", "postgresql, general path", "postgresql, functions")


@pytest.fixture(params=PATHS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    with fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql() as url:
        database = Database(url)
        stage = Stage(database=database)
        stage.steps = SqlStepStore(database, always_general=request.param == "postgresql, general path")
        yield stage
        check_invariants(database)
        database.dispose()


def pause(stage: Stage, tool: str | None = "pay", agent: str | None = None, *, reads: bool = False) -> None:
    stage.pausing.pause(tool, agent, reads=reads, actor="ann", reason="the bank is down")


def fence(stage: Stage, run_id: str, tool: str = "pay") -> FenceVerdict:
    request = FenceRequest(
        ref=stage.ref(run_id, FIRST_CALL),
        id=run_id,
        owner="host/boot/1-1/x",
        tool=tool,
        effect=PLAIN,
        deadline_seconds=30,
        settles_within_seconds=0,
    )
    return stage.steps.fence(request)


@pytest.mark.parametrize(
    ("tool", "agent", "verdict"),
    [
        ("pay", None, FenceVerdict.PAUSED),
        ("pay", "support", FenceVerdict.PAUSED),
        (None, "support", FenceVerdict.PAUSED),
        (None, None, FenceVerdict.PAUSED),
        ("refund", None, FenceVerdict.STAMPED),
        ("pay", "sales", FenceVerdict.STAMPED),
        (None, "sales", FenceVerdict.STAMPED),
    ],
)
def test_a_fence_is_refused_for_what_is_paused_and_for_nothing_else(
    stage: Stage, tool: str | None, agent: str | None, verdict: FenceVerdict
) -> None:
    """One that slipped through would be a write amid an outage; one too many stops what works."""
    run_id = stage.asked(PLAIN)
    pause(stage, tool, agent)
    assert fence(stage, run_id) is verdict
    assert (stage.runs.run(run_id).pending_effect is None) == (verdict is FenceVerdict.PAUSED)


def test_a_fence_that_stands_already_is_still_found(stage: Stage) -> None:
    """Its reply was lost, then the tool was paused: the worker must hear that its write may go on."""
    run_id = stage.asked(PLAIN)
    assert fence(stage, run_id) is FenceVerdict.STAMPED
    pause(stage)
    assert fence(stage, run_id) is FenceVerdict.STAMPED
    assert stage.pausing.writes_in_flight("pay", "support") == 1
    assert stage.pausing.writes_in_flight("pay", "sales") == 0
    assert stage.pausing.writes_in_flight("refund", None) == 0


def test_a_parked_step_costs_nothing_and_waits(stage: Stage) -> None:
    """The outage of a service isn't the run's fault; and a step that came back at once would keep workers busy."""
    run_id = stage.asked(PLAIN)
    pause(stage)
    ref = stage.ref(run_id, FIRST_CALL)
    before = stage.runs.run(run_id).steps[FIRST_CALL - 1]
    assert stage.steps.park(ref)
    assert stage.steps.park(ref)

    step = stage.runs.run(run_id).steps[FIRST_CALL - 1]
    assert (step.state, step.attempt, step.tries, step.crashes) == (StepState.AVAILABLE, 1, 0, 0)
    assert step.dispatched_at is None
    assert step.due_at is not None and before.due_at is not None and step.due_at > before.due_at
    assert stage.steps.load(ref) is None
    assert stage.keeping.take_due(10, first_steps=False) == []
    assert stage.kinds_of_events(run_id).count("step.parked") == 1


def test_what_moved_on_or_is_in_flight_is_not_parked(stage: Stage) -> None:
    """Only the attempt that would have run waits."""
    run_id = stage.asked(READ)
    ref = stage.ref(run_id, FIRST_CALL)
    stage.settle(run_id, FIRST_CALL, Retried(charge=Charge.TRY, error="refused"))
    assert not stage.steps.park(ref)
    fenced = stage.fenced(PLAIN)
    assert not stage.steps.park(stage.ref(fenced, FIRST_CALL))


def test_the_end_of_a_pause_wakes_what_waited_for_it(stage: Stage) -> None:
    """A run mustn't wait out the long look-again times of an outage that is over; a retry keeps its own time."""
    parked, other, retried = stage.asked(PLAIN), stage.asked(READ), stage.asked(PLAIN)
    pause(stage)
    pause(stage, "look", reads=True)
    assert stage.steps.park(stage.ref(parked, FIRST_CALL))
    assert stage.steps.park(stage.ref(other, FIRST_CALL))
    stage.settle(retried, FIRST_CALL, Retried(charge=Charge.TRY, error="refused", due_in_seconds=600))

    assert stage.pausing.resume("pay", None, actor="ann", reason="the bank is back") == 1

    assert [wakeup.ref.run_id for wakeup in stage.keeping.take_due(10, first_steps=False)] == [parked]
    assert fence(stage, parked) is FenceVerdict.STAMPED
    assert [each.tool for each in stage.pausing.pauses()] == ["look"]


def test_resuming_what_is_not_paused_is_refused_and_says_what_is(stage: Stage) -> None:
    """A pause ends by the name that it was made with: a mistyped one would leave the tool paused, unnoticed."""
    pause(stage, "pay", "support")
    with pytest.raises(NotFoundError, match=r"'pay' is not paused; paused now: tool 'pay' of agent 'support'"):
        stage.pausing.resume("pay", None, actor="ann", reason="")
    assert len(stage.pausing.pauses()) == 1


def test_pauses_are_in_the_audit_log_with_who_and_why(stage: Stage) -> None:
    """Who stopped payments for an hour is asked sooner or later."""
    pause(stage)
    pause(stage, reads=True)
    stage.pausing.resume("pay", None, actor="bob", reason="the bank is back")
    told = [(event.sequence, event.kind, event.actor, event.data) for event in stage.runs.events(DEPLOYMENT)]
    paused = {"tool": "pay", "reason": "the bank is down"}
    assert told == [
        (1, "tool.paused", "ann", {**paused, "reads": False}),
        (2, "tool.paused", "ann", {**paused, "reads": True}),
        (3, "tool.resumed", "bob", {"tool": "pay", "reason": "the bank is back"}),
    ]


def test_the_tools_of_open_steps_and_dead_letters_are_known(stage: Stage) -> None:
    """Whoever pauses a tool in an outage may not have the agents' code, and may mistype its name."""
    stage.asked(KEYED)
    assert stage.pausing.tools_seen() == {"pay"}
    stage.failed(READ)
    assert stage.pausing.tools_seen() == {"pay", "look"}


def test_a_step_is_looked_at_less_often_the_longer_a_pause_lasts() -> None:
    """Ten thousand parked steps mustn't keep the workers from all else; a short pause is over soon."""
    assert parked_for(None) == parked_for(timedelta(0)) == PARKED_MIN
    assert parked_for(timedelta(seconds=20)) == timedelta(seconds=10)
    assert parked_for(timedelta(days=1)) == PARKED_MAX
