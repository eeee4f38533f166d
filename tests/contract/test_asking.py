"""A person has the probe asked about an unknown write: more of the contract of `DecisionStore`."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from agentq.domain.decisions import Asking, Ruling
from agentq.domain.errors import AlreadyDecidedError, NotFoundError, RefusedError
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, Decision, RunMode, RunStatus, StepRef, StepState
from agentq.domain.outcomes import Join, Recorded, Retried, Stopped
from agentq.domain.probes import ProbeVerdict
from agentq.ports.steps import FenceRequest, FenceVerdict, NextProbe, ProbeWord, Settled, Settlement, Verdict
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage


def ask(stage: Stage, run_id: str, *, actor: str = "ann") -> None:
    stage.decisions.resolve_by_probe(run_id, actor=actor, reason="the provider is back")


def answered(stage: Stage, run_id: str, change: Recorded | Retried | Stopped, verdict: ProbeVerdict) -> Settled:
    """What comes of it when the probe that is asked now says that."""
    loaded = stage.steps.load(stage.ref(run_id, FIRST_CALL))
    assert loaded is not None and loaded.fence is not None
    word = ProbeWord(verdict=verdict, looked_after=loaded.loaded_at, looked_before=loaded.loaded_at)
    return stage.steps.settle(
        Settlement(
            ref=loaded.step.ref, owner="prober", effect=loaded.fence.effect, change=change, fence_id=run_id, probe=word
        )
    )


def told(stage: Stage, run_id: str, *kinds: str) -> list[tuple[str, str, dict[str, Any]]]:
    events = [event for event in stage.runs.events(run_id) if event.kind in kinds]
    return [(event.kind, event.actor, dict(event.data)) for event in events]


done = Recorded(result="paid", then=Join())
again = Retried(charge=Charge.CRASH, error="nothing happened")
unknown = Stopped(
    reason=DeadLetterReason.NOT_RETRYABLE, failure_class=FailureClass.UNKNOWN, error="can't tell", outcome_unknown=True
)


def test_the_step_is_due_as_a_question_under_the_same_fence(stage: Stage) -> None:
    """Whoever gets it finds the fence and asks; nobody may call, and the budget of questions is new."""
    run_id = stage.unknown(PLAIN, has_probe=True, others=(READ,))
    stage.change_run(run_id, pending_effect_probes=8)
    before = stage.runs.run(run_id)

    ask(stage, run_id)

    run = stage.runs.run(run_id)
    assert (run.status, run.dead_letter, run.finished_at, run.error) == (RunStatus.RUNNING, None, None, None)
    assert before.pending_effect is not None
    assert run.pending_effect == replace(before.pending_effect, probes=0)
    assert [step.state for step in run.steps[1:]] == [StepState.AVAILABLE, StepState.WAITING]
    assert [wakeup.ref for wakeup in stage.keeping.take_due(10, first_steps=False)] == [stage.ref(run_id, FIRST_CALL)]
    loaded = stage.steps.load(stage.ref(run_id, FIRST_CALL))
    assert loaded is not None and loaded.fence == run.pending_effect
    request = FenceRequest(
        ref=stage.ref(run_id, FIRST_CALL),
        id="another",
        owner="host/boot/2-2/x",
        tool="pay",
        effect=PLAIN,
        deadline_seconds=30,
        settles_within_seconds=0,
    )
    assert stage.steps.fence(request) is FenceVerdict.FENCE_STANDS


def test_who_wanted_it_and_why_is_in_the_audit_log(stage: Stage) -> None:
    """As with every decision."""
    run_id = stage.unknown(PLAIN, has_probe=True)
    ask(stage, run_id)
    data = {"fence": run_id, "tool": "pay", "reason": "the provider is back"}
    assert told(stage, run_id, "probe.requested") == [("probe.requested", "ann", data)]
    assert told(stage, run_id, "dead_letter.withdrawn") == [("dead_letter.withdrawn", "ann", {})]


def test_when_it_happened_the_run_goes_on_with_the_result(stage: Stage) -> None:
    """No replay is needed."""
    run_id = stage.unknown(PLAIN, has_probe=True, others=(READ,))
    ask(stage, run_id)
    settled = answered(stage, run_id, done, ProbeVerdict.HAPPENED)
    assert (settled.verdict, [wakeup.ref.number for wakeup in settled.wakeups]) == (Verdict.APPLIED, [FIRST_CALL + 1])
    step = stage.runs.run(run_id).steps[1]
    assert (step.result, step.ruling, step.ruled_by) == ("paid", Decision.HAPPENED, "probe")


def test_when_it_did_not_happen_the_write_is_made_again(stage: Stage) -> None:
    """By a new attempt, under a fence of its own."""
    run_id = stage.unknown(PLAIN, has_probe=True)
    ask(stage, run_id)
    settled = answered(stage, run_id, again, ProbeVerdict.DID_NOT_HAPPEN)
    assert [wakeup.ref for wakeup in settled.wakeups] == [StepRef(run_id=run_id, number=FIRST_CALL, attempt=2)]
    assert stage.runs.run(run_id).pending_effect is None


def test_did_not_happen_is_still_not_believed_too_early(stage: Stage) -> None:
    """A person's wish to ask shortens no deadline."""
    run_id = stage.unknown(PLAIN, has_probe=True, deadline_seconds=30)
    ask(stage, run_id)
    assert answered(stage, run_id, again, ProbeVerdict.DID_NOT_HAPPEN).verdict is Verdict.REFUSED
    assert stage.runs.run(run_id).pending_effect is not None


