"""Dead letters and what people decide about them: the contract of `DecisionStore`."""

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.decisions import Ruling
from agentq.domain.errors import (
    AgentqError,
    AlreadyDecidedError,
    DecisionRequiredError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    TooEarlyError,
)
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, Decision, Fence, RunMode, RunStatus, StepKind, StepRef, StepState
from agentq.domain.outcomes import Join, Recorded
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import NewRun, RunFilter
from agentq.ports.steps import FenceRequest, FenceVerdict, Settlement, Verdict
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage
from tests.support.waiting import eventually

MINUTE = timedelta(minutes=1)


def happened(result: Any = "paid") -> Ruling:
    return Ruling(decision=Decision.HAPPENED, result=result)


def did_not_happen(looked_at: datetime | None = None) -> Ruling:
    return Ruling(decision=Decision.DID_NOT_HAPPEN, looked_at=looked_at)


def resolve(stage: Stage, run_id: str, ruling: Ruling, *, actor: str = "ann") -> None:
    stage.decisions.resolve(run_id, ruling, actor=actor, reason="asked the payment service")


def replay(stage: Stage, run_id: str, *, actor: str = "ann") -> tuple[Wakeup, ...]:
    return stage.decisions.replay(run_id, actor=actor, reason="fixed the service")


def fence_of(stage: Stage, run_id: str) -> Fence:
    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None
    return fence


def refused(stage: Stage, run_id: str) -> list[dict[str, Any]]:
    return [event.data for event in stage.runs.events(run_id) if event.kind == "decision.refused"]


# --- The list -------------------------------------------------------------------------------------------------------


def test_open_dead_letters_are_listed_contradictions_first(stage: Stage) -> None:
    """Where two answers about one write disagree, somebody has to look now."""
    contradicted = stage.contradicted()
    older, newer = stage.failed(READ), stage.unknown(PLAIN)
    stage.asked(READ)

    listed = stage.decisions.dead_letters(RunFilter())

    assert listed[0].run_id == contradicted
    assert {letter.run_id for letter in listed[1:]} == {older, newer}
    assert [letter.created_at for letter in listed[1:]] == sorted(
        (letter.created_at for letter in listed[1:]), reverse=True
    )
    assert stage.decisions.dead_letters(RunFilter(limit=1)) == listed[:1]


def test_filters_narrow_dead_letters(stage: Stage) -> None:
    """The same words as for runs."""
    failed, unknown = stage.failed(READ), stage.unknown(PLAIN)
    created_at = stage.decisions.dead_letters(RunFilter(tool="look"))[0].created_at
    listed = {
        "unknown": (RunFilter(outcome_unknown=True), {unknown}),
        "known": (RunFilter(outcome_unknown=False), {failed}),
        "tool": (RunFilter(tool="pay"), {unknown}),
        "reason": (RunFilter(reason=DeadLetterReason.RETRIES_EXHAUSTED), set()),
        "class": (RunFilter(failure_class=FailureClass.UNKNOWN), {failed, unknown}),
        "agent": (RunFilter(agent="sales"), set()),
        "status": (RunFilter(statuses=(RunStatus.FAILED,)), {failed, unknown}),
        "until": (RunFilter(until=created_at), set()),
        "since": (RunFilter(since=created_at), {failed, unknown}),
        "metadata": (RunFilter(metadata={"a": "b"}), set()),
    }
    for name, (filters, expected) in listed.items():
        assert {letter.run_id for letter in stage.decisions.dead_letters(filters)} == expected, name


# --- Resolving: it happened -----------------------------------------------------------------------------------------


