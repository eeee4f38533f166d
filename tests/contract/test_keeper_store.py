"""What the keeper reads and marks: the contract of `KeeperStore`."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import delete, text

from agentq.adapters.sql.change import Change
from agentq.adapters.sql.schema import steps
from agentq.domain.model import Charge, RunMode, RunStatus, StepKind, StepRef, StepState
from agentq.domain.outcomes import Retried
from agentq.ports.dispatch import Wakeup
from agentq.ports.keeping import InFlight
from agentq.ports.runs import NewRun, RunFilter
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage
from tests.support.waiting import eventually

HOUR_SECONDS = 3600


def waiting(stage: Stage, *, agent: str = "support") -> str:
    """A new run whose first step the broker had no room for."""
    run_id = stage.queued(agent=agent)
    stage.runs.undispatch([StepRef(run_id=run_id, number=1, attempt=1)])
    return run_id


def retried(stage: Stage, *, due_in_seconds: float) -> str:
    """A run whose first step is requeued for later."""
    run_id = stage.queued()
    stage.settle(run_id, 1, Retried(charge=Charge.TRY, error="429", due_in_seconds=due_in_seconds))
    return run_id


def in_flight(stage: Stage, run_id: str) -> list[InFlight]:
    return [step for step in stage.keeping.in_flight(after=None, limit=100) if step.wakeup.ref.run_id == run_id]


def run_ids(wakeups: list[Wakeup]) -> list[str]:
    return [wakeup.ref.run_id for wakeup in wakeups]


# --- What is due ----------------------------------------------------------------------------------------------------


def test_due_steps_are_handed_out_once(stage: Stage) -> None:
    """Marked as dispatched by the transaction that hands them out: the next pass has others to publish."""
    run_id = waiting(stage)

    (taken,) = stage.keeping.take_due(10, first_steps=True)

    assert taken == Wakeup(ref=StepRef(run_id=run_id, number=1, attempt=1), agent="support", kind=StepKind.MODEL)
    assert stage.runs.run(run_id).steps[0].dispatched_at is not None
    assert stage.keeping.take_due(10, first_steps=True) == []


def test_the_oldest_are_first_and_the_limit_holds(stage: Stage) -> None:
    """New runs start in the order they came, as many as the broker has room for."""
    first, second, third = (waiting(stage) for _ in range(3))
    for age_seconds, run_id in ((3, first), (2, second), (1, third)):
        due_at = stage.runs.run(run_id).created_at - timedelta(seconds=age_seconds)
        stage.change_step(run_id, 1, due_at=due_at)

    assert run_ids(stage.keeping.take_due(2, first_steps=True)) == [first, second]
    assert run_ids(stage.keeping.take_due(2, first_steps=True)) == [third]


def test_steps_of_going_runs_are_asked_for_apart_from_new_runs(stage: Stage) -> None:
    """A retry goes out however long the queue of new runs is."""
    new = waiting(stage)
    again = retried(stage, due_in_seconds=0.001)
    stage.change_step(again, 1, dispatched_at=None, due_at=stage.runs.run(again).created_at)

    (taken,) = stage.keeping.take_due(10, first_steps=False)
    assert taken.ref == StepRef(run_id=again, number=1, attempt=2)
    assert run_ids(stage.keeping.take_due(10, first_steps=True)) == [new]


def test_what_is_not_due_waits(stage: Stage) -> None:
    """A retry is a row with a time; no message waits for it."""
    retried(stage, due_in_seconds=HOUR_SECONDS)
    assert stage.keeping.take_due(10, first_steps=False) == []


def test_a_cancelled_run_is_not_dispatched(stage: Stage) -> None:
    """Nothing revives it."""
    run_id = waiting(stage)
    stage.runs.cancel(run_id, actor="ann", reason="")
    assert stage.keeping.take_due(10, first_steps=True) == []


def test_a_wakeup_says_what_routing_needs(stage: Stage) -> None:
    """The dispatcher picks queue and time limit from it, without a look at the database."""
    run_id = stage.asked(PLAIN)
    stage.change_step(run_id, FIRST_CALL, dispatched_at=None, deadline_seconds=7.5, is_isolated=True)
    (taken,) = stage.keeping.take_due(10, first_steps=False)
    assert taken == Wakeup(
        ref=StepRef(run_id=run_id, number=FIRST_CALL, attempt=1),
        agent="support",
        kind=StepKind.TOOL,
        tool="pay",
        effect=PLAIN,
        deadline_seconds=7.5,
        is_isolated=True,
    )


def test_two_dispatchers_at_once_take_each_step_once(postgresql_stage: Stage) -> None:
    """Two keepers may both think that they lead."""
    stage = postgresql_stage
    expected = {waiting(stage) for _ in range(60)}
    start = threading.Barrier(3)

    def take() -> list[str]:
        start.wait(10)
        taken: list[str] = []
        while batch := stage.keeping.take_due(7, first_steps=True):
            taken += run_ids(batch)
        return taken

    with ThreadPoolExecutor(3) as pool:
        everything = [run_id for taker in [pool.submit(take) for _ in range(3)] for run_id in taker.result(30)]
    everything += run_ids(stage.keeping.take_due(100, first_steps=True))  # What was locked at every look.

    assert sorted(everything) == sorted(expected)


@contextmanager
def held(stage: Stage, run_id: str) -> Iterator[None]:
    """Somebody else is in the middle of a change of that run."""
    with stage.database.locked(run_id):
        yield


def test_a_run_that_is_being_changed_does_not_hold_up_the_others(postgresql_stage: Stage) -> None:
    """It is passed over and taken at the next pass."""
    stage = postgresql_stage
    busy, free = waiting(stage), waiting(stage)

    with held(stage, busy):
        assert run_ids(stage.keeping.take_due(10, first_steps=True)) == [free]
    assert run_ids(stage.keeping.take_due(10, first_steps=True)) == [busy]


def test_taking_waits_for_nobody_and_nobody_takes_over_a_cancel(postgresql_stage: Stage) -> None:
    """A cancel that is held before its COMMIT: the step isn't handed out, neither then nor after it."""
    stage = postgresql_stage
    run_id = waiting(stage)
    with stage.database.locked(run_id) as (connection, row):
        assert row is not None
        change = Change(connection, row, actor="ann")
        change.cancel()
        change.write()
        assert stage.keeping.take_due(10, first_steps=True) == []
    assert stage.keeping.take_due(10, first_steps=True) == []


