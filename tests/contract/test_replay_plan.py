"""Plans, discards, copies and decisions about many: the rest of the contract of `DecisionStore`."""

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentq.domain.decisions import Discarding, Replaying, Ruling
from agentq.domain.errors import (
    AgentqError,
    AlreadyDecidedError,
    DecisionRequiredError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    StalePlanError,
)
from agentq.domain.failures import FailureClass
from agentq.domain.model import (
    DeadLetterReason,
    Decision,
    NewStep,
    RunStatus,
    StepKind,
    StepRef,
    StepState,
    Usage,
)
from agentq.domain.outcomes import Join, Recorded, Stopped, Turn
from agentq.domain.replay import Copying, Fate
from agentq.ports.runs import RunFilter
from agentq.ports.steps import FenceRequest, Settlement, Verdict
from tests.support.invariants import check_invariants
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage
from tests.support.waiting import eventually

HAPPENED = Ruling(decision=Decision.HAPPENED, result="paid")
DID_NOT_HAPPEN = Ruling(decision=Decision.DID_NOT_HAPPEN)


def fates(stage: Stage, run_id: str, copying: Copying | None = None) -> list[Fate]:
    return [step.fate for step in stage.decisions.replay_plan(run_id, copying).steps]


def discard(stage: Stage, run_id: str, *, actor: str = "ann") -> RunStatus:
    return stage.decisions.discard(run_id, actor=actor, reason="the customer left")


def replay(stage: Stage, run_id: str, *, digest: str | None = None, ruling: Ruling | None = None) -> list[StepRef]:
    wakeups = stage.decisions.replay(run_id, actor="ann", reason="mended", digest=digest, ruling=ruling)
    return [wakeup.ref for wakeup in wakeups]


def copy(stage: Stage, run_id: str, copying: Copying, *, digest: str | None = None) -> tuple[str, list[StepRef]]:
    new_run_id = uuid.uuid4().hex
    wakeups = stage.decisions.copy(run_id, new_run_id, copying, actor="ann", reason="once more", digest=digest)
    return new_run_id, [wakeup.ref for wakeup in wakeups]


def from_step(number: int, *repeat_writes: int) -> Copying:
    return Copying(from_step=number, repeat_writes=frozenset(repeat_writes))


def write(stage: Stage, run_id: str, number: int, *, result: str = "paid") -> None:
    """The write of that step is fenced, made, and settled."""
    ref, fence_id = stage.ref(run_id, number), uuid.uuid4().hex
    stage.steps.fence(
        FenceRequest(
            ref=ref,
            id=fence_id,
            owner="host/boot/1-1/w",
            tool="pay",
            effect=PLAIN,
            deadline_seconds=30,
            settles_within_seconds=0,
        )
    )
    stage.complete(run_id, number, result, fence_id=fence_id)


def finished(stage: Stage) -> str:
    """A completed run: a turn (1), two reads (2, 3), a write (4), a turn (5), a write (6), the answer (7)."""
    run_id = stage.asked(READ, READ, PLAIN)
    for number in (2, 3):
        stage.complete(run_id, number, f"read {number}")
    write(stage, run_id, 4)
    call = NewStep(kind=StepKind.TOOL, batch=1, tool="pay", call_id="call-9", effect=PLAIN)
    turn = Recorded(
        result={"role": "assistant", "content": None},
        then=Turn(calls=(call,)),
        usage=Usage(input_tokens=30, output_tokens=4),
    )
    stage.settle(run_id, 5, turn)
    write(stage, run_id, 6)
    stage.answer(run_id, 7)
    return run_id


# --- The plan -------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_becomes_of_each_step(stage: Stage) -> None:
    """What is recorded stays, the failed read runs again, and the write behind it was never called."""
    run_id = stage.asked(READ, READ, PLAIN, KEYED)
    stage.complete(run_id, 2)
    stage.stop(run_id, 3)

    plan = stage.decisions.replay_plan(run_id)

    assert [step.fate for step in plan.steps] == [
        Fate.RECORDED,
        Fate.RECORDED,
        Fate.READ,
        Fate.NOT_CALLED,
        Fate.NOT_CALLED,
    ]
    assert (plan.refusal, plan.agent, plan.dead_letter and plan.dead_letter.number) == (None, "support", 3)