def test_a_write_that_happened_is_recorded_and_the_run_waits_for_its_replay(stage: Stage) -> None:
    """The result is the person's word; nothing is called again, and nothing goes on by itself."""
    run_id = stage.unknown(PLAIN, others=(READ,))

    step = stage.decisions.resolve(run_id, happened({"id": 9}), actor="ann", reason="asked the payment service")

    assert (step.number, step.state, step.result) == (FIRST_CALL, StepState.COMPLETED, {"id": 9})
    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect) == (RunStatus.FAILED, None)
    (letter,) = stage.decisions.dead_letters(RunFilter())
    assert (letter.run_id, letter.outcome_unknown) == (run_id, False)
    told = stage.runs.events(run_id)[-1]
    assert (told.kind, told.actor, told.data["decision"]) == ("write.resolved", "ann", "happened")
    assert told.data["reason"] == "asked the payment service"


def test_it_happened_counts_at_any_time(stage: Stage) -> None:
    """What was seen stays true, however early one looked."""
    run_id = stage.unknown(PLAIN, deadline_seconds=3600, settles_within_seconds=None)
    resolve(stage, run_id, happened(None))
    assert stage.runs.run(run_id).steps[1].state is StepState.COMPLETED


def test_after_it_happened_the_replay_goes_on_behind_the_write(stage: Stage) -> None:
    """The recorded result is used: the write isn't made again."""
    run_id = stage.unknown(PLAIN, others=(READ,))
    resolve(stage, run_id, happened("paid"))

    (wakeup,) = replay(stage, run_id)
    assert wakeup.ref.number == FIRST_CALL + 1
    (turn,) = stage.complete(run_id, FIRST_CALL + 1).wakeups
    loaded = stage.steps.load(turn.ref)
    assert loaded is not None
    assert [item.result for item in loaded.history[1:]] == ['"paid"', '"ok"']


# --- Resolving: it did not happen -----------------------------------------------------------------------------------


def test_a_write_that_did_not_happen_runs_again_as_a_new_attempt(stage: Stage) -> None:
    """By a replay, under a fence of its own."""
    run_id = stage.unknown(PLAIN)

    resolve(stage, run_id, did_not_happen())
    assert stage.runs.run(run_id).pending_effect is None
    (wakeup,) = replay(stage, run_id)

    assert wakeup.ref == StepRef(run_id=run_id, number=FIRST_CALL, attempt=2)
    request = FenceRequest(
        ref=wakeup.ref,
        id="second",
        owner="host/boot/2-2/x",
        tool="pay",
        effect=PLAIN,
        deadline_seconds=30,
        settles_within_seconds=0,
    )
    assert stage.steps.fence(request) is FenceVerdict.STAMPED


@pytest.mark.parametrize(
    ("deadline_seconds", "settles_within_seconds"),
    [
        pytest.param(3600, 0, id="the call may be under way"),
        pytest.param(-1, 3600, id="the receiver may still be at it"),
    ],
)
def test_it_did_not_happen_is_refused_too_early(
    stage: Stage, deadline_seconds: float, settles_within_seconds: float
) -> None:
    """The request may land after the look: believed, it would be made twice."""
    run_id = stage.unknown(PLAIN, deadline_seconds=deadline_seconds, settles_within_seconds=settles_within_seconds)
    fence = fence_of(stage, run_id)

    with pytest.raises(TooEarlyError, match="look again") as raised:
        resolve(stage, run_id, did_not_happen())

    assert raised.value.not_before == fence.deadline_at + timedelta(seconds=settles_within_seconds)
    assert fence_of(stage, run_id) == fence
    assert [each["asked"] for each in refused(stage, run_id)] == ["did_not_happen"]


def test_an_early_look_answered_late_is_refused(stage: Stage) -> None:
    """The look counts, not the answer: between the two the request may have landed."""
    run_id = stage.unknown(PLAIN, deadline_seconds=-60, settles_within_seconds=10)
    not_before = fence_of(stage, run_id).deadline_at + timedelta(seconds=10)

    for looked_at in (not_before, not_before - timedelta(seconds=1)):
        with pytest.raises(TooEarlyError) as raised:
            resolve(stage, run_id, did_not_happen(looked_at))
        assert raised.value.not_before == not_before

    resolve(stage, run_id, did_not_happen(not_before + timedelta(seconds=1)))
    assert stage.runs.run(run_id).pending_effect is None


