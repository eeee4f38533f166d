"""A probe's word, and an outcome that comes when a person was called for: more of the contract of `StepStore`."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from agentq.adapters.sql.schema import dead_letters
from agentq.domain.failures import FailureClass
from agentq.domain.model import RunMode, RunStatus
from agentq.domain.outcomes import Join, Recorded, Retried, Stopped
from agentq.domain.probes import ProbeVerdict
from agentq.ports.steps import FenceVerdict, Loaded, NextProbe, ProbeWord, Settlement, Verdict
from tests.contract.test_step_store import (
    PATHS,
    fence_request,
    numbers,
    opened,
    requeued,
    settlement,
    step,
    stopped,
    write_of,
)
from tests.support.stage import FIRST_CALL, PLAIN, Stage
from tests.support.waiting import eventually


@pytest.fixture(params=PATHS, scope="module")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from opened(request.param, tmp_path_factory.mktemp("stage"))


def asked_about(stage: Stage, *, deadline_seconds: float, settles_within_seconds: float | None = 0.0) -> str:
    """A run with a plain write in flight whose tool has a probe; its fence's id is the run's."""
    run_id = stage.asked(PLAIN)
    request = fence_request(
        stage.ref(run_id, FIRST_CALL),
        id=run_id,
        deadline_seconds=deadline_seconds,
        settles_within_seconds=settles_within_seconds,
        has_probe=True,
    )
    assert stage.steps.fence(request) is FenceVerdict.STAMPED
    return run_id


def loaded(stage: Stage, run_id: str) -> Loaded:
    found = stage.steps.load(stage.ref(run_id, FIRST_CALL))
    assert found is not None
    return found


def by_probe(stage: Stage, run_id: str, change: Recorded | Retried | Stopped, verdict: ProbeVerdict) -> Settlement:
    """What follows when a probe says that, asked by a delivery that reads the step now."""
    at = loaded(stage, run_id).loaded_at
    word = ProbeWord(verdict=verdict, looked_after=at, looked_before=at)
    return settlement(stage, run_id, change, effect=PLAIN, fence_id=run_id, owner="prober", probe=word)


def answers(stage: Stage, run_id: str) -> list[str]:
    return [event.data["answer"] for event in stage.runs.events(run_id) if event.kind == "probe.answered"]


def again(stage: Stage, run_id: str, **fields: Any) -> NextProbe:
    values: dict[str, Any] = {
        "fence_id": run_id,
        "owner": "prober",
        "verdict": ProbeVerdict.NOT_YET,
        "wait_seconds": 0.0,
        "waits_for_fence": False,
    }
    return NextProbe(ref=stage.ref(run_id, FIRST_CALL), **{**values, **fields})


def test_a_probe_s_happened_is_the_result_at_any_time(stage: Stage) -> None:
    """Who looks and finds it can't have looked too early. The caller's own outcome agrees with it later."""
    run_id = asked_about(stage, deadline_seconds=30)
    found = by_probe(stage, run_id, Recorded(result="found", then=Join()), ProbeVerdict.HAPPENED)
    settled = stage.steps.settle(found)
    assert (settled.verdict, numbers(settled.wakeups)) == (Verdict.APPLIED, [FIRST_CALL + 1])
    assert stage.steps.settle(found).verdict is Verdict.ALREADY
    assert (step(stage, run_id).result, answers(stage, run_id)) == ("found", ["happened"])
    assert stage.steps.settle(write_of(stage, run_id, PLAIN, "in other words", owner="late")).verdict is Verdict.AGREED
    refused = write_of(stage, run_id, PLAIN, "refused", owner="later", is_error=True)
    assert stage.steps.settle(refused).verdict is Verdict.CONTRADICTED


def test_a_probe_that_finds_what_its_caller_recorded_agrees(stage: Stage) -> None:
    """The caller was only slow: two answers about one call, and the same one."""
    run_id = asked_about(stage, deadline_seconds=30)
    found = by_probe(stage, run_id, Recorded(result="found", then=Join()), ProbeVerdict.HAPPENED)
    stage.steps.settle(write_of(stage, run_id, PLAIN))
    assert stage.steps.settle(found).verdict is Verdict.AGREED
    assert not stage.runs.run(run_id).has_contradiction


def test_a_probe_s_happened_heals_a_dead_letter(stage: Stage) -> None:
    """It was shown as unknown while the probe looked."""
    run_id = asked_about(stage, deadline_seconds=30)
    found = by_probe(stage, run_id, Recorded(result="found", then=Join()), ProbeVerdict.HAPPENED)
    stage.stop(run_id, FIRST_CALL, outcome_unknown=True, fence_id=run_id)
    assert stage.steps.settle(found).verdict is Verdict.LATE
    assert stage.runs.run(run_id).status is RunStatus.RUNNING


@pytest.mark.parametrize(("deadline_seconds", "settles_within_seconds"), [(30, 0.0), (-5, 10.0), (-5, None)])
@pytest.mark.parametrize("change", [requeued(), stopped()])
def test_a_probe_s_did_not_happen_is_refused_when_it_looked_too_early(
    stage: Stage, change: Retried | Stopped, deadline_seconds: float, settles_within_seconds: float | None
) -> None:
    """The request may still be under way; of a tool that doesn't say for how long, nobody but a person can tell."""
    run_id = asked_about(stage, deadline_seconds=deadline_seconds, settles_within_seconds=settles_within_seconds)
    settled = stage.steps.settle(by_probe(stage, run_id, change, ProbeVerdict.DID_NOT_HAPPEN))
    assert settled.verdict is Verdict.REFUSED
    assert (stage.runs.run(run_id).pending_effect is not None, answers(stage, run_id)) == (True, [])