def test_a_write_in_doubt_blocks_with_all_that_is_known_of_it(stage: Stage) -> None:
    """A person who decides needs what was called, when, and by whom."""
    run_id = stage.unknown(PLAIN)
    plan = stage.decisions.replay_plan(run_id)
    blocked = plan.steps[1]
    assert (blocked.fate, blocked.tool) == (Fate.BLOCKED, "pay")
    assert blocked.fence is not None and blocked.fence.owner == "host/boot/1-1/x"
    assert plan.refusal is not None and "whether 'pay' of step 2 happened is not known" in plan.refusal


@pytest.mark.parametrize(
    ("ruling", "fate"), [(HAPPENED, Fate.RECORDED), (DID_NOT_HAPPEN, Fate.DID_NOT_HAPPEN)], ids=str
)
def test_a_decision_changes_the_plan(stage: Stage, ruling: Ruling, fate: Fate) -> None:
    """And says whose word it goes by."""
    run_id = stage.unknown(PLAIN)
    before = stage.decisions.replay_plan(run_id)
    stage.decisions.resolve(run_id, ruling, actor="ann", reason="asked")
    after = stage.decisions.replay_plan(run_id)
    assert (after.steps[1].fate, after.steps[1].ruled_by, after.refusal) == (fate, "ann", None)
    assert after.digest != before.digest


def test_a_keyed_write_that_was_called_runs_again_with_its_key(stage: Stage) -> None:
    """Its receiver does it once, however often it is called."""
    run_id = stage.fenced(KEYED)
    stage.settle(
        run_id,
        FIRST_CALL,
        Stopped(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=FailureClass.SERVER_ERROR, error="503"),
        fence_id=run_id,
    )
    planned = stage.decisions.replay_plan(run_id).steps[1]
    assert (planned.fate, planned.may_have_happened) == (Fate.SAME_KEY, True)


def test_a_plan_can_be_read_again_and_changes_nothing(stage: Stage) -> None:
    """Looking is free; the same look is the same digest."""
    run_id = stage.unknown(PLAIN)
    before = stage.runs.run(run_id), stage.runs.events(run_id)
    assert stage.decisions.replay_plan(run_id) == stage.decisions.replay_plan(run_id)
    assert (stage.runs.run(run_id), stage.runs.events(run_id)) == before
    with pytest.raises(NotFoundError):
        stage.decisions.replay_plan("nowhere")


# --- Bound to a plan ------------------------------------------------------------------------------------------------


def test_a_replay_bound_to_its_plan_does_just_that(stage: Stage) -> None:
    """A refusal that was written down in between is no change of the world."""
    run_id = stage.failed(READ)
    digest = stage.decisions.replay_plan(run_id).digest
    with pytest.raises(StalePlanError):
        replay(stage, run_id, digest="0123456789abcdef")
    assert replay(stage, run_id, digest=digest) == [StepRef(run_id=run_id, number=FIRST_CALL, attempt=2)]


def test_a_replay_bound_to_an_old_plan_is_refused(stage: Stage) -> None:
    """What was read isn't what would be done: somebody replayed it, and it stopped elsewhere."""
    run_id = stage.asked(READ, PLAIN)
    stage.stop(run_id, FIRST_CALL)
    digest = stage.decisions.replay_plan(run_id).digest
    replay(stage, run_id)
    stage.complete(run_id, FIRST_CALL)
    stage.stop(run_id, FIRST_CALL + 1)
    before = stage.runs.run(run_id)

    with pytest.raises(StalePlanError, match="read that first"):
        replay(stage, run_id, digest=digest)

    assert stage.runs.run(run_id) == before
    assert stage.runs.events(run_id)[-1].kind == "decision.refused"


