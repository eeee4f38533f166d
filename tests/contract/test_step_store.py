"""What a worker does to a step: the contract of `StepStore`, on both databases, and on both paths of PostgreSQL."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.decisions import Ruling
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import AuditRefusedError, StoreRefusedError
from agentq.domain.failures import FailureClass
from agentq.domain.model import (
    Charge,
    DeadLetterReason,
    Decision,
    Json,
    NewStep,
    RunMode,
    RunStatus,
    Step,
    StepKind,
    StepRef,
    StepState,
    Usage,
)
from agentq.domain.outcomes import Answer, Join, Recorded, Retried, Stopped, Turn
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import NewRun
from agentq.ports.steps import FenceRequest, FenceVerdict, HistoryItem, Settled, Settlement, Verdict
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.invariants import check_invariants
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage

PATHS = ("sqlite", "postgresql, general path", "postgresql, functions")
OWNER = "host/boot/1-1/delivery"


def opened(path: str, folder: Path) -> Iterator[Stage]:
    with fresh_sqlite(folder) if path == "sqlite" else fresh_postgresql() as url:
        database = Database(url)
        stage = Stage(database=database)
        stage.steps = SqlStepStore(database, always_general=path == "postgresql, general path")
        yield stage
        check_invariants(database)
        database.dispose()


@pytest.fixture(params=PATHS, scope="module")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One database for all tests that keep to runs of their own."""
    yield from opened(request.param, tmp_path_factory.mktemp("stage"))


@pytest.fixture(params=PATHS)
def own_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """For tests that damage the database."""
    yield from opened(request.param, tmp_path)


def settlement(stage: Stage, run_id: str, change: Recorded | Retried | Stopped, **fields: Any) -> Settlement:
    """Of the first call, by OWNER, unless `fields` say otherwise."""
    number = fields.pop("number", FIRST_CALL)
    values = {"ref": stage.ref(run_id, number), "owner": OWNER, "effect": READ, **fields}
    return Settlement(change=change, **values)


def write_of(stage: Stage, run_id: str, effect: ToolEffect, result: Json = "paid", **fields: Any) -> Settlement:
    """The outcome of the write whose fence `Stage.fenced` stamped."""
    recorded = Recorded(result=result, then=Join(), is_error=fields.pop("is_error", False))
    return settlement(stage, run_id, recorded, effect=effect, fence_id=run_id, **fields)


def requeued(**fields: Any) -> Retried:
    return Retried(**{"charge": Charge.TRY, "error": "refused", "failure_class": FailureClass.CONNECTION, **fields})


def stopped(**fields: Any) -> Stopped:
    values = {"reason": DeadLetterReason.NOT_RETRYABLE, "failure_class": FailureClass.UNKNOWN, "error": "it raised"}
    return Stopped(**{**values, **fields})


def fence_request(ref: StepRef, **fields: Any) -> FenceRequest:
    values: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "owner": OWNER,
        "tool": "pay",
        "effect": PLAIN,
        "deadline_seconds": 30.0,
        "settles_within_seconds": None,
    }
    return FenceRequest(ref=ref, **{**values, **fields})


def step(stage: Stage, run_id: str, number: int = FIRST_CALL) -> Step:
    return stage.runs.run(run_id).steps[number - 1]


def states(stage: Stage, run_id: str) -> list[StepState]:
    return [each.state for each in stage.runs.run(run_id).steps]


def numbers(wakeups: tuple[Wakeup, ...]) -> list[int]:
    return [wakeup.ref.number for wakeup in wakeups]


def ruled(stage: Stage, run_id: str, decision: Decision, result: str | None = None) -> None:
    """Somebody said what became of the write, with that result (JSON text); the dead letter is still open."""
    ruling = Ruling(decision=decision, result=None if result is None else json.loads(result))
    stage.decisions.resolve(run_id, ruling, actor="ann", reason="asked the bank")


# --- Load -----------------------------------------------------------------------------------------------------------


def test_the_first_step_of_a_new_run_loads_with_all_it_needs(stage: Stage) -> None:
    """A step's message holds ids alone; everything else comes from here, in one read."""
    run_id = uuid.uuid4().hex
    stage.runs.add([NewRun(id=run_id, agent="support", input={"order": 17}, metadata={"team": "eu"})])

    loaded = stage.steps.load(StepRef(run_id=run_id, number=1, attempt=1))

    assert loaded is not None
    assert (loaded.run.id, loaded.run.agent, loaded.run.input) == (run_id, "support", {"order": 17})
    assert (loaded.run.mode, loaded.run.metadata) == (RunMode.QUEUED, {"team": "eu"})
    assert (loaded.step.kind, loaded.step.ref) == (StepKind.MODEL, StepRef(run_id=run_id, number=1, attempt=1))
    assert (loaded.history, loaded.fence) == ((), None)
    assert (loaded.handed_back_seconds, loaded.throttled_seconds) == (None, None)
    assert loaded.step == step(stage, run_id, 1)


def test_a_call_loads_as_the_turn_asked_for_it(stage: Stage) -> None:
    """The arguments, and the effect that was pinned when the step was created."""
    run_id = stage.queued()
    call = NewStep(
        kind=StepKind.TOOL, tool="pay", call_id="c1", arguments={"cents": 5}, effect=KEYED, deadline_seconds=2.5
    )
    stage.settle(run_id, 1, Recorded(result={}, then=Turn(calls=(call,))))

    loaded = stage.steps.load(stage.ref(run_id, FIRST_CALL))

    assert loaded is not None and loaded.step == step(stage, run_id)
    assert (loaded.step.tool, loaded.step.call_id, loaded.step.arguments) == ("pay", "c1", {"cents": 5})
    assert (loaded.step.effect, loaded.step.deadline_seconds) == (KEYED, 2.5)