def test_when_it_can_t_tell_the_run_is_a_dead_letter_again_and_can_be_asked_again(stage: Stage) -> None:
    """A person decides, or waits and asks once more."""
    run_id = stage.unknown(PLAIN, has_probe=True, others=(READ,))
    for _ in range(2):
        ask(stage, run_id)
        assert answered(stage, run_id, unknown, ProbeVerdict.CANT_TELL).verdict is Verdict.APPLIED
        run = stage.runs.run(run_id)
        assert run.dead_letter is not None and run.dead_letter.outcome_unknown and run.pending_effect is not None
        assert [step.state for step in run.steps[1:]] == [StepState.DEAD_LETTERED, StepState.CLOSED]
    ruling = Ruling(decision=Decision.HAPPENED, result="paid")
    stage.decisions.resolve(run_id, ruling, actor="ann", reason="seen")


@pytest.mark.parametrize("effect", [PLAIN, KEYED])
@pytest.mark.parametrize(
    ("change", "verdict"), [(done, ProbeVerdict.HAPPENED), (again, ProbeVerdict.DID_NOT_HAPPEN)], ids=str
)
def test_a_cancelled_run_s_write_may_be_asked_about_and_it_ends_cancelled(
    stage: Stage, effect: Any, change: Recorded | Retried, verdict: ProbeVerdict
) -> None:
    """The cancel only waited for the write."""
    run_id = stage.unknown(effect, has_probe=True, is_cancelled=True, others=(READ,))
    ask(stage, run_id)
    assert answered(stage, run_id, change, verdict).wakeups == ()
    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect, run.dead_letter) == (RunStatus.CANCELLED, None, None)


def test_how_the_call_failed_is_kept_for_what_is_charged(stage: Stage) -> None:
    """Its worker lived and told the class, which its probe's silence must not turn into a crash."""
    run_id = stage.fenced(PLAIN, deadline_seconds=-60, has_probe=True)
    reset = replace(unknown, failure_class=FailureClass.CONNECTION, error="ConnectionResetError: reset")
    stage.settle(run_id, FIRST_CALL, reset, fence_id=run_id)
    ask(stage, run_id)
    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None
    assert (fence.failure_class, fence.error) == (FailureClass.CONNECTION, "ConnectionResetError: reset")


def test_an_outcome_that_comes_while_the_probe_is_asked_is_the_result(stage: Stage) -> None:
    """Its worker was only slow; what the probe says then agrees."""
    run_id = stage.unknown(PLAIN, has_probe=True)
    ask(stage, run_id)
    stage.complete(run_id, FIRST_CALL, "paid", fence_id=run_id)
    now = datetime.now(UTC)
    found = Settlement(
        ref=stage.ref(run_id, FIRST_CALL),
        owner="prober",
        effect=PLAIN,
        change=done,
        fence_id=run_id,
        probe=ProbeWord(verdict=ProbeVerdict.HAPPENED, looked_after=now, looked_before=now),
    )
    assert stage.steps.settle(found).verdict is Verdict.AGREED
    assert not stage.runs.run(run_id).has_contradiction


def test_not_called_is_an_answer_too_while_the_probe_is_asked(stage: Stage) -> None:
    """Whoever stamped the fence takes it back: the attempt runs at last."""
    run_id = stage.unknown(PLAIN, has_probe=True)
    ask(stage, run_id)
    assert stage.steps.take_back(stage.ref(run_id, FIRST_CALL), run_id, "host/boot/1-1/x")
    assert stage.runs.run(run_id).pending_effect is None
    assert [wakeup.ref for wakeup in stage.keeping.take_due(10, first_steps=False)] == [stage.ref(run_id, FIRST_CALL)]