def test_a_decision_in_the_replay_is_bound_to_the_plan_as_well(stage: Stage) -> None:
    """Neither the word nor the replay is kept when the plan is old."""
    run_id = stage.unknown(PLAIN)
    digest = stage.decisions.replay_plan(run_id).digest
    with pytest.raises(StalePlanError):
        replay(stage, run_id, ruling=HAPPENED, digest="0" * 16)
    assert stage.runs.run(run_id).pending_effect is not None
    (ref,) = replay(stage, run_id, ruling=HAPPENED, digest=digest)
    assert ref.number == FIRST_CALL + 1


# --- Giving up ------------------------------------------------------------------------------------------------------


def test_a_discarded_run_leaves_the_list_and_stays_failed(stage: Stage) -> None:
    """Nobody has to look at it again, and nobody runs it by mistake."""
    run_id = stage.failed(READ)
    assert discard(stage, run_id) is RunStatus.FAILED
    assert stage.decisions.dead_letters(RunFilter()) == []
    with pytest.raises(AlreadyDecidedError, match="ann discarded it at"):
        replay(stage, run_id)
    told = stage.runs.events(run_id)[-2]
    assert (told.kind, told.actor, told.data) == ("dead_letter.discarded", "ann", {"reason": "the customer left"})


def test_an_unknown_write_that_is_given_up_stays_unknown(stage: Stage) -> None:
    """The fence blocks nothing any more; that nobody knows is written on the step and in the audit log."""
    run_id = stage.unknown(PLAIN)
    discard(stage, run_id)
    run = stage.runs.run(run_id)
    assert (run.pending_effect, run.steps[1].may_have_happened) == (None, True)
    given_up = next(event for event in stage.runs.events(run_id) if event.kind == "write.given_up")
    assert (given_up.number, given_up.data["fence"], given_up.data["tool"]) == (FIRST_CALL, run_id, "pay")
    check_invariants(stage.database)
    assert fates(stage, run_id)[1] is Fate.BLOCKED


def test_the_second_who_gives_up_is_told_who_was_first(stage: Stage) -> None:
    """Whatever they wanted to decide."""
    run_id = stage.unknown(PLAIN)
    discard(stage, run_id, actor="ann")
    for decide in (
        lambda: discard(stage, run_id, actor="bob"),
        lambda: stage.decisions.resolve(run_id, HAPPENED, actor="bob", reason=""),
        lambda: replay(stage, run_id),
    ):
        with pytest.raises(AlreadyDecidedError, match="ann discarded it at"):
            decide()


def test_what_is_no_dead_letter_can_t_be_given_up(stage: Stage) -> None:
    """A run that goes on is cancelled, not discarded."""
    with pytest.raises(RefusedError, match="running and no dead letter"):
        discard(stage, stage.asked(READ))
    with pytest.raises(NotFoundError):
        discard(stage, "nowhere")


def test_a_cancelled_run_whose_write_is_given_up_is_cancelled(stage: Stage) -> None:
    """The cancel only waited for the write; the doubt stays on its step."""
    run_id = stage.unknown(PLAIN, is_cancelled=True)
    assert discard(stage, run_id) is RunStatus.CANCELLED
    assert stage.runs.run(run_id).steps[1].may_have_happened
    assert stage.decisions.dead_letters(RunFilter()) == []


def test_a_late_outcome_of_a_given_up_write_is_kept_and_nothing_goes_on(stage: Stage) -> None:
    """No known outcome is dropped; but who gave the run up doesn't want it to run."""
    run_id = stage.unknown(PLAIN)
    discard(stage, run_id)
    assert settle_late(stage, run_id) is Verdict.LATE
    run = stage.runs.run(run_id)
    assert (run.status, run.steps[1].result, run.steps[1].may_have_happened) == (RunStatus.FAILED, "paid", False)
    assert (run.has_contradiction, run.dead_letter) == (False, None)