def test_a_turn_loads_the_results_so_far_in_order(stage: Stage) -> None:
    """The results come back in the order of the calls, whichever ended first."""
    run_id = stage.asked(READ, READ)
    stage.complete(run_id, 3, "second")
    stage.complete(run_id, 2, {"first": 1})

    loaded = stage.steps.load(stage.ref(run_id, 4))

    assert loaded is not None
    assert loaded.history[1:] == (
        HistoryItem(kind=StepKind.TOOL, call_id="call-0", result='{"first":1}'),
        HistoryItem(kind=StepKind.TOOL, call_id="call-1", result='"second"'),
    )
    assert loaded.history[0].kind is StepKind.MODEL


def impossible(name: str) -> NewStep:
    return NewStep(kind=StepKind.TOOL, batch=1, tool=name, call_id=name, effect=PLAIN, error=f"there is no tool {name}")


def test_a_call_that_cannot_be_made_is_an_error_result_at_once(stage: Stage) -> None:
    """A model that makes a tool up costs no step's delivery, and no wait for a worker that might know it."""
    run_id = stage.queued()
    possible = NewStep(kind=StepKind.TOOL, batch=2, tool="look", call_id="c1")

    settled = stage.settle(run_id, 1, Recorded(result={}, then=Turn(calls=(impossible("fly"), possible))))

    assert numbers(settled.wakeups) == [3]
    assert (step(stage, run_id, 2).state, step(stage, run_id, 2).is_error) == (StepState.COMPLETED, True)
    assert step(stage, run_id, 2).result == "there is no tool fly"
    assert numbers(stage.complete(run_id, 3).wakeups) == [4]


def test_a_turn_of_impossible_calls_alone_is_followed_by_the_next_turn(stage: Stage) -> None:
    """Nothing is open that could bring the run on."""
    run_id = stage.queued()

    settled = stage.settle(run_id, 1, Recorded(result={}, then=Turn(calls=(impossible("fly"), impossible("swim")))))

    assert [(wakeup.ref.number, wakeup.kind) for wakeup in settled.wakeups] == [(4, StepKind.MODEL)]


def test_what_may_not_run_does_not_load(stage: Stage) -> None:
    """Redelivery is normal: an attempt that is over, or not yet due, is left alone."""
    run_id = stage.asked(READ)
    ref = stage.ref(run_id, FIRST_CALL)

    assert stage.steps.load(replace(ref, run_id="none")) is None
    assert stage.steps.load(replace(ref, attempt=2)) is None
    assert stage.steps.load(replace(ref, number=1)) is None, "it is completed"
    stage.settle(run_id, FIRST_CALL, requeued(due_in_seconds=3600))
    assert stage.steps.load(replace(ref, attempt=2)) is None, "it isn't due"
    stage.runs.cancel(run_id, actor="ann", reason="test")
    assert stage.steps.load(ref) is None


def test_a_standing_fence_is_loaded(stage: Stage) -> None:
    """Whoever gets the step must see that a write of it is in flight."""
    run_id = stage.fenced(KEYED, settles_within_seconds=4)
    loaded = stage.steps.load(stage.ref(run_id, FIRST_CALL))
    assert loaded is not None and loaded.fence == stage.runs.run(run_id).pending_effect


def test_the_waiting_times_of_a_step_are_durations(stage: Stage) -> None:
    """Only durations cross clocks: the worker's clock has no part in them."""
    run_id = stage.asked(READ)
    stage.settle(run_id, FIRST_CALL, requeued(charge=Charge.PATIENCE))
    assert stage.steps.hand_back(stage.ref(run_id, FIRST_CALL), due_in_seconds=0, why="no such tool here")

    loaded = stage.steps.load(stage.ref(run_id, FIRST_CALL))

    assert loaded is not None
    assert loaded.throttled_seconds is not None and -1 < loaded.throttled_seconds < 30
    assert loaded.handed_back_seconds is not None and -1 < loaded.handed_back_seconds < 30


# --- Fence ----------------------------------------------------------------------------------------------------------


def test_a_fence_stands_on_the_run_s_row_until_it_is_settled(stage: Stage) -> None:
    """It is what the reaper and people see of a write in flight."""
    run_id = stage.asked(PLAIN)
    request = fence_request(stage.ref(run_id, FIRST_CALL), settles_within_seconds=5.0)

    assert stage.steps.fence(request) is FenceVerdict.STAMPED

    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None
    assert (fence.id, fence.number, fence.attempt, fence.tool) == (request.id, FIRST_CALL, 1, "pay")
    assert (fence.effect, fence.owner, fence.is_callable) == (PLAIN, OWNER, True)
    assert fence.deadline_at - fence.stamped_at == timedelta(seconds=30)
    assert fence.settles_within_seconds == 5
    assert stage.kinds_of_events(run_id)[-1] == "fence.stamped"


def test_the_same_fence_sent_again_is_found_standing(stage: Stage) -> None:
    """A reply that is lost is not an answer: the worker asks again with the same id, and nothing is doubled."""
    run_id = stage.asked(PLAIN)
    request = fence_request(stage.ref(run_id, FIRST_CALL))
    assert stage.steps.fence(request) is FenceVerdict.STAMPED
    events = stage.runs.events(run_id)

    assert stage.steps.fence(request) is FenceVerdict.STAMPED
    assert stage.runs.events(run_id) == events


def test_a_second_fence_is_refused_while_one_stands(stage: Stage) -> None:
    """At most one write in flight: the second delivery must not call the tool."""
    run_id = stage.fenced()
    before = stage.runs.run(run_id)
    assert stage.steps.fence(fence_request(stage.ref(run_id, FIRST_CALL))) is FenceVerdict.FENCE_STANDS
    assert stage.runs.run(run_id) == before


def test_no_fence_for_an_attempt_that_is_over(stage: Stage) -> None:
    """A late worker can't write in its successor's place, nor in a run that ended or is to be cancelled."""
    run_id = stage.asked(PLAIN)
    ref = stage.ref(run_id, FIRST_CALL)
    assert stage.steps.fence(fence_request(replace(ref, run_id="none"))) is FenceVerdict.MOVED_ON
    assert stage.steps.fence(fence_request(replace(ref, number=1))) is FenceVerdict.MOVED_ON
    stage.settle(run_id, FIRST_CALL, requeued())
    assert stage.steps.fence(fence_request(ref)) is FenceVerdict.MOVED_ON
    stage.change_run(run_id, cancel_requested=True)
    assert stage.steps.fence(fence_request(replace(ref, attempt=2))) is FenceVerdict.MOVED_ON
    stage.change_run(run_id, cancel_requested=False)
    stage.runs.cancel(run_id, actor="ann", reason="test")
    assert stage.steps.fence(fence_request(replace(ref, attempt=2))) is FenceVerdict.MOVED_ON
    assert stage.runs.run(run_id).pending_effect is None