# --- What is in flight ----------------------------------------------------------------------------------------------


def test_a_dispatched_step_is_in_flight_until_it_is_settled(stage: Stage) -> None:
    """That is the set the reaper judges."""
    run_id = stage.queued()
    (step,) = in_flight(stage, run_id)
    assert step.wakeup.ref == StepRef(run_id=run_id, number=1, attempt=1)
    assert (step.crashes, step.republished, step.is_cancelled, step.fence) == (0, 0, False, None)
    assert 0 <= step.dispatched_seconds < 60

    stage.answer(run_id, 1)
    assert in_flight(stage, run_id) == []


def test_undispatched_steps_interactive_runs_and_ended_runs_are_not_in_flight(stage: Stage) -> None:
    """A million queued rows are not in flight, and a lost caller's run is judged as a whole."""
    waiting(stage)
    stage.queued(mode=RunMode.INTERACTIVE)
    stage.unknown(PLAIN)
    assert stage.keeping.in_flight(after=None, limit=100) == []


@pytest.mark.parametrize(
    ("deadline_seconds", "settles_within_seconds", "expected"),
    [
        pytest.param(HOUR_SECONDS, 0, (False, False), id="its call may be under way"),
        pytest.param(-1, 0, (True, True), id="its call has ended, and the receiver is done"),
        pytest.param(-1, HOUR_SECONDS, (True, False), id="the receiver may still be at it"),
        pytest.param(-HOUR_SECONDS, None, (True, False), id="nobody can say when the receiver is done"),
    ],
)
def test_a_fence_is_judged_by_the_database_s_time(
    stage: Stage, deadline_seconds: float, settles_within_seconds: float | None, expected: tuple[bool, bool]
) -> None:
    """Clocks of workers and keepers differ; only durations cross from one to another."""
    run_id = stage.fenced(deadline_seconds=deadline_seconds, settles_within_seconds=settles_within_seconds)
    (step,) = in_flight(stage, run_id)
    assert step.fence is not None
    assert step.fence.id == run_id
    assert (step.fence_is_past_deadline, step.fence_is_settled) == expected