def settle_late(stage: Stage, run_id: str) -> Verdict:
    return stage.steps.settle(
        Settlement(
            ref=StepRef(run_id=run_id, number=FIRST_CALL, attempt=1),
            owner="host/boot/1-1/x",
            effect=PLAIN,
            change=Recorded(result="paid", then=Join()),
            fence_id=run_id,
        )
    ).verdict


# --- Copies ---------------------------------------------------------------------------------------------------------


def test_a_copy_begins_with_the_results_before_its_step(stage: Stage) -> None:
    """What was read and written before isn't done again; the old run stays as it was."""
    run_id = finished(stage)
    before = stage.runs.run(run_id)

    new_run_id, woken = copy(stage, run_id, from_step(7))

    assert woken == [StepRef(run_id=new_run_id, number=7, attempt=1)]
    new = stage.runs.run(new_run_id)
    assert (new.copied_from, new.copied_steps, new.status, new.input) == (run_id, 6, RunStatus.QUEUED, before.input)
    assert [step.result for step in new.steps[:6]] == [step.result for step in before.steps[:6]]
    assert [step.usage for step in new.steps[:6]] == [Usage()] * 6  # It spent none of them.
    loaded = stage.steps.load(woken[0])
    assert loaded is not None and len(loaded.history) == 6
    assert stage.runs.run(run_id) == before
    assert stage.answer(new_run_id, 7, "another answer").run_status is RunStatus.COMPLETED
    check_invariants(stage.database)


def test_a_copy_from_a_batch_does_the_rest_of_its_turn_again(stage: Stage) -> None:
    """With the same arguments and in the same order: the model isn't asked again for what it asked for."""
    run_id = stage.asked(READ, READ, PLAIN, READ)
    stage.stop(run_id, 2)
    new_run_id, woken = copy(stage, run_id, from_step(2))
    assert [ref.number for ref in woken] == [2, 3]
    steps = stage.runs.run(new_run_id).steps
    assert [(step.tool, step.call_id, step.state) for step in steps[3:]] == [
        ("pay", "call-2", StepState.WAITING),
        ("look", "call-3", StepState.WAITING),
    ]
    assert stage.complete(new_run_id, 2).wakeups == ()
    assert [wakeup.ref.number for wakeup in stage.complete(new_run_id, 3).wakeups] == [4]
    check_invariants(stage.database)


def test_a_whole_copy_begins_with_nothing(stage: Stage) -> None:
    """From step 1: the run as it was asked for, once more."""
    run_id = stage.failed(READ)
    new_run_id, woken = copy(stage, run_id, from_step(1))
    assert [step.state for step in stage.runs.run(new_run_id).steps] == [StepState.AVAILABLE]
    assert stage.steps.load(woken[0]) is not None


@pytest.mark.parametrize(
    ("number", "accepted", "missing"),
    [(7, (), ()), (6, (), (6,)), (5, (), (6,)), (4, (6,), (4,)), (4, (4,), (6,)), (1, (), (4, 6))],
)
def test_writes_at_or_after_the_step_are_accepted_by_name(
    stage: Stage, number: int, accepted: tuple[int, ...], missing: tuple[int, ...]
) -> None:
    """A copy makes them again with new keys, which no receiver can tell from a new wish."""
    run_id = finished(stage)
    if not missing:
        copy(stage, run_id, from_step(number, *accepted))
        return
    with pytest.raises(RefusedError) as refusal:
        copy(stage, run_id, from_step(number, *accepted))
    assert str(refusal.value).endswith(" ".join(f"--repeat-write {each}" for each in missing))
    plan = stage.decisions.replay_plan(run_id, from_step(number, *accepted))
    assert plan.refusal == str(refusal.value)
    new_run_id, _ = copy(stage, run_id, from_step(number, *accepted, *missing))
    told = stage.runs.events(new_run_id)[0]
    assert (told.actor, told.data["copied_from"]) == ("ann", run_id)
    assert told.data["repeat_writes"] == sorted({*accepted, *missing})


