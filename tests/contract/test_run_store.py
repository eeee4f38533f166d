"""Starting, reading and cancelling runs: the contract of `RunStore`."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from agentq.domain.errors import IdempotencyConflictError, NotFoundError
from agentq.domain.failures import FailureClass
from agentq.domain.model import (
    DeadLetterReason,
    Json,
    RunMode,
    RunStatus,
    StepKind,
    StepRef,
    StepState,
)
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import Added, NewRun, RunFilter
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage

MANY = 2500  # More than one statement's worth of parameters on either database.


def new_run(run_id: str, *, input: Json = "hello", key: str | None = None, **fields: Any) -> NewRun:
    return NewRun(id=run_id, agent="support", input=input, idempotency_key=key, **fields)


def first_step(run_id: str) -> Wakeup:
    return Wakeup(ref=StepRef(run_id=run_id, number=1, attempt=1), agent="support", kind=StepKind.MODEL)


# --- Adding ---------------------------------------------------------------------------------------------------------


def test_a_new_run_is_stored_with_its_first_step(stage: Stage) -> None:
    """Once `add` has returned, the run is executed whatever becomes of its producer: the step is a row."""
    added = stage.runs.add([new_run("a", input={"order": 17}, key="k", metadata={"team": "eu"})])

    assert added == [Added(run_id="a", is_new=True, wakeup=first_step("a"))]
    run = stage.runs.run("a")
    assert (run.agent, run.input, run.status, run.metadata) == (
        "support",
        {"order": 17},
        RunStatus.QUEUED,
        {"team": "eu"},
    )
    assert (run.idempotency_key, run.finished_at, run.pending_effect) == ("k", None, None)
    (step,) = run.steps
    assert (step.number, step.kind, step.state, step.attempt) == (1, StepKind.MODEL, StepState.AVAILABLE, 1)
    assert step.dispatched_at == run.created_at
    assert stage.kinds_of_events("a") == ["run.enqueued"]


def test_a_new_run_s_next_step_is_numbered_two(stage: Stage) -> None:
    """The turn's calls follow it in one numbering."""
    run_id = stage.asked(READ, READ)
    assert [step.number for step in stage.runs.run(run_id).steps] == [1, 2, 3]


def test_the_same_key_finds_the_run_it_started(stage: Stage) -> None:
    """A producer that lost its reply calls again: one run, and nothing to publish again."""
    stage.runs.add([new_run("a", key="k")])

    assert stage.runs.add([new_run("b", key="k")]) == [Added(run_id="a", is_new=False)]
    with pytest.raises(NotFoundError):
        stage.runs.run("b")


def test_the_same_id_finds_its_run(stage: Stage) -> None:
    """Callers that choose ids need no key to call again safely."""
    stage.runs.add([new_run("a")])
    assert stage.runs.add([new_run("a")]) == [Added(run_id="a", is_new=False)]


def test_equal_inputs_are_equal_whatever_the_order_of_their_keys(stage: Stage) -> None:
    """Another service may write its object in another order the second time."""
    stage.runs.add([new_run("a", input={"x": 1, "y": [2]}, key="k")])
    assert stage.runs.add([new_run("b", input={"y": [2], "x": 1}, key="k")]) == [Added(run_id="a", is_new=False)]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(new_run("b", input="other", key="k"), id="another input"),
        pytest.param(NewRun(id="b", agent="sales", input="hello", idempotency_key="k"), id="another agent"),
        pytest.param(new_run("a", input="other"), id="the id of a run with another input"),
    ],
)
def test_a_conflict_is_an_error_and_stores_nothing(stage: Stage, second: NewRun) -> None:
    """Two different runs under one name: the caller has a mistake that must not be hidden, nor half done."""
    stage.runs.add([new_run("a", key="k")])

    with pytest.raises(IdempotencyConflictError, match="another agent or input"):
        stage.runs.add([new_run("innocent"), second])

    assert [run.id for run in stage.runs.runs(RunFilter())] == ["a"]


def test_repeats_within_one_call_are_one_run(stage: Stage) -> None:
    """`enqueue_many` of a list with repeats does what enqueueing one by one does."""
    added = stage.runs.add([new_run("a", key="k"), new_run("b", key="k"), new_run("c"), new_run("c")])

    assert [(one.run_id, one.is_new) for one in added] == [("a", True), ("a", False), ("c", True), ("c", False)]
    assert sorted(run.id for run in stage.runs.runs(RunFilter())) == ["a", "c"]