# --- Taking a fence back --------------------------------------------------------------------------------------------


def test_a_fence_taken_back_leaves_the_attempt_as_it_was(stage: Stage) -> None:
    """Nothing was called: the same attempt is dispatched again, and no budget is spent."""
    run_id = stage.fenced()
    ref = stage.ref(run_id, FIRST_CALL)

    assert stage.steps.take_back(ref, run_id, OWNER)

    run = stage.runs.run(run_id)
    assert (run.pending_effect, run.status) == (None, RunStatus.RUNNING)
    its_step = step(stage, run_id)
    assert (its_step.state, its_step.ref, its_step.dispatched_at) == (StepState.AVAILABLE, ref, None)
    assert (its_step.tries, its_step.crashes) == (0, 0)
    assert stage.steps.load(ref) is not None
    assert not stage.steps.take_back(ref, run_id, OWNER), "it doesn't stand any more"


def test_taking_a_fence_back_withdraws_the_dead_letter_over_it(stage: Stage) -> None:
    """The death of a process was shown as an unknown write; it is known now, and was none."""
    run_id = stage.unknown(others=(READ,))
    assert states(stage, run_id)[1:] == [StepState.DEAD_LETTERED, StepState.CLOSED]

    assert stage.steps.take_back(stage.ref(run_id, FIRST_CALL), run_id, OWNER)

    run = stage.runs.run(run_id)
    assert (run.status, run.dead_letter, run.error, run.finished_at) == (RunStatus.RUNNING, None, None, None)
    assert states(stage, run_id)[1:] == [StepState.AVAILABLE, StepState.WAITING]


def test_taking_a_fence_back_carries_out_the_cancel_that_waited(stage: Stage) -> None:
    """A cancel waits for the fence alone."""
    for run_id in (stage.fenced(others=(READ,)), stage.unknown(is_cancelled=True, others=(READ,))):
        stage.runs.cancel(run_id, actor="ann", reason="wrong customer")
        assert stage.steps.take_back(stage.ref(run_id, FIRST_CALL), run_id, OWNER)
        assert stage.runs.status(run_id) is RunStatus.CANCELLED
        assert states(stage, run_id)[1:] == [StepState.CLOSED, StepState.CLOSED]


def test_not_called_contradicts_a_ruling_that_it_happened(stage: Stage) -> None:
    """ "Not called" is an outcome too, and worth as much as any other."""
    run_id = stage.unknown()
    ruled(stage, run_id, Decision.HAPPENED, '"paid"')

    assert not stage.steps.take_back(stage.ref(run_id, FIRST_CALL), run_id, OWNER)

    assert stage.runs.run(run_id).has_contradiction
    assert "outcome.contradicted" in stage.kinds_of_events(run_id)


# --- Handing back ---------------------------------------------------------------------------------------------------


def test_a_step_that_is_handed_back_costs_nothing_and_comes_again(stage: Stage) -> None:
    """Another worker may know the tool: the attempt stays, and the dispatcher sends it again when it is due."""
    run_id = stage.asked(READ)
    ref = stage.ref(run_id, FIRST_CALL)

    assert stage.steps.hand_back(ref, due_in_seconds=3600, why="no such tool here")
    assert stage.steps.load(ref) is None, "it isn't due"
    assert stage.steps.hand_back(ref, due_in_seconds=0, why="no such tool here")

    its_step = step(stage, run_id)
    assert (its_step.ref, its_step.dispatched_at, its_step.tries, its_step.crashes) == (ref, None, 0, 0)
    assert stage.kinds_of_events(run_id).count("step.handed_back") == 1


def test_what_moved_on_is_not_handed_back(stage: Stage) -> None:
    """A late hand-back must not delay a successor, or a step whose write is in flight."""
    run_id = stage.fenced()
    ref = stage.ref(run_id, FIRST_CALL)
    assert not stage.steps.hand_back(ref, due_in_seconds=0, why="test")
    assert not stage.steps.hand_back(replace(ref, attempt=9), due_in_seconds=0, why="test")
    assert not stage.steps.hand_back(replace(ref, run_id="none"), due_in_seconds=0, why="test")


# --- Settling a result ----------------------------------------------------------------------------------------------


def test_a_turn_opens_its_first_batch_alone(stage: Stage) -> None:
    """Reads of one batch run side by side; each write runs alone, in the order in which the model asked."""
    run_id = stage.queued()
    calls = (
        NewStep(kind=StepKind.TOOL, batch=0, tool="look", call_id="a", arguments={"x": 1}),
        NewStep(kind=StepKind.TOOL, batch=0, tool="look", call_id="b"),
        NewStep(kind=StepKind.TOOL, batch=1, tool="pay", call_id="c", effect=PLAIN, deadline_seconds=9),
    )
    recorded = Recorded(
        result={"role": "assistant"}, then=Turn(calls=calls), usage=Usage(input_tokens=7, output_tokens=3)
    )

    settled = stage.steps.settle(settlement(stage, run_id, recorded, number=1))

    ref = StepRef(run_id=run_id, number=2, attempt=1)
    look = Wakeup(ref=ref, agent="support", kind=StepKind.TOOL, tool="look")
    assert settled == Settled(
        verdict=Verdict.APPLIED,
        wakeups=(look, replace(look, ref=replace(ref, number=3))),
        run_status=RunStatus.RUNNING,
    )
    run = stage.runs.run(run_id)
    assert (run.status, run.started_at is not None) == (RunStatus.RUNNING, True)
    turn, first, second, third = run.steps
    assert (turn.state, turn.result, turn.usage) == (StepState.COMPLETED, {"role": "assistant"}, recorded.usage)
    assert turn.finished_at == first.dispatched_at == second.dispatched_at
    assert (first.state, first.arguments, first.call_id) == (StepState.AVAILABLE, {"x": 1}, "a")
    assert (third.state, third.effect, third.deadline_seconds, third.batch) == (StepState.WAITING, PLAIN, 9, 1)
    assert (third.dispatched_at, third.due_at) == (None, None)
    assert stage.kinds_of_events(run_id) == ["run.enqueued", "step.settled"]