def test_a_plan_of_a_copy_says_what_happens_again(stage: Stage) -> None:
    """Before anybody accepts it."""
    run_id = finished(stage)
    plan = stage.decisions.replay_plan(run_id, from_step(4, 4, 6))
    assert [step.fate for step in plan.steps] == [
        *[Fate.RECORDED] * 3,
        Fate.NEW_KEY,
        Fate.DECIDED_ANEW,
        Fate.NEW_KEY,
        Fate.DECIDED_ANEW,
    ]
    assert [step.is_accepted for step in plan.steps] == [False, False, False, True, False, True, False]
    assert stage.decisions.replay_plan(run_id, from_step(5, 6)).tokens_again == 34


@pytest.mark.parametrize(
    ("copying", "told"),
    [
        (from_step(3), "begins at 2"),
        (from_step(8), "its steps are 1 to 7"),
        (from_step(0), "its steps are 1 to 7"),
        (from_step(7, 4), "step 4 of run .* is no write at or after step 7"),
        (from_step(2, 3, 4, 6), "step 3 of run .* is no write"),
    ],
)
def test_a_copy_begins_where_a_turn_or_a_batch_does(stage: Stage, copying: Copying, told: str) -> None:
    """What runs together can't be parted, and a name that is wrong accepts nothing."""
    run_id = finished(stage)
    for ask in (lambda: stage.decisions.replay_plan(run_id, copying), lambda: copy(stage, run_id, copying)):
        with pytest.raises(InvalidInputError, match=told):
            ask()
    assert len(stage.runs.runs(RunFilter())) == 1


def test_only_what_has_ended_and_is_recorded_is_copied(stage: Stage) -> None:
    """A run that goes on may still change what the copy began with."""
    with pytest.raises(RefusedError, match="once it has ended"):
        copy(stage, stage.asked(READ), from_step(1))
    run_id = stage.asked(READ, PLAIN)
    stage.stop(run_id, 2)
    with pytest.raises(RefusedError, match=r"step 2 .* has no recorded result"):
        copy(stage, run_id, from_step(3))


@pytest.mark.parametrize("decide", ["nobody", "discard", "did not happen"])
def test_a_write_in_doubt_is_accepted_by_name_too(stage: Stage, decide: str) -> None:
    """Also when the run was given up over it; not where somebody knows that it did not happen."""
    run_id = stage.unknown(PLAIN)
    if decide == "discard":
        discard(stage, run_id)
    if decide == "did not happen":
        stage.decisions.resolve(run_id, DID_NOT_HAPPEN, actor="ann", reason="asked")
        copy(stage, run_id, from_step(2))
        return
    with pytest.raises(RefusedError, match="--repeat-write 2"):
        copy(stage, run_id, from_step(2))
    copy(stage, run_id, from_step(2, 2))


def test_a_second_copy_needs_a_plan_that_shows_the_first(stage: Stage) -> None:
    """Two operators who copy one run would make its writes twice."""
    run_id = finished(stage)
    digest = stage.decisions.replay_plan(run_id, from_step(6, 6)).digest
    first, _ = copy(stage, run_id, from_step(6, 6), digest=digest)
    with pytest.raises(AlreadyDecidedError, match=f"ann copied run .* as run '{first}'"):
        copy(stage, run_id, from_step(6, 6))
    with pytest.raises(StalePlanError):
        copy(stage, run_id, from_step(6, 6), digest=digest)
    plan = stage.decisions.replay_plan(run_id, from_step(6, 6))
    assert [event.data["to"] for event in plan.copies] == [first]
    copy(stage, run_id, from_step(6, 6), digest=plan.digest)


# --- Groups and many ------------------------------------------------------------------------------------------------