def test_repeats_within_one_call_of_a_run_that_was_there_are_that_run(stage: Stage) -> None:
    """None of them is new, and all have its id."""
    stage.runs.add([new_run("a", key="k")])
    added = stage.runs.add([new_run("b", key="k"), new_run("c", key="k")])
    assert [(one.run_id, one.is_new) for one in added] == [("a", False), ("a", False)]


def test_a_conflict_within_one_call_stores_nothing(stage: Stage) -> None:
    """As if the two had come one after the other, but all or nothing."""
    with pytest.raises(IdempotencyConflictError, match="'k' was used for run 'a'"):
        stage.runs.add([new_run("a", key="k"), new_run("b", input="other", key="k")])
    assert stage.runs.runs(RunFilter()) == []


def test_a_refused_run_is_a_row_with_its_reason_and_never_runs(stage: Stage) -> None:
    """Who asked by message has no reply: the refusal is found by the key or the id."""
    added = stage.runs.add([new_run("a", key="k", error="unknown agent 'support'")])

    assert added == [Added(run_id="a", is_new=True)]
    run = stage.runs.run_by_key("k")
    assert (run.id, run.status, run.error, run.steps) == ("a", RunStatus.FAILED, "unknown agent 'support'", ())
    assert run.finished_at == run.created_at
    assert stage.kinds_of_events("a") == ["run.refused"]
    assert stage.decisions.dead_letters(RunFilter()) == []


def test_an_interactive_run_s_step_is_never_published(stage: Stage) -> None:
    """Its caller drives it: no message, and neither dispatcher nor reaper touches it, whatever its marks say."""
    added = stage.runs.add([new_run("a", mode=RunMode.INTERACTIVE)])

    assert added == [Added(run_id="a", is_new=True)]
    assert stage.keeping.in_flight(after=None, limit=10) == []
    stage.runs.undispatch([StepRef(run_id="a", number=1, attempt=1)])
    assert stage.keeping.take_due(10, first_steps=True) == []


def test_thousands_of_runs_are_one_call(stage: Stage) -> None:
    """In the order given, whatever number of parameters a statement may have."""
    ids = [uuid.uuid4().hex for _ in range(MANY)]
    added = stage.runs.add([new_run(run_id, key=f"key of {run_id}") for run_id in ids])
    assert [one.run_id for one in added] == ids
    assert len(stage.runs.runs(RunFilter(limit=MANY + 1))) == MANY


def test_what_a_database_can_t_store_is_stored_cleaned(stage: Stage) -> None:
    """NUL and NaN are no reason to lose a run, and both databases keep the same."""
    stage.runs.add([new_run("a", input=["\0", float("nan")], metadata={"note": "a\0b"})])
    run = stage.runs.run("a")
    assert (run.input, run.metadata) == (["\ufffd", None], {"note": "a\ufffdb"})
    assert [found.id for found in stage.runs.runs(RunFilter(metadata={"note": "a\ufffdb"}))] == ["a"]


def test_batches_that_add_the_same_keys_at_once_add_each_run_once(stage: Stage) -> None:
    """Two producers with the same list, in opposite orders: neither waits for ever, and each run is started by one."""
    keys = [f"key-{number}" for number in range(50)]

    def add(prefix: str, ordered: list[str]) -> list[Added]:
        return stage.runs.add([new_run(f"{prefix}-{key}", key=key, input=key) for key in ordered])

    with ThreadPoolExecutor(2) as pool:
        batches = [pool.submit(add, "a", keys), pool.submit(add, "b", keys[::-1])]
        added = [one for batch in batches for one in batch.result(30)]

    assert sum(one.is_new for one in added) == len(keys)
    assert len({one.run_id for one in added}) == len(keys)


def test_nothing_to_add_is_fine(stage: Stage) -> None:
    """An empty list has no first statement to fail on."""
    assert stage.runs.add([]) == []


def test_an_undispatched_step_is_the_dispatcher_s(stage: Stage) -> None:
    """The broker was away: the run starts when the keeper can publish."""
    stage.runs.add([new_run("a"), new_run("b")])

    stage.runs.undispatch([StepRef(run_id="a", number=1, attempt=1), StepRef(run_id="b", number=1, attempt=2)])

    assert stage.keeping.take_due(10, first_steps=True) == [first_step("a")]  # b's attempt is another.