def test_the_last_of_a_batch_opens_the_next_and_the_last_of_all_the_model_s_turn(stage: Stage) -> None:
    """The join is a counter on the run's row."""
    run_id = stage.asked(READ, READ, KEYED, READ)

    assert stage.complete(run_id, 3).wakeups == ()
    (wakeup,) = stage.complete(run_id, 2).wakeups
    assert (wakeup.ref.number, wakeup.tool, wakeup.effect, wakeup.agent) == (4, "pay", KEYED, "support")
    assert stage.steps.fence(fence_request(wakeup.ref, id=run_id, effect=KEYED)) is FenceVerdict.STAMPED
    assert numbers(stage.complete(run_id, 4, fence_id=run_id).wakeups) == [5]
    (wakeup,) = stage.complete(run_id, 5).wakeups
    assert (wakeup.ref.number, wakeup.kind, wakeup.tool) == (6, StepKind.MODEL, None)
    assert states(stage, run_id) == [StepState.COMPLETED] * 5 + [StepState.AVAILABLE]


def test_an_answer_completes_the_run(stage: Stage) -> None:
    """Its output is there with its status, and nothing of it is open."""
    run_id = stage.queued()
    settled = stage.answer(run_id, 1, "all done")

    assert settled == Settled(verdict=Verdict.APPLIED, run_status=RunStatus.COMPLETED)
    run = stage.runs.run(run_id)
    assert (run.status, run.output) == (RunStatus.COMPLETED, "all done")
    assert run.started_at == run.finished_at == run.steps[0].finished_at
    assert stage.kinds_of_events(run_id) == ["run.enqueued", "step.settled", "run.completed"]


def test_a_write_s_settle_clears_its_fence(stage: Stage) -> None:
    """One transaction: result, event, what comes next, and no write in flight any more."""
    for effect in (PLAIN, KEYED):
        run_id = stage.fenced(effect)
        settled = stage.steps.settle(write_of(stage, run_id, effect, {"id": "r-1"}))
        assert (settled.verdict, numbers(settled.wakeups)) == (Verdict.APPLIED, [3])
        run = stage.runs.run(run_id)
        assert (run.pending_effect, run.steps[1].result) == (None, {"id": "r-1"})


def test_every_event_has_its_actor_and_its_place(stage: Stage) -> None:
    """Who did what is read from here, in the order in which it was done, and never with a payload."""
    run_id = stage.fenced(KEYED)
    stage.steps.settle(write_of(stage, run_id, KEYED, "a payload"))

    events = stage.runs.events(run_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.at for event in events] == sorted(event.at for event in events)
    last = events[-1]
    assert (last.kind, last.number, last.attempt, last.actor) == ("step.settled", FIRST_CALL, 1, OWNER)
    assert last.data == {"effect": "idempotent_write", "fence": run_id}


def test_an_error_result_is_marked_and_its_note_audited(stage: Stage) -> None:
    """The model reads an error's text; people read why a result was not kept."""
    run_id = stage.asked(READ)
    recorded = Recorded(result="no such order", then=Join(), is_error=True, note="result_not_kept")
    assert stage.steps.settle(settlement(stage, run_id, recorded)).verdict is Verdict.APPLIED
    assert (step(stage, run_id).is_error, step(stage, run_id).result) == (True, "no such order")
    assert stage.runs.events(run_id)[-1].data == {
        "effect": "read_only",
        "is_error": True,
        "note": "result_not_kept",
    }


def test_a_late_worker_s_read_changes_nothing(stage: Stage) -> None:
    """The attempt is the fencing token: after a requeue its predecessor matches no row."""
    run_id = stage.asked(READ, READ)
    late = settlement(stage, run_id, Recorded(result="late", then=Join()), owner="late")
    stage.settle(run_id, FIRST_CALL, requeued())
    before = stage.runs.run(run_id)

    settled = stage.steps.settle(late)
    assert (settled.verdict, settled.wakeups, settled.run_status) == (Verdict.MOVED_ON, (), RunStatus.RUNNING)
    assert stage.steps.settle(replace(late, ref=replace(late.ref, run_id="none"))).verdict is Verdict.MOVED_ON
    assert stage.steps.settle(replace(late, ref=replace(late.ref, number=99))).verdict is Verdict.MOVED_ON
    assert stage.runs.run(run_id) == before


def test_a_result_without_its_fence_does_not_fit_over_a_standing_one(stage: Stage) -> None:
    """Another delivery of the same attempt wrote: whoever holds no fence knows nothing of that write."""
    run_id = stage.fenced()
    rival = settlement(stage, run_id, Recorded(result="invalid arguments", then=Join(), is_error=True), effect=PLAIN)
    assert stage.steps.settle(rival).verdict is Verdict.MOVED_ON
    assert stage.runs.run(run_id).pending_effect is not None


def test_a_cancel_that_waited_for_the_fence_is_carried_out_by_the_settle(stage: Stage) -> None:
    """The outcome is recorded, and nothing follows it."""
    run_id = stage.fenced(others=(READ,))
    stage.runs.cancel(run_id, actor="ann", reason="wrong customer")

    settled = stage.steps.settle(write_of(stage, run_id, PLAIN))

    assert settled == Settled(verdict=Verdict.APPLIED, run_status=RunStatus.CANCELLED)
    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect, run.finished_at is not None) == (RunStatus.CANCELLED, None, True)
    assert states(stage, run_id)[1:] == [StepState.COMPLETED, StepState.CLOSED]
    assert stage.kinds_of_events(run_id)[-2:] == ["step.settled", "run.cancelled"]