def test_a_look_that_is_to_come_is_refused(stage: Stage) -> None:
    """By the database's time: a wrong clock must not make an early look late."""
    run_id = stage.unknown(PLAIN)
    with pytest.raises(InvalidInputError, match="which is to come"):
        resolve(stage, run_id, did_not_happen(datetime.now(UTC) + 60 * MINUTE))
    assert stage.runs.run(run_id).pending_effect is not None


def test_without_settles_within_a_look_after_the_deadline_counts(stage: Stage) -> None:
    """Nobody declared how long the receiver may act: then whoever looks says that it is over."""
    run_id = stage.unknown(PLAIN, deadline_seconds=-60, settles_within_seconds=None)
    deadline_at = fence_of(stage, run_id).deadline_at

    with pytest.raises(TooEarlyError):
        resolve(stage, run_id, did_not_happen(deadline_at - timedelta(seconds=1)))

    resolve(stage, run_id, did_not_happen(deadline_at + timedelta(seconds=30)))
    assert stage.runs.run(run_id).pending_effect is None


def test_waiting_makes_it_late_enough(stage: Stage) -> None:
    """The same answer, refused before, is taken after the time it named."""
    run_id = stage.unknown(PLAIN, deadline_seconds=60)
    with pytest.raises(TooEarlyError):
        resolve(stage, run_id, did_not_happen())
    stage.age_fence(run_id, 2 * MINUTE)
    resolve(stage, run_id, did_not_happen())


# --- Resolving: who may not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [happened(), did_not_happen()])
@pytest.mark.parametrize("second", [happened(), did_not_happen()])
def test_the_second_decision_is_told_who_was_first(stage: Stage, first: Ruling, second: Ruling) -> None:
    """The first decision stands, whatever the second says."""
    run_id = stage.unknown(PLAIN)
    resolve(stage, run_id, first, actor="ann")

    with pytest.raises(AlreadyDecidedError, match=r"ann decided at \d{4}-") as raised:
        resolve(stage, run_id, second, actor="bob")

    assert first.decision.value.replace("_", " ") in str(raised.value)
    assert [event.actor for event in stage.runs.events(run_id) if event.kind == "decision.refused"] == ["bob"]


def test_without_a_doubt_there_is_nothing_to_resolve(stage: Stage) -> None:
    """A read that failed, a run that goes on without a write: nothing is in doubt."""
    for run_id in (stage.failed(READ), stage.asked(READ)):
        with pytest.raises(AlreadyDecidedError, match="no write of run"):
            resolve(stage, run_id, happened())


def test_a_write_in_flight_is_not_for_people_yet(stage: Stage) -> None:
    """Its worker may be about to settle; it is listed as soon as that worker is known to be gone."""
    run_id = stage.fenced(PLAIN)
    with pytest.raises(RefusedError, match="still being executed"):
        resolve(stage, run_id, happened())
    stage.complete(run_id, FIRST_CALL, fence_id=run_id)


def test_what_isn_t_there_can_t_be_decided(stage: Stage) -> None:
    """A mistyped id changes nothing."""
    with pytest.raises(NotFoundError, match="'nowhere'"):
        resolve(stage, "nowhere", happened())
    with pytest.raises(NotFoundError, match="'nowhere'"):
        replay(stage, "nowhere")


@pytest.mark.parametrize("ruling", [happened(), did_not_happen()])
def test_a_cancelled_run_s_write_can_be_resolved_and_the_run_not_resumed(stage: Stage, ruling: Ruling) -> None:
    """The cancel only waited for the write: resolved, the run is cancelled and leaves the list."""
    run_id = stage.unknown(PLAIN, is_cancelled=True, others=(READ,))
    with pytest.raises(RefusedError, match="cancelled"):
        replay(stage, run_id)

    resolve(stage, run_id, ruling)

    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect, run.dead_letter) == (RunStatus.CANCELLED, None, None)
    assert stage.decisions.dead_letters(RunFilter()) == []
    with pytest.raises(RefusedError, match="cancelled"):
        replay(stage, run_id)