def refusing(stage: Stage, name: str) -> str:
    """A run that nothing is asked about, for that reason."""
    scenes: dict[str, Callable[[], str]] = {
        "no write is in doubt": lambda: stage.failed(READ),
        "no write of run": lambda: stage.asked(READ),
        "had no probe when step 2": lambda: stage.unknown(PLAIN),
        "still being executed": lambda: stage.fenced(PLAIN, has_probe=True),
        "was driven by its caller": lambda: lost_interactive(stage),
        "ann decided at": lambda: decided(stage),
        "ann discarded it at": lambda: discarded(stage),
        "is being asked about step 2": lambda: asked(stage),
    }
    return scenes[name]()


def lost_interactive(stage: Stage) -> str:
    run_id = stage.fenced(PLAIN, mode=RunMode.INTERACTIVE, deadline_seconds=-1, has_probe=True)
    assert stage.keeping.fail_interactive(run_id, error="the caller is lost")
    return run_id


def decided(stage: Stage) -> str:
    run_id = stage.unknown(PLAIN, has_probe=True)
    ruling = Ruling(decision=Decision.DID_NOT_HAPPEN)
    stage.decisions.resolve(run_id, ruling, actor="ann", reason="looked")
    return run_id


def discarded(stage: Stage) -> str:
    run_id = stage.unknown(PLAIN, has_probe=True)
    stage.decisions.discard(run_id, actor="ann", reason="gone")
    return run_id


def asked(stage: Stage) -> str:
    run_id = stage.unknown(PLAIN, has_probe=True)
    ask(stage, run_id)
    return run_id


@pytest.mark.parametrize(
    ("told_why", "error"),
    [
        ("no write is in doubt", AlreadyDecidedError),
        ("no write of run", AlreadyDecidedError),
        ("had no probe when step 2", RefusedError),
        ("still being executed", RefusedError),
        ("was driven by its caller", RefusedError),
        ("ann decided at", AlreadyDecidedError),
        ("ann discarded it at", AlreadyDecidedError),
        ("is being asked about step 2", AlreadyDecidedError),
    ],
)
@pytest.mark.parametrize("among_many", [False, True])
def test_what_can_t_be_asked_is_refused_and_nothing_changes(
    stage: Stage, told_why: str, error: type[RefusedError], among_many: bool
) -> None:
    """The refusal says why, or who was first, and is in the audit log with who wanted it."""
    run_id = refusing(stage, told_why)
    before = stage.runs.run(run_id)
    pattern = told_why.replace("no write is in doubt", "no write of run")
    if among_many:
        (one,) = stage.decisions.decide_many([run_id], Asking(), actor="bob", reason="me too")
        assert isinstance(one.refusal, error) and pattern in str(one.refusal)
    else:
        with pytest.raises(error, match=pattern):
            ask(stage, run_id, actor="bob")
    assert stage.runs.run(run_id) == before
    [(_, actor, data)] = told(stage, run_id, "decision.refused")
    assert (actor, data["asked"]) == ("bob", "by_probe")


def test_whoever_decides_while_it_is_asked_is_told_so(stage: Stage) -> None:
    """One word at a time: the probe's comes in seconds."""
    run_id = asked(stage)
    with pytest.raises(AlreadyDecidedError, match=r"is being asked about step 2 .*: ann wanted it at"):
        stage.decisions.resolve(
            run_id, Ruling(decision=Decision.HAPPENED, result="paid"), actor="bob", reason="I know it"
        )


def test_a_run_that_isn_t_there_can_t_be_asked_about(stage: Stage) -> None:
    """A mistyped id changes nothing."""
    with pytest.raises(NotFoundError, match="'nowhere'"):
        ask(stage, "nowhere")


def test_a_rehearsal_asks_nothing(stage: Stage) -> None:
    """The same code, taken back."""
    run_id = stage.unknown(PLAIN, has_probe=True)
    before = stage.runs.run(run_id)
    (one,) = stage.decisions.decide_many([run_id], Asking(), actor="ann", reason="x", is_rehearsal=True)
    assert (one.refusal, one.wakeups, stage.runs.run(run_id)) == (None, (), before)


def test_a_question_that_waits_is_not_for_the_keeper_s_next_step(stage: Stage) -> None:
    """Asked again later, it is due later, and counted from nothing."""
    run_id = asked(stage)
    request = NextProbe(
        ref=stage.ref(run_id, FIRST_CALL),
        fence_id=run_id,
        owner="prober",
        verdict=ProbeVerdict.NOT_YET,
        wait_seconds=60,
        waits_for_fence=False,
    )
    assert stage.steps.ask_again(request)
    fence = stage.runs.run(run_id).pending_effect
    assert fence is not None and fence.probes == 1
    assert stage.keeping.take_due(10, first_steps=False) == []