# --- Sent again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        Recorded(result="x", then=Turn(calls=(NewStep(kind=StepKind.TOOL, tool="look", call_id="c"),))),
        Recorded(result="x", then=Join()),
        Recorded(result="x", then=Answer(output="done")),
        requeued(),
        requeued(due_in_seconds=60),
        stopped(),
    ],
    ids=lambda change: f"{type(change).__name__}-{type(getattr(change, 'then', None)).__name__}",
)
def test_the_same_settlement_sent_again_finds_itself(stage: Stage, change: Recorded | Retried | Stopped) -> None:
    """After a lost reply it is sent again: nothing is done twice, and what it opened is woken all the same."""
    run_id = stage.asked(READ)
    sent = settlement(stage, run_id, change)
    first = stage.steps.settle(sent)
    assert first.verdict is Verdict.APPLIED
    before, events = stage.runs.run(run_id), stage.runs.events(run_id)

    again = stage.steps.settle(sent)

    assert again == replace(first, verdict=Verdict.ALREADY)
    assert (stage.runs.run(run_id), stage.runs.events(run_id)) == (before, events)


def test_another_owner_s_settlement_is_not_mine(stage: Stage) -> None:
    """Two deliveries of one read: the second learns that it came too late."""
    run_id = stage.asked(READ)
    mine = settlement(stage, run_id, Recorded(result="x", then=Join()))
    assert stage.steps.settle(mine).verdict is Verdict.APPLIED
    assert stage.steps.settle(replace(mine, owner="other")).verdict is Verdict.MOVED_ON


# --- Requeue --------------------------------------------------------------------------------------------------------


def test_a_requeue_opens_the_next_attempt(stage: Stage) -> None:
    """The number goes up with every requeue: it is what shuts the old attempt out."""
    run_id = stage.queued()
    settled = stage.steps.settle(settlement(stage, run_id, requeued(is_isolated=True), number=1))

    ref = StepRef(run_id=run_id, number=1, attempt=2)
    wakeup = Wakeup(ref=ref, agent="support", kind=StepKind.MODEL, is_isolated=True)
    assert settled == Settled(verdict=Verdict.APPLIED, wakeups=(wakeup,), run_status=RunStatus.RUNNING)
    assert step(stage, run_id, 1).dispatched_at is not None
    assert stage.steps.load(ref) is not None
    event = stage.runs.events(run_id)[-1]
    assert event.kind == "step.requeued"
    assert event.data == {"charge": "try", "failure_class": "CONNECTION", "error": "refused", "due_in_seconds": 0.0}


def test_a_requeue_that_waits_is_left_to_the_dispatcher(stage: Stage) -> None:
    """No ETA and no countdown: a retry is a row with `due_at`."""
    run_id = stage.asked(READ)
    settled = stage.steps.settle(settlement(stage, run_id, requeued(due_in_seconds=60)))
    assert settled.wakeups == ()
    its_step = step(stage, run_id)
    assert its_step.dispatched_at is None and its_step.due_at is not None
    requeued_at = stage.runs.events(run_id)[-1].at
    assert its_step.due_at - requeued_at == timedelta(seconds=60)


@pytest.mark.parametrize(
    ("charge", "tries", "crashes", "is_throttled"),
    [
        (Charge.NOTHING, 0, 0, False),
        (Charge.TRY, 1, 0, False),
        (Charge.CRASH, 0, 1, False),
        (Charge.PATIENCE, 0, 0, True),
    ],
)
def test_a_requeue_spends_the_budget_it_names(
    stage: Stage, charge: Charge, tries: int, crashes: int, is_throttled: bool
) -> None:
    """Two budgets and a patience, all on the step's row; waiting costs nothing."""
    run_id = stage.asked(READ)
    stage.settle(run_id, FIRST_CALL, requeued(charge=charge))
    its_step = step(stage, run_id)
    assert (its_step.tries, its_step.crashes) == (tries, crashes)
    assert (its_step.throttled_since is not None) == is_throttled


def test_patience_counts_from_the_first_time(stage: Stage) -> None:
    """Or a provider that throttles for ever would be waited for, for ever."""
    run_id = stage.asked(READ)
    stage.settle(run_id, FIRST_CALL, requeued(charge=Charge.PATIENCE))
    since = step(stage, run_id).throttled_since
    stage.settle(run_id, FIRST_CALL, requeued(charge=Charge.PATIENCE))
    assert step(stage, run_id).throttled_since == since


def test_a_keyed_write_s_requeue_clears_the_fence_and_leaves_the_doubt(stage: Stage) -> None:
    """The next attempt must be able to stamp; and until a result is recorded the write may have happened."""
    run_id = stage.fenced(KEYED)
    retried = settlement(stage, run_id, requeued(), effect=KEYED, fence_id=run_id)
    assert stage.steps.settle(retried).verdict is Verdict.APPLIED
    assert (stage.runs.run(run_id).pending_effect, step(stage, run_id).may_have_happened) == (None, True)

    ref = stage.ref(run_id, FIRST_CALL)
    assert stage.steps.fence(fence_request(ref, id="second" + run_id, effect=KEYED)) is FenceVerdict.STAMPED
    done = settlement(stage, run_id, Recorded(result=1, then=Join()), effect=KEYED, fence_id="second" + run_id)
    assert stage.steps.settle(done).verdict is Verdict.APPLIED
    assert not step(stage, run_id).may_have_happened


def test_a_keyed_write_is_not_due_before_its_receiver_is_done_with_it(stage: Stage) -> None:
    """A receiver that still works on the first request would answer "key in use"."""
    run_id = stage.fenced(KEYED, deadline_seconds=30, settles_within_seconds=5)
    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None
    change = requeued(waits_for_fence=True, due_in_seconds=1)
    settled = stage.steps.settle(settlement(stage, run_id, change, effect=KEYED, fence_id=run_id))
    assert settled.wakeups == ()
    assert step(stage, run_id).due_at == fence.deadline_at + timedelta(seconds=5)