def test_a_late_outcome_after_a_wrong_word_is_raised(stage: Stage) -> None:
    """Somebody said that it did not happen, and then the worker comes back: it did. Its result is kept, and the
    disagreement is first in the list."""
    run_id = stage.unknown(PLAIN)
    resolve(stage, run_id, did_not_happen())
    late = Settlement(
        ref=StepRef(run_id=run_id, number=FIRST_CALL, attempt=1),
        owner="host/boot/1-1/x",
        effect=PLAIN,
        change=Recorded(result="paid", then=Join()),
        fence_id=run_id,
    )

    assert stage.steps.settle(late).verdict is Verdict.CONTRADICTED
    assert stage.decisions.dead_letters(RunFilter())[0].run_id == run_id
    (wakeup,) = replay(stage, run_id)
    assert wakeup.kind is StepKind.MODEL  # The recorded write isn't made again.


# --- Replaying ------------------------------------------------------------------------------------------------------


def test_a_replay_resumes_at_the_step_that_failed(stage: Stage) -> None:
    """Completed steps keep their results; what failed and what its end closed opens as new attempts, in order."""
    run_id = stage.asked(READ, READ, PLAIN, READ)
    stage.complete(run_id, FIRST_CALL, "kept")
    stage.stop(run_id, FIRST_CALL + 1)

    (wakeup,) = replay(stage, run_id)

    assert wakeup == Wakeup(
        ref=StepRef(run_id=run_id, number=3, attempt=2),
        agent="support",
        kind=StepKind.TOOL,
        tool="look",
        effect=READ,
    )
    run = stage.runs.run(run_id)
    assert (run.status, run.finished_at, run.error, run.dead_letter) == (RunStatus.RUNNING, None, None, None)
    assert [(step.state, step.attempt) for step in run.steps] == [
        (StepState.COMPLETED, 1),
        (StepState.COMPLETED, 1),
        (StepState.AVAILABLE, 2),
        (StepState.WAITING, 2),
        (StepState.WAITING, 2),
    ]
    assert run.steps[1].result == "kept"
    assert [w.ref.number for w in stage.complete(run_id, 3).wakeups] == [4]
    assert [w.ref.number for w in stage.complete(run_id, 4).wakeups] == [5]
    assert [w.kind for w in stage.complete(run_id, 5).wakeups] == [StepKind.MODEL]


def test_reads_that_ran_beside_the_failed_one_run_again_with_it(stage: Stage) -> None:
    """They share its batch, and the join waits for all of them."""
    run_id = stage.asked(READ, READ, READ)
    stage.stop(run_id, 3)
    assert [wakeup.ref.number for wakeup in replay(stage, run_id)] == [2, 3, 4]
    assert stage.complete(run_id, 2).wakeups == ()
    assert stage.complete(run_id, 4).wakeups == ()
    assert [wakeup.kind for wakeup in stage.complete(run_id, 3).wakeups] == [StepKind.MODEL]


def test_a_failed_turn_runs_again(stage: Stage) -> None:
    """Also the very first, of a run that never was running."""
    run_id = stage.queued()
    stage.stop(run_id, 1)
    (wakeup,) = replay(stage, run_id)
    assert wakeup.ref == StepRef(run_id=run_id, number=1, attempt=2)
    assert stage.steps.load(wakeup.ref) is not None
    assert stage.answer(run_id, 1).run_status is RunStatus.COMPLETED


def test_budgets_start_anew(stage: Stage) -> None:
    """A person has mended what used them up."""
    run_id = stage.asked(READ)
    stage.change_step(
        run_id, FIRST_CALL, tries=3, crashes=2, throttled_since=datetime.now(UTC), is_isolated=True, republished=4
    )
    stage.stop(run_id, FIRST_CALL)

    (wakeup,) = replay(stage, run_id)

    step = stage.runs.run(run_id).steps[1]
    assert (step.tries, step.crashes, step.throttled_since, wakeup.is_isolated) == (0, 0, None, False)
    assert [flying.republished for flying in stage.keeping.in_flight(after=None, limit=9)] == [0]