def test_an_early_look_that_is_answered_late_is_refused_too(stage: Stage) -> None:
    """What landed after the look was not seen by it."""
    run_id = asked_about(stage, deadline_seconds=0.3)
    early = by_probe(stage, run_id, requeued(), ProbeVerdict.DID_NOT_HAPPEN)
    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None
    settles_at = fence.deadline_at  # Its receiver does nothing after that.
    eventually(lambda: loaded(stage, run_id).loaded_at > settles_at, what="its time is over")
    assert stage.steps.settle(early).verdict is Verdict.REFUSED


def test_a_probe_s_did_not_happen_requeues_the_write_when_its_time_is_over(stage: Stage) -> None:
    """Nothing came of it, and nothing will. If something did, the lie is found and raised."""
    run_id = asked_about(stage, deadline_seconds=-5)
    late = write_of(stage, run_id, PLAIN, owner="late")
    settled = stage.steps.settle(by_probe(stage, run_id, requeued(), ProbeVerdict.DID_NOT_HAPPEN))
    assert (settled.verdict, [wakeup.ref.attempt for wakeup in settled.wakeups]) == (Verdict.APPLIED, [2])
    assert (stage.runs.run(run_id).pending_effect, answers(stage, run_id)) == (None, ["did_not_happen"])
    assert stage.steps.settle(late).verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize(
    ("looked_seconds_after_stamp", "verdict"), [(-0.001, Verdict.CONTRADICTED), (0.001, Verdict.AGREED)]
)
def test_a_probe_that_may_have_seen_the_newer_call_contradicts_nobody(
    stage: Stage, looked_seconds_after_stamp: float, verdict: Verdict, is_settled: bool
) -> None:
    """It was asked of the first attempt, and slept before it looked. What it saw before the second could call is the
    first's; what it saw later may be the second's, which has the same key."""
    run_id = asked_about(stage, deadline_seconds=-5)
    found = by_probe(stage, run_id, Recorded(result="found", then=Join()), ProbeVerdict.HAPPENED)
    stage.steps.settle(by_probe(stage, run_id, requeued(), ProbeVerdict.DID_NOT_HAPPEN))
    second = replace(stage.ref(run_id, FIRST_CALL), attempt=2)
    assert stage.steps.fence(fence_request(second, id=f"{run_id}/2", has_probe=True)) is FenceVerdict.STAMPED
    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None and found.probe is not None
    if is_settled:
        stage.steps.settle(replace(write_of(stage, run_id, PLAIN), ref=second, fence_id=fence.id))
    looked_before = fence.stamped_at + timedelta(seconds=looked_seconds_after_stamp)
    late = replace(found, owner="sleeper", probe=replace(found.probe, looked_before=looked_before))
    assert stage.steps.settle(late).verdict is verdict
    assert stage.runs.run(run_id).has_contradiction is (verdict is Verdict.CONTRADICTED)


def test_a_probe_s_did_not_happen_cancels_a_run_that_waited_for_it(stage: Stage) -> None:
    """A cancelled run is not taken up again."""
    run_id = asked_about(stage, deadline_seconds=-5)
    stage.runs.cancel(run_id, actor="ann", reason="wrong customer")
    stage.steps.settle(by_probe(stage, run_id, requeued(), ProbeVerdict.DID_NOT_HAPPEN))
    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect, run.steps[1].may_have_happened) == (RunStatus.CANCELLED, None, False)


def test_a_probe_is_asked_again_when_its_answer_may_count(stage: Stage) -> None:
    """The step is due then, under the same fence and attempt, and the question is counted."""
    run_id = asked_about(stage, deadline_seconds=20, settles_within_seconds=5.0)
    failure = {"failure_class": FailureClass.CONNECTION, "error": "reset"}
    assert stage.steps.ask_again(again(stage, run_id, waits_for_fence=True, **failure))
    run = stage.runs.run(run_id)
    fence, due_at = run.pending_effect, run.steps[1].due_at
    assert fence is not None and fence.settled_at is not None and due_at is not None
    assert timedelta() < due_at - fence.settled_at < timedelta(seconds=1)
    assert (fence.probes, fence.failure_class, fence.error) == (1, FailureClass.CONNECTION, "reset")
    assert stage.steps.load(stage.ref(run_id, FIRST_CALL)) is None
    assert answers(stage, run_id) == ["not_yet"]