# --- Reading --------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_steps_fence_and_dead_letter(stage: Stage) -> None:
    """All that a person needs to judge an unknown write."""
    run_id = stage.unknown(PLAIN, settles_within_seconds=5)
    run = stage.runs.run(run_id)

    assert run.status is RunStatus.FAILED
    assert [(step.number, step.state) for step in run.steps] == [
        (1, StepState.COMPLETED),
        (FIRST_CALL, StepState.DEAD_LETTERED),
    ]
    assert run.pending_effect is not None
    assert (run.pending_effect.tool, run.pending_effect.effect, run.pending_effect.number) == ("pay", PLAIN, FIRST_CALL)
    assert run.pending_effect.settles_within_seconds == 5
    assert run.dead_letter is not None
    assert (run.dead_letter.number, run.dead_letter.outcome_unknown) == (FIRST_CALL, True)


def test_the_status_is_asked_alone(stage: Stage) -> None:
    """Who waits for a run asks often, so it is one small read."""
    run_id = stage.asked(READ)
    assert stage.runs.status(run_id) is RunStatus.RUNNING


def test_what_isn_t_there_is_named(stage: Stage) -> None:
    """A mistyped id gets an error that shows it."""
    for ask in (stage.runs.run, stage.runs.status, stage.runs.run_by_key):
        with pytest.raises(NotFoundError, match="'nowhere'"):
            ask("nowhere")
    with pytest.raises(NotFoundError, match="'nowhere'"):
        stage.runs.cancel("nowhere", actor="ann", reason="")