@pytest.mark.parametrize("knows_the_fence", [True, False])
def test_a_plain_write_s_fence_forbids_a_requeue(stage: Stage, knows_the_fence: bool) -> None:
    """Whoever calls it: only a decision may open another attempt."""
    run_id = stage.fenced()
    before = stage.runs.run(run_id)
    fence_id = run_id if knows_the_fence else None
    retried = settlement(stage, run_id, requeued(), effect=PLAIN, fence_id=fence_id)
    assert stage.steps.settle(retried).verdict is Verdict.REFUSED
    assert stage.runs.run(run_id) == before


def test_a_fence_over_which_nothing_could_be_called_may_be_requeued(stage: Stage) -> None:
    """The tool was renamed: the fence is real, but no call can have been made; it must not poison the next attempt."""
    run_id = stage.fenced(is_callable=False)
    retried = settlement(stage, run_id, requeued(), effect=PLAIN, fence_id=run_id)
    assert stage.steps.settle(retried).verdict is Verdict.APPLIED
    assert (stage.runs.run(run_id).pending_effect, step(stage, run_id).may_have_happened) == (None, False)
    assert stage.steps.fence(fence_request(stage.ref(run_id, FIRST_CALL))) is FenceVerdict.STAMPED


def test_a_requeue_of_what_moved_on_changes_nothing(stage: Stage) -> None:
    """Two reapers at once, one of them paused between its read and its write: one requeue, no live fence cleared."""
    run_id = stage.asked(KEYED)
    judged = settlement(stage, run_id, requeued(charge=Charge.CRASH), effect=KEYED, owner="keeper")
    assert stage.steps.fence(fence_request(judged.ref, effect=KEYED)) is FenceVerdict.STAMPED
    assert stage.steps.settle(judged).verdict is Verdict.MOVED_ON, "a fence was stamped since"
    assert stage.runs.run(run_id).pending_effect is not None


def test_a_requeue_after_a_cancel_ends_the_run(stage: Stage) -> None:
    """Nothing may revive a run that is to be cancelled; a keyed write over which it ends may have happened."""
    run_id = stage.fenced(KEYED, others=(READ,))
    stage.runs.cancel(run_id, actor="ann", reason="wrong customer")
    settled = stage.steps.settle(settlement(stage, run_id, requeued(), effect=KEYED, fence_id=run_id))
    assert settled == Settled(verdict=Verdict.APPLIED, run_status=RunStatus.CANCELLED)
    assert stage.runs.run(run_id).pending_effect is None
    assert step(stage, run_id).may_have_happened
    assert states(stage, run_id)[1:] == [StepState.CLOSED, StepState.CLOSED]


# --- Stop -----------------------------------------------------------------------------------------------------------


def test_a_stop_makes_a_dead_letter_and_closes_what_was_open(stage: Stage) -> None:
    """The run waits for a person, with its reason, and nothing of it runs on."""
    run_id = stage.asked(READ, READ, PLAIN)
    change = stopped(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=FailureClass.SERVER_ERROR, error="503\0")

    settled = stage.steps.settle(settlement(stage, run_id, change))

    assert settled == Settled(verdict=Verdict.APPLIED, run_status=RunStatus.FAILED)
    run = stage.runs.run(run_id)
    letter = run.dead_letter
    assert letter is not None
    assert (letter.number, letter.reason, letter.failure_class) == (
        FIRST_CALL,
        DeadLetterReason.RETRIES_EXHAUSTED,
        FailureClass.SERVER_ERROR,
    )
    assert (letter.error, letter.outcome_unknown, run.error) == ("503\N{REPLACEMENT CHARACTER}", False, letter.error)
    assert states(stage, run_id)[1:] == [StepState.DEAD_LETTERED, StepState.CLOSED, StepState.CLOSED]
    assert run.finished_at == letter.created_at
    assert stage.kinds_of_events(run_id)[-1] == "run.dead_lettered"


def test_an_unknown_write_s_fence_stays(stage: Stage) -> None:
    """It is what the decision will be about; a known failure leaves none."""
    unknown = stage.fenced()
    change = settlement(stage, unknown, stopped(outcome_unknown=True), effect=PLAIN, fence_id=unknown)
    assert stage.steps.settle(change).verdict is Verdict.APPLIED
    run = stage.runs.run(unknown)
    assert run.pending_effect is not None and run.dead_letter is not None and run.dead_letter.outcome_unknown

    exhausted = stage.fenced(KEYED)
    change = settlement(stage, exhausted, stopped(), effect=KEYED, fence_id=exhausted)
    assert stage.steps.settle(change).verdict is Verdict.APPLIED
    run = stage.runs.run(exhausted)
    assert (run.pending_effect, step(stage, exhausted).may_have_happened) == (None, True)


def test_an_interactive_run_fails_without_a_dead_letter_but_for_an_unknown_write(stage: Stage) -> None:
    """Its caller sees the error; what nobody knows must be listed all the same."""
    failed = stage.asked(READ, mode=RunMode.INTERACTIVE)
    stage.stop(failed, FIRST_CALL)
    run = stage.runs.run(failed)
    assert (run.status, run.error, run.dead_letter) == (RunStatus.FAILED, "the tool raised", None)

    unknown = stage.fenced(mode=RunMode.INTERACTIVE)
    stage.stop(unknown, FIRST_CALL, outcome_unknown=True, fence_id=unknown)
    run = stage.runs.run(unknown)
    assert run.status is RunStatus.FAILED and run.dead_letter is not None and run.pending_effect is not None