def test_dead_letters_are_grouped_by_what_they_have_in_common(stage: Stage) -> None:
    """One line an outage: contradictions first, then the largest."""
    first, second, unknown = stage.failed(READ), stage.failed(READ), stage.unknown(PLAIN)
    groups = stage.decisions.dead_letter_groups(RunFilter())
    assert [(group.tool, group.count, group.unknown_count) for group in groups] == [("look", 2, 0), ("pay", 1, 1)]
    assert (groups[0].run_id, groups[0].error) == (second, "the tool raised")
    assert groups[0].oldest_at <= groups[0].newest_at
    stage.change_run(unknown, has_contradiction=True)
    assert [group.contradicted_count for group in stage.decisions.dead_letter_groups(RunFilter())] == [1, 0]
    chosen = RunFilter(tool="look", fingerprint=groups[0].fingerprint)
    assert {letter.run_id for letter in stage.decisions.dead_letters(chosen)} == {first, second}
    assert stage.decisions.count_dead_letters(chosen)[0] == 2
    assert [group.count for group in stage.decisions.dead_letter_groups(chosen)] == [2]


def test_pages_come_in_the_order_of_run_ids_without_what_came_later(stage: Stage) -> None:
    """So that a bulk ends, and what it replays and stops again isn't replayed for ever."""
    run_ids = sorted(stage.failed(READ) for _ in range(5))
    count, number_max = stage.decisions.count_dead_letters(RunFilter())
    later = stage.failed(READ)
    pages, after = [], ""
    while page := stage.decisions.page_of_dead_letters(RunFilter(), after=after, number_max=number_max, limit=2):
        after = page[-1]
        pages.append(page)
    assert (count, pages) == (5, [run_ids[:2], run_ids[2:4], run_ids[4:]])
    assert all(later not in page for page in pages)


def many_scenes(stage: Stage) -> dict[str, str]:
    """Runs in all the states that a bulk replay meets."""
    reads = stage.asked(READ, READ, READ, PLAIN)
    stage.complete(reads, 2)
    stage.stop(reads, 3)
    turn = stage.queued()
    stage.stop(turn, 1)
    resolved = stage.unknown(PLAIN)
    stage.decisions.resolve(resolved, HAPPENED, actor="ann", reason="asked")
    discarded = stage.failed(READ)
    discard(stage, discarded)
    done = stage.queued()
    stage.answer(done, 1)
    return {
        "a read": stage.failed(READ, PLAIN),
        "reads side by side": reads,
        "a turn": turn,
        "a resolved write": resolved,
        "a write in doubt": stage.unknown(PLAIN),
        "a cancelled one": stage.unknown(PLAIN, is_cancelled=True),
        "a discarded one": discarded,
        "one that is done": done,
        "one that goes on": stage.asked(READ),
    }


def test_a_replay_of_many_comes_to_what_each_one_alone_would(stage: Stage) -> None:
    """The quick way for many is no second meaning: same steps, same events, same answers."""
    singly, together = many_scenes(stage), many_scenes(stage)
    expected: dict[str, object] = {}
    for name, run_id in singly.items():
        try:
            expected[name] = [ref.number for ref in replay(stage, run_id)]
        except AgentqError as error:
            expected[name] = str(error).replace(run_id, "RUN")

    decided = stage.decisions.decide_many(list(together.values()), Replaying(), actor="ann", reason="mended")

    assert [one.run_id for one in decided] == sorted(together.values())
    by_id = {one.run_id: one for one in decided}
    for name, run_id in together.items():
        one = by_id[run_id]
        found = (
            [wakeup.ref.number for wakeup in one.wakeups]
            if one.refusal is None
            else str(one.refusal).replace(run_id, "RUN")
        )
        assert _without_times(found) == _without_times(expected[name]), name
        assert what_is_left(stage, run_id) == what_is_left(stage, singly[name]), name
    for wakeup in (wakeup for one in decided for wakeup in one.wakeups):
        assert stage.steps.load(wakeup.ref) is not None
    check_invariants(stage.database)


def _without_times(answer: object) -> object:
    return answer.split(" at ")[0] if isinstance(answer, str) else answer