def test_events_are_read_on_from_where_one_was(stage: Stage) -> None:
    """A follower asks for what is new."""
    run_id = stage.asked(READ)
    events = stage.runs.events(run_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert stage.runs.events(run_id, after=1) == events[1:]


def test_runs_are_listed_newest_first(stage: Stage) -> None:
    """What happened last is looked for first; runs of one moment stand in one order, too."""
    ids = [stage.queued() for _ in range(3)]
    listed = [run.id for run in stage.runs.runs(RunFilter())]
    created = {run.id: (run.created_at, run.id) for run in stage.runs.runs(RunFilter())}
    assert set(listed) == set(ids)
    assert listed == sorted(ids, key=created.__getitem__, reverse=True)
    assert [run.id for run in stage.runs.runs(RunFilter(limit=1))] == listed[:1]


def test_filters_narrow_the_list(stage: Stage) -> None:
    """One grammar, each word of it, alone and together."""
    queued = stage.queued()
    sales = stage.queued(agent="sales")
    reading, paying = stage.asked(READ), stage.asked(KEYED)
    failed, unknown = stage.failed(READ), stage.unknown(PLAIN)
    listed = {
        "statuses": (RunFilter(statuses=(RunStatus.QUEUED, RunStatus.RUNNING)), {queued, sales, reading, paying}),
        "agent": (RunFilter(agent="sales"), {sales}),
        "tool": (RunFilter(tool="pay"), {paying, unknown}),
        "reason": (RunFilter(reason=DeadLetterReason.NOT_RETRYABLE), {failed, unknown}),
        "another reason": (RunFilter(reason=DeadLetterReason.RETRIES_EXHAUSTED), set()),
        "class": (RunFilter(failure_class=FailureClass.UNKNOWN), {failed, unknown}),
        "unknown": (RunFilter(outcome_unknown=True), {unknown}),
        "known": (RunFilter(outcome_unknown=False), {queued, sales, reading, paying, failed}),
        "together": (RunFilter(statuses=(RunStatus.FAILED,), tool="pay", agent="support"), {unknown}),
    }
    for name, (filters, expected) in listed.items():
        assert {run.id for run in stage.runs.runs(filters)} == expected, name


def test_the_list_shows_dead_letters(stage: Stage) -> None:
    """Why each run failed, without a look at each."""
    failed, queued = stage.failed(READ), stage.queued()
    listed = {run.id: run.dead_letter for run in stage.runs.runs(RunFilter())}
    dead_letter = listed[failed]
    assert dead_letter is not None
    assert dead_letter.error == "the tool raised"
    assert listed[queued] is None


def test_times_bound_the_list_from_the_first_to_before_the_second(stage: Stage) -> None:
    """`until` of one page is the oldest time of the one before."""
    run = stage.runs.run(stage.queued())
    moment = timedelta(milliseconds=1)
    assert len(stage.runs.runs(RunFilter(since=run.created_at, until=run.created_at + moment))) == 1
    assert stage.runs.runs(RunFilter(since=run.created_at + moment)) == []
    assert stage.runs.runs(RunFilter(until=run.created_at)) == []


@pytest.mark.parametrize("key", ["team", "a.b", 'quo"ted', "$", "it's", "naïve", "%s"])
def test_metadata_is_found_by_any_key(stage: Stage, key: str) -> None:
    """A key is a text, never part of a path or of a statement."""
    stage.runs.add([new_run("a", metadata={key: "x"}), new_run("b", metadata={key: "y"}), new_run("c")])
    assert [run.id for run in stage.runs.runs(RunFilter(metadata={key: "x"}))] == ["a"]


def test_all_metadata_asked_for_must_match(stage: Stage) -> None:
    """Two words narrow more than one."""
    stage.runs.add([new_run("a", metadata={"k": "1", "l": "2"}), new_run("b", metadata={"k": "1"})])
    assert [run.id for run in stage.runs.runs(RunFilter(metadata={"k": "1", "l": "2"}))] == ["a"]


def test_agents_are_those_that_workers_registered(stage: Stage) -> None:
    """A client tells an unknown agent from one that no worker serves now."""
    assert stage.runs.agents() == {}
    stage.keeping.see_agents({"support": 100, "sales": 5})
    served = stage.runs.agents()
    assert {name: agent.input_bytes_max for name, agent in served.items()} == {"support": 100, "sales": 5}
    assert all(0 <= agent.seen_seconds < 60 for agent in served.values())


# --- Cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RunMode)
def test_a_run_without_a_write_in_flight_is_cancelled_at_once(stage: Stage, mode: RunMode) -> None:
    """Needs no worker: with all of them down it is cancelled all the same, and its open steps close with it."""
    run_id = stage.asked(READ, PLAIN, mode=mode)

    assert stage.runs.cancel(run_id, actor="ann", reason="wrong customer") is RunStatus.CANCELLED

    run = stage.runs.run(run_id)
    assert (run.status, run.cancel_requested) == (RunStatus.CANCELLED, True)
    assert run.finished_at is not None
    assert [step.state for step in run.steps] == [StepState.COMPLETED, StepState.CLOSED, StepState.CLOSED]
    told = stage.runs.events(run_id)[-1]
    assert (told.kind, told.actor, told.data["reason"]) == ("run.cancelled", "ann", "wrong customer")


def test_a_queued_run_is_cancelled_before_it_starts(stage: Stage) -> None:
    """Its message may still come: the step isn't available any more."""
    run_id = stage.queued()
    stage.runs.cancel(run_id, actor="ann", reason="")
    assert stage.steps.load(StepRef(run_id=run_id, number=1, attempt=1)) is None


@pytest.mark.parametrize("effect", [KEYED, PLAIN])
def test_a_write_in_flight_ends_first(stage: Stage, effect: Any) -> None:
    """Its outcome is recorded, nothing follows, and the run ends as cancelled."""
    run_id = stage.fenced(effect, others=(READ,))

    assert stage.runs.cancel(run_id, actor="ann", reason="no") is RunStatus.RUNNING
    assert stage.steps.beat(stage.ref(run_id, FIRST_CALL))
    assert stage.kinds_of_events(run_id)[-1] == "cancel.requested"

    stage.complete(run_id, FIRST_CALL, "paid", fence_id=run_id)
    run = stage.runs.run(run_id)
    assert (run.status, run.pending_effect) == (RunStatus.CANCELLED, None)
    assert [step.state for step in run.steps] == [StepState.COMPLETED, StepState.COMPLETED, StepState.CLOSED]
    assert run.steps[1].result == "paid"


def test_cancelling_twice_is_cancelling(stage: Stage) -> None:
    """The first one's name stands, and the audit log tells it once."""
    run_id = stage.fenced(PLAIN)
    stage.runs.cancel(run_id, actor="ann", reason="first")
    assert stage.runs.cancel(run_id, actor="bob", reason="second") is RunStatus.RUNNING
    assert stage.kinds_of_events(run_id).count("cancel.requested") == 1


@pytest.mark.parametrize("ended", ["completed", "failed", "cancelled"])
def test_cancelling_an_ended_run_changes_nothing(stage: Stage, ended: str) -> None:
    """Who comes too late is told how it ended."""
    run_id = stage.failed(READ) if ended == "failed" else stage.queued()
    if ended == "completed":
        stage.answer(run_id, 1)
    if ended == "cancelled":
        stage.runs.cancel(run_id, actor="ann", reason="")
    before = stage.runs.run(run_id), stage.runs.events(run_id)

    assert stage.runs.cancel(run_id, actor="bob", reason="late") == ended
    assert (stage.runs.run(run_id), stage.runs.events(run_id)) == before