def test_a_stop_after_a_cancel_cancels_unless_a_write_is_unknown(stage: Stage) -> None:
    """A cancelled run is no dead letter; an unknown write is one, cancelled or not."""
    known, unknown = stage.fenced(), stage.fenced()
    for run_id in (known, unknown):
        stage.runs.cancel(run_id, actor="ann", reason="wrong customer")
    change = settlement(stage, known, stopped(), effect=PLAIN, fence_id=known)
    assert stage.steps.settle(change) == Settled(verdict=Verdict.APPLIED, run_status=RunStatus.CANCELLED)
    assert stage.runs.run(known).dead_letter is None

    change = settlement(stage, unknown, stopped(outcome_unknown=True), effect=PLAIN, fence_id=unknown)
    assert stage.steps.settle(change) == Settled(verdict=Verdict.APPLIED, run_status=RunStatus.FAILED)
    run = stage.runs.run(unknown)
    assert run.cancel_requested and run.pending_effect is not None and run.dead_letter is not None


# --- Late outcomes --------------------------------------------------------------------------------------------------


def test_a_late_outcome_is_the_result_and_stops_a_newer_attempt(stage: Stage) -> None:
    """The attempt that was given up comes back while its successor waits: what is known is used, not written again."""
    run_id = stage.fenced(KEYED)
    outcome = write_of(stage, run_id, KEYED, {"id": "r-1"}, owner="given up")
    stage.steps.settle(settlement(stage, run_id, requeued(due_in_seconds=60), effect=KEYED, fence_id=run_id))

    settled = stage.steps.settle(outcome)

    assert (settled.verdict, numbers(settled.wakeups), settled.run_status) == (Verdict.LATE, [3], RunStatus.RUNNING)
    its_step = step(stage, run_id)
    assert (its_step.state, its_step.result) == (StepState.COMPLETED, {"id": "r-1"})
    assert not its_step.may_have_happened
    assert stage.steps.load(replace(outcome.ref, attempt=2)) is None
    assert stage.steps.settle(outcome).verdict is Verdict.ALREADY


def test_a_late_outcome_heals_the_dead_letter_over_it(stage: Stage) -> None:
    """Nobody needs to decide what is known: the run goes on where it stopped."""
    run_id = stage.unknown(others=(READ, READ))
    outcome = write_of(stage, run_id, PLAIN, owner="silent for a while")

    settled = stage.steps.settle(outcome)

    assert (settled.verdict, numbers(settled.wakeups), settled.run_status) == (Verdict.LATE, [3, 4], RunStatus.RUNNING)
    run = stage.runs.run(run_id)
    assert (run.dead_letter, run.pending_effect, run.error, run.finished_at) == (None, None, None, None)
    assert states(stage, run_id)[1:] == [StepState.COMPLETED, StepState.AVAILABLE, StepState.AVAILABLE]
    assert stage.complete(run_id, 3).wakeups == ()
    assert numbers(stage.complete(run_id, 4).wakeups) == [5]


def test_a_late_outcome_of_a_cancelled_run_is_recorded_and_nothing_follows(stage: Stage) -> None:
    """The record is true, and the run stays what it is."""
    cancelled = stage.fenced(KEYED)
    outcome = write_of(stage, cancelled, KEYED, owner="given up")
    stage.steps.settle(settlement(stage, cancelled, requeued(), effect=KEYED, fence_id=cancelled))
    stage.runs.cancel(cancelled, actor="ann", reason="wrong customer")
    assert stage.steps.settle(outcome) == Settled(verdict=Verdict.LATE, run_status=RunStatus.CANCELLED)
    assert (step(stage, cancelled).result, step(stage, cancelled).may_have_happened) == ("paid", False)

    to_cancel = stage.unknown(is_cancelled=True)
    assert stage.steps.settle(write_of(stage, to_cancel, PLAIN)) == Settled(
        verdict=Verdict.LATE, run_status=RunStatus.CANCELLED
    )
    assert stage.runs.run(to_cancel).dead_letter is None


def test_a_late_outcome_that_agrees_with_the_ruling_is_noted(stage: Stage) -> None:
    """The first decision stands; who said that it happened need not know with which result."""
    for result in ('"paid"', "null"):
        run_id = stage.unknown()
        ruled(stage, run_id, Decision.HAPPENED, result)
        outcome = write_of(stage, run_id, PLAIN, "paid", owner="late")
        assert stage.steps.settle(outcome).verdict is Verdict.AGREED
        assert stage.steps.settle(outcome).verdict is Verdict.AGREED
        assert stage.kinds_of_events(run_id).count("outcome.agreed") == 1
        assert not stage.runs.run(run_id).has_contradiction


def test_a_late_outcome_that_contradicts_the_ruling_is_raised(stage: Stage) -> None:
    """Recorded where operators look first, never overwritten."""
    run_id = stage.unknown()
    ruled(stage, run_id, Decision.HAPPENED, '"paid"')
    outcome = write_of(stage, run_id, PLAIN, "card declined", is_error=True, owner="late")

    assert stage.steps.settle(outcome).verdict is Verdict.CONTRADICTED
    assert stage.steps.settle(outcome).verdict is Verdict.CONTRADICTED

    assert stage.kinds_of_events(run_id).count("outcome.contradicted") == 1
    assert stage.runs.run(run_id).has_contradiction
    assert step(stage, run_id).result == "paid"


def test_a_write_that_was_ruled_out_and_happened_is_not_made_again(stage: Stage) -> None:
    """The word was wrong: that is raised, and the outcome is the step's result all the same."""
    run_id = stage.unknown()
    ruled(stage, run_id, Decision.DID_NOT_HAPPEN)

    settled = stage.steps.settle(write_of(stage, run_id, PLAIN, owner="late"))

    assert settled.verdict is Verdict.CONTRADICTED
    run = stage.runs.run(run_id)
    assert run.has_contradiction and run.status is RunStatus.FAILED and run.dead_letter is not None
    assert (step(stage, run_id).state, step(stage, run_id).result) == (StepState.COMPLETED, "paid")


def test_a_refusal_agrees_with_a_ruling_that_nothing_happened(stage: Stage) -> None:
    """Both say the same, and the step stays open for its replay."""
    run_id = stage.unknown()
    ruled(stage, run_id, Decision.DID_NOT_HAPPEN)
    outcome = write_of(stage, run_id, PLAIN, "card declined", is_error=True, owner="late")
    assert stage.steps.settle(outcome).verdict is Verdict.AGREED
    assert step(stage, run_id).state is StepState.DEAD_LETTERED