def test_a_replay_is_told_with_who_and_why(stage: Stage) -> None:
    """The dead letter is closed, and the audit log holds the decision."""
    run_id = stage.failed(READ)
    replay(stage, run_id, actor="ann")
    told = stage.runs.events(run_id)[-1]
    assert (told.kind, told.actor, told.data) == (
        "run.replayed",
        "ann",
        {"reason": "fixed the service", "opened": [FIRST_CALL]},
    )
    assert stage.decisions.dead_letters(RunFilter()) == []


def test_a_replayed_run_can_fail_and_be_replayed_again(stage: Stage) -> None:
    """Each dead letter is its own."""
    run_id = stage.failed(READ)
    replay(stage, run_id)
    stage.stop(run_id, FIRST_CALL)
    (wakeup,) = replay(stage, run_id)
    assert wakeup.ref.attempt == 3


def test_a_write_in_doubt_needs_a_decision_first(stage: Stage) -> None:
    """Running it again might be doing it twice."""
    run_id = stage.unknown(PLAIN)

    with pytest.raises(DecisionRequiredError, match="'pay' of step 2"):
        replay(stage, run_id)

    assert stage.runs.run(run_id).status is RunStatus.FAILED
    assert [each["asked"] for each in refused(stage, run_id)] == ["replay"]


def test_the_second_replay_is_told_who_was_first(stage: Stage) -> None:
    """A double click is one replay."""
    run_id = stage.failed(READ)
    replay(stage, run_id, actor="ann")
    before = stage.runs.run(run_id)

    with pytest.raises(AlreadyDecidedError, match=r"ann replayed it at \d{4}-"):
        replay(stage, run_id, actor="bob")

    assert stage.runs.run(run_id) == before


def test_only_a_failed_run_can_be_replayed(stage: Stage) -> None:
    """One that goes on, or has its answer, has nothing to run again."""
    done = stage.queued()
    stage.answer(done, 1)
    for run_id in (done, stage.asked(READ)):
        with pytest.raises(AlreadyDecidedError, match="only a failed run can be replayed"):
            replay(stage, run_id)


def test_a_refused_run_is_enqueued_anew_not_replayed(stage: Stage) -> None:
    """It never ran, and its reason still holds."""
    stage.runs.add([NewRun(id="a", agent="nobody", input="", error="unknown agent 'nobody'")])
    with pytest.raises(RefusedError, match="unknown agent 'nobody'"):
        replay(stage, "a")


def test_a_lost_caller_s_run_is_replayed_by_workers(stage: Stage) -> None:
    """Its caller doesn't come back: from then on it is a queued run."""
    run_id = stage.asked(READ, mode=RunMode.INTERACTIVE)
    stage.keeping.fail_interactive(run_id, error="its caller is gone")

    (wakeup,) = replay(stage, run_id)

    assert wakeup.ref == StepRef(run_id=run_id, number=FIRST_CALL, attempt=2)
    run = stage.runs.run(run_id)
    assert (run.mode, run.status) == (RunMode.QUEUED, RunStatus.RUNNING)
    assert [flying.wakeup for flying in stage.keeping.in_flight(after=None, limit=9)] == [wakeup]


def test_a_keyed_write_in_doubt_is_decided_like_a_plain_one(stage: Stage) -> None:
    """Nobody requeued it while its run was active; a person's word is needed now."""
    run_id = stage.fenced(KEYED, mode=RunMode.INTERACTIVE, deadline_seconds=-60)
    stage.keeping.fail_interactive(run_id, error="its caller is gone")
    with pytest.raises(DecisionRequiredError):
        replay(stage, run_id)
    resolve(stage, run_id, did_not_happen())
    assert [wakeup.ref.attempt for wakeup in replay(stage, run_id)] == [2]