def test_a_cancel_that_waits_for_a_fence_is_shown(stage: Stage) -> None:
    """A keyed write is then judged like a plain one."""
    run_id = stage.fenced(KEYED)
    stage.runs.cancel(run_id, actor="ann", reason="")
    assert [step.is_cancelled for step in in_flight(stage, run_id)] == [True]


def test_a_fenced_step_that_was_undispatched_is_in_flight_after_the_next_dispatch(stage: Stage) -> None:
    """Its message got through although the broker seemed to be away, and its worker died over the fence."""
    run_id = stage.fenced(PLAIN)
    stage.runs.undispatch([stage.ref(run_id, FIRST_CALL)])
    stage.keeping.take_due(10, first_steps=False)
    assert [step.fence is not None for step in in_flight(stage, run_id)] == [True]


def test_in_flight_is_read_in_pages(stage: Stage) -> None:
    """The order is by run and number, so that a pass sees everything while steps come and go."""
    for _ in range(3):
        stage.asked(READ, READ)
    pages: list[StepRef] = []
    after = None
    while page := stage.keeping.in_flight(after=after, limit=4):
        pages += [step.wakeup.ref for step in page]
        after = pages[-1]
    assert len(pages) == len(set(pages)) == 6
    assert [(ref.run_id, ref.number) for ref in pages] == sorted((ref.run_id, ref.number) for ref in pages)


def test_a_lost_step_is_marked_as_published_again(stage: Stage) -> None:
    """The grace grows with each time, so that a slow queue isn't filled with copies."""
    run_id = stage.queued()
    (before,) = in_flight(stage, run_id)
    gone = StepRef(run_id=run_id, number=1, attempt=2)

    assert stage.keeping.mark_republished([before.wakeup.ref, gone]) == [before.wakeup.ref]

    (after,) = in_flight(stage, run_id)
    assert (before.republished, after.republished) == (0, 1)


def test_a_settled_step_is_not_published_again(stage: Stage) -> None:
    """What the keeper read is old by the time it acts."""
    run_id = stage.queued()
    (step,) = in_flight(stage, run_id)
    stage.answer(run_id, 1)
    assert stage.keeping.mark_republished([step.wakeup.ref]) == []


# --- Runs that stand still ------------------------------------------------------------------------------------------


def test_going_runs_don_t_stand_still(stage: Stage) -> None:
    """Queued, in flight, in backoff, under a fence, ended: none of them is an orphan."""
    waiting(stage)
    stage.asked(READ, PLAIN)
    retried(stage, due_in_seconds=HOUR_SECONDS)
    stage.fenced(PLAIN)
    stage.failed(READ)
    stage.queued(mode=RunMode.INTERACTIVE)
    assert stage.keeping.runs_without_open_step(10) == []


def lose_open_steps(stage: Stage, run_id: str) -> None:
    with stage.database.writing() as connection:
        is_open = (steps.c.run_id == run_id, steps.c.state == StepState.AVAILABLE.value)
        connection.execute(delete(steps).where(*is_open))


def test_a_queued_run_without_a_step_begins(stage: Stage) -> None:
    """A row that somebody put there by hand."""
    run_id = stage.queued()
    lose_open_steps(stage, run_id)
    assert stage.keeping.runs_without_open_step(10) == [run_id]

    (wakeup,) = stage.keeping.resume(run_id)

    assert wakeup == Wakeup(ref=StepRef(run_id=run_id, number=1, attempt=1), agent="support", kind=StepKind.MODEL)
    assert stage.keeping.runs_without_open_step(10) == []


def test_a_run_whose_batch_is_done_opens_the_next(stage: Stage) -> None:
    """The lowest batch that waits, whole, and the join counts anew."""
    run_id = stage.asked(PLAIN, READ, READ, PLAIN)
    stage.change_step(run_id, FIRST_CALL, state=StepState.COMPLETED.value, result='"paid"')
    stage.change_run(run_id, open_calls=0)

    wakeups = stage.keeping.resume(run_id)

    assert [wakeup.ref.number for wakeup in wakeups] == [3, 4]
    assert stage.kinds_of_events(run_id)[-1] == "run.resumed"
    assert stage.complete(run_id, 3).wakeups == ()
    assert [wakeup.ref.number for wakeup in stage.complete(run_id, 4).wakeups] == [5]