def what_is_left(stage: Stage, run_id: str) -> dict[str, object]:
    run = stage.runs.run(run_id)
    return {
        "run": (run.status, run.mode, run.error, run.output, run.finished_at is None, run.started_at is None),
        "fence": run.pending_effect is None,
        "letter": run.dead_letter is None,
        "steps": [
            (step.number, step.state, step.attempt, step.tries, step.due_at is None, step.dispatched_at is None)
            for step in run.steps
        ],
        "events": [
            (event.kind, event.actor.partition("/")[0], event.data.get("opened"), event.data.get("asked"))
            for event in stage.runs.events(run_id)
        ],
    }


def test_a_rehearsal_answers_like_the_real_thing_and_changes_nothing(stage: Stage) -> None:
    """A dry run that takes another way proves nothing."""
    scenes = many_scenes(stage)
    before = {name: (stage.runs.run(run_id), stage.runs.events(run_id)) for name, run_id in scenes.items()}
    run_ids = [*scenes.values(), "nowhere"]
    for choice in (Replaying(), HAPPENED, DID_NOT_HAPPEN, Discarding()):
        rehearsed = stage.decisions.decide_many(run_ids, choice, actor="ann", reason="", is_rehearsal=True)
        assert {name: (stage.runs.run(run_id), stage.runs.events(run_id)) for name, run_id in scenes.items()} == before
        assert [type(one.refusal) for one in rehearsed if one.run_id == "nowhere"] == [NotFoundError]
    rehearsed = stage.decisions.decide_many(run_ids, Replaying(), actor="ann", reason="", is_rehearsal=True)
    done = stage.decisions.decide_many(run_ids, Replaying(), actor="ann", reason="")
    assert [(one.run_id, str(one.refusal), one.wakeups) for one in rehearsed] == [
        (one.run_id, str(one.refusal), one.wakeups) for one in done
    ]
    assert any(isinstance(one.refusal, DecisionRequiredError) for one in done)


@pytest.mark.parametrize("choice", [HAPPENED, DID_NOT_HAPPEN, Discarding()], ids=["happened", "did not", "discard"])
def test_many_are_resolved_or_discarded_each_on_its_own(stage: Stage, choice: Ruling | Discarding) -> None:
    """One that refuses doesn't keep the others from being decided."""
    unknown, failed, goes_on = stage.unknown(PLAIN), stage.failed(READ), stage.asked(READ)
    decided = stage.decisions.decide_many([unknown, failed, goes_on], choice, actor="ann", reason="")
    done = {one.run_id for one in decided if one.refusal is None}
    assert done == ({unknown} if isinstance(choice, Ruling) else {unknown, failed})
    assert stage.runs.run(unknown).pending_effect is None
    check_invariants(stage.database)


def test_two_bulks_at_the_same_moment_replay_each_run_once(postgresql_stage: Stage) -> None:
    """Two operators at one outage, over the same runs in any order: no deadlock, and each is told of the other."""
    stage = postgresql_stage
    run_ids = [stage.failed(READ) for _ in range(40)]
    with ThreadPoolExecutor(2) as pool:
        with stage.database.locked(min(run_ids)):
            both = [
                pool.submit(stage.decisions.decide_many, list(ids), Replaying(), actor=actor, reason="")
                for actor, ids in (("ann", run_ids), ("bob", reversed(run_ids)))
            ]
            eventually(lambda: waiters(stage) == len(both), what="both wait")
        answers = [each.result(30) for each in both]
    assert sorted(sum(one.refusal is None for one in answer) for answer in answers) == [0, 40]
    assert {type(one.refusal) for answer in answers for one in answer} == {type(None), AlreadyDecidedError}
    assert {stage.runs.run(run_id).steps[1].attempt for run_id in run_ids} == {2}


def waiters(stage: Stage) -> int:
    with stage.database.reading() as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        found: int = connection.exec_driver_sql(asked).scalar_one()
        return found