# --- At the same moment ---------------------------------------------------------------------------------------------


def both_at_once(stage: Stage, run_id: str, decide: Any) -> tuple[list[Any], list[AgentqError]]:
    """Two decisions, both under way before either may go on: what was decided, and what was refused."""
    with ThreadPoolExecutor(2) as pool:
        with stage.database.locked(run_id):
            both: list[Future[Any]] = [pool.submit(decide, actor) for actor in ("ann", "bob")]
            eventually(lambda: waiters(stage) == len(both), what="both wait for the run's row")
        errors = [decision.exception(30) for decision in both]
        decided = [each.result() for each, error in zip(both, errors, strict=True) if error is None]
    return decided, [error for error in errors if isinstance(error, AgentqError)]


def waiters(stage: Stage) -> int:
    """How many statements wait for a lock."""
    with stage.database.reading() as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        found: int = connection.execute(text(asked)).scalar_one()
        return found


def test_of_two_replays_at_the_same_moment_one_wins(postgresql_stage: Stage) -> None:
    """Two operators: one replay, and the other is told who was first."""
    stage = postgresql_stage
    run_id = stage.failed(READ)

    decided, errors = both_at_once(stage, run_id, lambda actor: replay(stage, run_id, actor=actor))

    assert [len(wakeups) for wakeups in decided] == [1]
    (error,) = errors
    assert isinstance(error, AlreadyDecidedError)
    assert any(name in str(error) for name in ("ann replayed", "bob replayed"))
    assert stage.kinds_of_events(run_id).count("run.replayed") == 1
    assert stage.runs.run(run_id).steps[1].attempt == 2


def test_of_two_answers_at_the_same_moment_one_wins(postgresql_stage: Stage) -> None:
    """One result, and a refusal that names the other."""
    stage = postgresql_stage
    run_id = stage.unknown(PLAIN)

    decided, errors = both_at_once(stage, run_id, lambda actor: resolve(stage, run_id, happened(actor), actor=actor))

    assert len(decided) == 1
    assert [type(error) for error in errors] == [AlreadyDecidedError]
    assert stage.kinds_of_events(run_id).count("write.resolved") == 1


@pytest.mark.parametrize("is_settle_first", [True, False])
def test_a_settle_and_a_person_s_answer_at_the_same_moment_agree_on_one(
    postgresql_stage: Stage, is_settle_first: bool
) -> None:
    """The worker comes back just as a person says what happened: whoever comes second finds the first one's answer."""
    stage = postgresql_stage
    run_id = stage.unknown(PLAIN)
    late = Settlement(
        ref=StepRef(run_id=run_id, number=FIRST_CALL, attempt=1),
        owner="host/boot/1-1/x",
        effect=PLAIN,
        change=Recorded(result="paid", then=Join()),
        fence_id=run_id,
    )
    general = SqlStepStore(stage.database, always_general=True)  # The other path asks for the lock twice.
    moves = [lambda: general.settle(late).verdict, lambda: resolve(stage, run_id, happened("paid"))]
    first, second = moves if is_settle_first else moves[::-1]

    with ThreadPoolExecutor(2) as pool:
        with stage.database.locked(run_id):
            one = pool.submit(first)
            eventually(lambda: waiters(stage) == 1, what="the first waits for the run's row")
            other = pool.submit(second)
            eventually(lambda: waiters(stage) == 2, what="both wait for the run's row")
        errors = [each.exception(30) for each in (one, other)]

    run = stage.runs.run(run_id)
    assert run.steps[1].result == "paid"
    assert (run.pending_effect, run.has_contradiction) == (None, False)
    if is_settle_first:
        assert one.result() is Verdict.LATE
        assert isinstance(errors[1], AlreadyDecidedError)
    else:
        assert other.result() is Verdict.AGREED
        assert run.status is RunStatus.FAILED  # Until a person replays it.