def test_a_run_whose_calls_are_done_takes_its_next_turn(stage: Stage) -> None:
    """The next model step, numbered after the last."""
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, state=StepState.COMPLETED.value, result='"ok"')

    (wakeup,) = stage.keeping.resume(run_id)

    assert (wakeup.ref.number, wakeup.kind) == (3, StepKind.MODEL)
    assert stage.answer(run_id, 3).run_status is RunStatus.COMPLETED


def test_a_run_that_has_its_answer_ends(stage: Stage) -> None:
    """Nothing is left to publish."""
    run_id = stage.asked(READ)
    with stage.database.writing() as connection:
        connection.execute(delete(steps).where(steps.c.run_id == run_id, steps.c.number == FIRST_CALL))
    stage.change_step(run_id, 1, result='{"role": "assistant", "content": "42"}')

    assert stage.keeping.resume(run_id) == ()
    run = stage.runs.run(run_id)
    assert (run.status, run.output) == (RunStatus.COMPLETED, "42")


def test_a_run_that_is_to_be_cancelled_is_cancelled_instead(stage: Stage) -> None:
    """Nothing revives it."""
    run_id = stage.asked(READ)
    lose_open_steps(stage, run_id)
    stage.change_run(run_id, cancel_requested=True)
    assert stage.keeping.resume(run_id) == ()
    assert stage.runs.status(run_id) is RunStatus.CANCELLED


def test_a_run_that_goes_on_meanwhile_is_left_alone(stage: Stage) -> None:
    """It is decided anew under the lock: what was read before it may be old."""
    going, ended, fenced = stage.asked(READ), stage.failed(READ), stage.fenced(PLAIN)
    before = [stage.runs.run(run_id) for run_id in (going, ended, fenced)]
    assert [stage.keeping.resume(run_id) for run_id in (going, ended, fenced, "nowhere")] == [()] * 4
    assert [stage.runs.run(run_id) for run_id in (going, ended, fenced)] == before


def test_two_keepers_resume_a_run_once(postgresql_stage: Stage) -> None:
    """One adds the next step, the other finds it open."""
    stage = postgresql_stage
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, state=StepState.COMPLETED.value, result='"ok"')
    with ThreadPoolExecutor(2) as pool:
        with held(stage, run_id):
            both = [pool.submit(stage.keeping.resume, run_id) for _ in range(2)]
            eventually(lambda: waiters(stage) == len(both), what="both wait for the run's row")
        opened = [wakeup for resumed in both for wakeup in resumed.result(30)]
    assert [wakeup.ref.number for wakeup in opened] == [3]


def waiters(stage: Stage) -> int:
    """How many statements wait for a lock."""
    with stage.database.reading() as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        found: int = connection.execute(text(asked)).scalar_one()
        return found


# --- Interactive runs -----------------------------------------------------------------------------------------------


def test_interactive_runs_are_listed_with_what_they_wait_for(stage: Stage) -> None:
    """The keeper asks for each whether its caller is alive."""
    fresh = stage.queued(mode=RunMode.INTERACTIVE)
    writing = stage.fenced(PLAIN, mode=RunMode.INTERACTIVE, deadline_seconds=-1)
    lost = stage.queued(mode=RunMode.INTERACTIVE)
    lose_open_steps(stage, lost)
    ended = stage.queued(mode=RunMode.INTERACTIVE)
    stage.answer(ended, 1)
    stage.queued()

    listed = {
        ref.run_id: (ref.number, fence and fence.id, past) for ref, fence, past in stage.keeping.interactive_runs()
    }

    assert listed == {
        fresh: (1, None, False),
        writing: (FIRST_CALL, writing, True),
        lost: (0, None, False),
    }