def test_a_question_that_is_due_is_dispatched_as_a_delivery_of_its_step(stage: Stage) -> None:
    """Whoever gets it finds the fence, and asks."""
    run_id = asked_about(stage, deadline_seconds=20)
    assert stage.steps.ask_again(again(stage, run_id))
    assert run_id in [wakeup.ref.run_id for wakeup in stage.keeping.take_due(500, first_steps=False)]
    found = loaded(stage, run_id)
    assert (found.fence and found.fence.id, found.step.attempt) == (run_id, 1)


def test_nothing_is_asked_about_another_fence_or_attempt(stage: Stage) -> None:
    """A question that comes late must not delay a step that has gone on."""
    run_id = asked_about(stage, deadline_seconds=20)
    request = again(stage, run_id)
    assert not stage.steps.ask_again(replace(request, fence_id="another"))
    assert not stage.steps.ask_again(replace(request, ref=replace(request.ref, attempt=2)))
    assert not stage.steps.ask_again(replace(request, ref=replace(request.ref, run_id="none")))
    stage.steps.settle(write_of(stage, run_id, PLAIN))
    assert not stage.steps.ask_again(request)


def test_the_keeper_s_question_is_counted_and_dispatched_at_once(stage: Stage) -> None:
    """The step was dispatched already, to whoever died over it; its next delivery asks."""
    run_id = asked_about(stage, deadline_seconds=20)
    before = stage.runs.run(run_id).steps[1].dispatched_at
    wakeup = stage.keeping.ask_probe(stage.ref(run_id, FIRST_CALL), run_id)
    run = stage.runs.run(run_id)
    assert wakeup is not None and (wakeup.ref, wakeup.agent) == (stage.ref(run_id, FIRST_CALL), "support")
    assert run.pending_effect is not None and run.pending_effect.probes == 1
    dispatched_at = run.steps[1].dispatched_at
    assert before is not None and dispatched_at is not None and dispatched_at > before


def test_the_keeper_asks_nothing_about_what_has_moved_on(stage: Stage) -> None:
    """What it read may be old."""
    run_id = asked_about(stage, deadline_seconds=20)
    ref = stage.ref(run_id, FIRST_CALL)
    assert stage.keeping.ask_probe(ref, "another") is None
    assert stage.keeping.ask_probe(replace(ref, attempt=2), run_id) is None
    stage.steps.settle(write_of(stage, run_id, PLAIN))
    assert stage.keeping.ask_probe(ref, run_id) is None
    plain = stage.fenced()
    assert stage.keeping.ask_probe(stage.ref(plain, FIRST_CALL), plain) is None


# --- Outcomes that come when somebody was called for ----------------------------------------------------------------


def test_an_outcome_that_comes_after_an_hour_is_left_to_the_person(stage: Stage) -> None:
    """It is recorded, and nothing is in doubt any more; but somebody may be at work on it, so the run doesn't move."""
    run_id = stage.unknown()
    with stage.database.writing() as connection:
        long_ago = datetime.now(UTC) - timedelta(hours=1, seconds=5)
        connection.execute(update(dead_letters).where(dead_letters.c.run_id == run_id).values(created_at=long_ago))
    settled = stage.steps.settle(write_of(stage, run_id, PLAIN, owner="healer"))
    assert (settled.verdict, settled.wakeups, settled.run_status) == (Verdict.LATE, (), RunStatus.FAILED)
    run = stage.runs.run(run_id)
    assert run.dead_letter is not None and not run.dead_letter.outcome_unknown
    assert (run.pending_effect, run.steps[1].result) == (None, "paid")
    assert numbers(stage.decisions.replay(run_id, actor="ann", reason="it is known")) == [FIRST_CALL + 1]


def test_an_outcome_of_an_interactive_run_whose_caller_is_lost_is_left_to_the_person(stage: Stage) -> None:
    """Nobody drives it any more."""
    run_id = stage.fenced(mode=RunMode.INTERACTIVE, deadline_seconds=-1)
    assert stage.keeping.fail_interactive(run_id, error="the caller is lost")
    settled = stage.steps.settle(write_of(stage, run_id, PLAIN, owner="healer"))
    assert (settled.verdict, settled.run_status) == (Verdict.LATE, RunStatus.FAILED)
    letter = stage.runs.run(run_id).dead_letter
    assert letter is not None and not letter.outcome_unknown