@pytest.mark.parametrize(("effect", "verdict"), [(KEYED, Verdict.AGREED), (PLAIN, Verdict.CONTRADICTED)])
def test_a_late_outcome_beside_a_newer_fence_does_not_disturb_it(
    stage: Stage, effect: ToolEffect, verdict: Verdict
) -> None:
    """The newer attempt's keyed write is the same write; a plain one is a second write, and people must know."""
    run_id = stage.fenced(effect, is_callable=effect is KEYED)
    outcome = write_of(stage, run_id, effect, owner="late")
    stage.steps.settle(settlement(stage, run_id, requeued(), effect=effect, fence_id=run_id))
    newer = fence_request(stage.ref(run_id, FIRST_CALL), effect=effect)
    assert stage.steps.fence(newer) is FenceVerdict.STAMPED

    assert stage.steps.settle(outcome).verdict is verdict

    run = stage.runs.run(run_id)
    assert run.pending_effect is not None and run.pending_effect.id == newer.id
    assert run.has_contradiction == (verdict is Verdict.CONTRADICTED)


@pytest.mark.parametrize(
    ("effect", "result", "verdict"),
    [
        (KEYED, "paid", Verdict.AGREED),
        (KEYED, "paid differently", Verdict.CONTRADICTED),
        (PLAIN, "paid", Verdict.CONTRADICTED),
    ],
)
def test_a_late_outcome_is_compared_with_a_newer_attempt_s(
    stage: Stage, effect: ToolEffect, result: str, verdict: Verdict
) -> None:
    """The same key gives the same result; two calls of a plain write are one too many, whatever they returned."""
    run_id = stage.fenced(effect, is_callable=effect is KEYED)
    outcome = write_of(stage, run_id, effect, result, owner="late")
    stage.steps.settle(settlement(stage, run_id, requeued(), effect=effect, fence_id=run_id))
    newer = fence_request(stage.ref(run_id, FIRST_CALL), effect=effect)
    assert stage.steps.fence(newer) is FenceVerdict.STAMPED
    done = settlement(stage, run_id, Recorded(result="paid", then=Join()), effect=effect, fence_id=newer.id)
    assert stage.steps.settle(done).verdict is Verdict.APPLIED

    assert stage.steps.settle(outcome).verdict is verdict
    assert step(stage, run_id).result == "paid"


# --- What the database refuses --------------------------------------------------------------------------------------


def test_a_refused_audit_event_lets_nothing_else_through(own_stage: Stage) -> None:
    """No run goes on over a write that the audit log doesn't hold; and no tool is called without its fence's event."""
    asked, fenced, read = own_stage.asked(PLAIN), own_stage.fenced(), own_stage.asked(READ)
    before = [own_stage.runs.run(run_id) for run_id in (asked, fenced, read)]
    recorded = settlement(own_stage, read, Recorded(result=1, then=Join()))
    with own_stage.database.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE events RENAME TO kept_events")

    with pytest.raises(AuditRefusedError):
        own_stage.steps.fence(fence_request(own_stage.ref(asked, FIRST_CALL)))
    with pytest.raises(AuditRefusedError):
        own_stage.steps.settle(write_of(own_stage, fenced, PLAIN))
    with pytest.raises(AuditRefusedError):
        own_stage.steps.settle(recorded)
    assert [own_stage.runs.run(run_id) for run_id in (asked, fenced, read)] == before

    settled = own_stage.steps.settle(replace(recorded, with_events=False))
    assert settled.verdict is Verdict.APPLIED
    assert own_stage.runs.run(read).events_lost == 1
    stop = settlement(own_stage, fenced, stopped(outcome_unknown=True), effect=PLAIN, fence_id=fenced)
    assert own_stage.steps.settle(replace(stop, with_events=False)).verdict is Verdict.APPLIED
    with own_stage.database.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE kept_events RENAME TO events")


def test_what_one_database_can_not_keep_neither_keeps(stage: Stage) -> None:
    """NUL, NaN and halves of surrogates come from tools and models; the run must not hang on them."""
    run_id = stage.asked(READ)
    result: Json = {"a\0b": [float("nan"), float("inf"), "x\0y", "\ud800", "é"]}
    assert (
        stage.steps.settle(settlement(stage, run_id, Recorded(result=result, then=Join()))).verdict is Verdict.APPLIED
    )
    mark = "\N{REPLACEMENT CHARACTER}"
    assert step(stage, run_id).result == {f"a{mark}b": [None, None, f"x{mark}y", mark, "é"]}


def test_a_result_that_is_not_json_is_refused_and_changes_nothing(stage: Stage) -> None:
    """The caller can settle with a notice instead."""
    run_id = stage.asked(READ)
    before = stage.runs.run(run_id)
    with pytest.raises(StoreRefusedError):
        stage.steps.settle(settlement(stage, run_id, Recorded(result=object(), then=Join())))  # type: ignore[arg-type]
    assert stage.runs.run(run_id) == before


def test_a_five_megabyte_result_is_kept(stage: Stage) -> None:
    """It never travels in a message, and comes back as it was."""
    run_id = stage.asked(READ)
    result = "0123456789" * 500_000
    assert stage.complete(run_id, FIRST_CALL, result).verdict is Verdict.APPLIED
    assert step(stage, run_id).result == result


# --- Beat -----------------------------------------------------------------------------------------------------------


def test_a_beat_shows_a_queued_run_as_running_and_tells_of_a_cancel(stage: Stage) -> None:
    """A long first turn is work, not a queue; and a cancel needs no message."""
    run_id = stage.queued()
    ref = stage.ref(run_id, 1)
    assert not stage.steps.beat(ref)
    assert (stage.runs.status(run_id), stage.runs.run(run_id).started_at is not None) == (RunStatus.RUNNING, True)
    stage.runs.cancel(run_id, actor="ann", reason="test")
    assert stage.steps.beat(ref)
    assert stage.runs.status(run_id) is RunStatus.CANCELLED
    assert not stage.steps.beat(replace(ref, run_id="none"))