def test_a_lost_caller_s_run_fails(stage: Stage) -> None:
    """Nobody else may go on with it; without a write in doubt there is nothing to decide."""
    run_id = stage.asked(READ, PLAIN, mode=RunMode.INTERACTIVE)

    assert stage.keeping.fail_interactive(run_id, error="its caller is gone")

    run = stage.runs.run(run_id)
    assert (run.status, run.error, run.dead_letter) == (RunStatus.FAILED, "its caller is gone", None)
    assert {step.state for step in run.steps} == {StepState.COMPLETED, StepState.CLOSED}
    assert stage.kinds_of_events(run_id)[-1] == "run.failed"


@pytest.mark.parametrize("effect", [PLAIN, KEYED])
def test_a_lost_caller_s_write_is_listed_like_a_dead_letter(stage: Stage, effect: object) -> None:
    """It is in doubt whoever drove the run."""
    run_id = stage.fenced(KEYED if effect is KEYED else PLAIN, mode=RunMode.INTERACTIVE)

    assert stage.keeping.fail_interactive(run_id, error="its caller is gone")

    run = stage.runs.run(run_id)
    assert run.status is RunStatus.FAILED
    assert run.pending_effect is not None
    assert run.steps[1].state is StepState.DEAD_LETTERED
    (dead_letter,) = stage.decisions.dead_letters(RunFilter(outcome_unknown=True))
    assert (dead_letter.run_id, dead_letter.number) == (run_id, FIRST_CALL)


def test_a_lost_caller_that_had_no_such_tool_left_no_doubt(stage: Stage) -> None:
    """The fence says that nothing could be called."""
    run_id = stage.fenced(PLAIN, mode=RunMode.INTERACTIVE, is_callable=False)
    stage.keeping.fail_interactive(run_id, error="its caller is gone")
    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect, run.dead_letter) == (RunStatus.FAILED, None, None)


def test_a_lost_caller_s_cancelled_write_is_listed_and_stays_cancelled(stage: Stage) -> None:
    """It can be resolved, not resumed."""
    run_id = stage.fenced(PLAIN, mode=RunMode.INTERACTIVE)
    stage.runs.cancel(run_id, actor="ann", reason="")
    assert stage.keeping.fail_interactive(run_id, error="its caller is gone")
    run = stage.runs.run(run_id)
    assert (run.status, run.cancel_requested) == (RunStatus.FAILED, True)
    assert run.dead_letter is not None


def test_only_open_interactive_runs_fail_for_their_caller(stage: Stage) -> None:
    """An ended run keeps its end; a queued run has no caller to lose."""
    ended, queued = stage.queued(mode=RunMode.INTERACTIVE), stage.queued()
    stage.answer(ended, 1)
    assert [stage.keeping.fail_interactive(run_id, error="") for run_id in (ended, queued, "nowhere")] == [False] * 3
    assert stage.runs.status(ended) is RunStatus.COMPLETED


# --- Agents ---------------------------------------------------------------------------------------------------------


def test_an_agent_is_seen_again(stage: Stage) -> None:
    """The newest worker's limits count."""
    stage.keeping.see_agents({"support": 100})
    stage.keeping.see_agents({"support": 200, "sales": 5})
    stage.keeping.see_agents({})
    assert {name: agent.input_bytes_max for name, agent in stage.runs.agents().items()} == {"support": 200, "sales": 5}


def test_workers_that_register_the_same_agents_at_once_both_succeed(stage: Stage) -> None:
    """A fleet starts at one moment."""
    names = {f"agent-{number}": number for number in range(20)}
    with ThreadPoolExecutor(2) as pool:
        backwards = dict(reversed(list(names.items())))
        for seen in [pool.submit(stage.keeping.see_agents, each) for each in (names, backwards)]:
            seen.result(30)
    assert set(stage.runs.agents()) == set(names)


def test_new_runs_of_many_agents_are_dispatched_alike(stage: Stage) -> None:
    """Whether a worker serves an agent is the workers' to say; the dispatcher publishes all."""
    stage.runs.add([NewRun(id=name, agent=name, input="") for name in ("sales", "support")])
    stage.runs.undispatch([StepRef(run_id=name, number=1, attempt=1) for name in ("sales", "support")])
    assert {wakeup.agent for wakeup in stage.keeping.take_due(10, first_steps=True)} == {"sales", "support"}
