"""The spine, step by step: who may call the tool, and what becomes of the run after it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentq.domain.effects import ToolEffect
from agentq.domain.errors import (
    AuditRefusedError,
    LeasesUnavailableError,
    StoreRefusedError,
    StoreUnavailableError,
)
from agentq.domain.failures import CircuitOpenError, FailureClass, ModelError, ModelReplyMalformedError
from agentq.domain.model import DeadLetterReason, ModelReply, RunMode, RunStatus, StepKind, StepState, ToolCall
from agentq.domain.tools import Tool, ToolContext, ToolError, tool
from agentq.ports.leases import LeaseView
from agentq.ports.steps import FenceRequest
from agentq.services.execute import NOTHING, idempotency_key
from tests.support.spine import (
    DEADLINE_SECONDS,
    HAND_BACK_SECONDS,
    LEASE_SECONDS,
    PATIENCE_SECONDS,
    RESULT_BYTES_MAX,
    SETTLE_PATIENCE_SECONDS,
    TRIES_MAX,
    TURNS_MAX,
    Spine,
)
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ

MakeSpine = Callable[..., Spine]
AWAY = StoreUnavailableError("the database is away")


class Act:
    """What a tool does: returns `outcome`, or raises it. Counts its calls."""

    def __init__(self, outcome: object = "done") -> None:
        self.outcome = outcome
        self.contexts: list[ToolContext] = []
        self.meanwhile: Callable[[], object] = lambda: None

    @property
    def calls(self) -> int:
        return len(self.contexts)

    def as_tool(self, effect: ToolEffect, **options: Any) -> Tool:
        @tool(effect=effect, name="act", **options)
        def act(context: ToolContext) -> Any:
            self.contexts.append(context)
            self.meanwhile()
            if isinstance(self.outcome, BaseException):
                raise self.outcome
            return self.outcome

        return act


def rate_limited(retry_after_seconds: float | None = None) -> ModelError:
    return ModelError("slow down", status=429, retry_after_seconds=retry_after_seconds)


# --- Situation -> outcome -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Goes:
    """The run goes on with that result for the model."""

    result: object
    is_error: bool = False
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """A new attempt is due later."""

    seconds: float
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """A dead letter."""

    reason: DeadLetterReason = DeadLetterReason.NOT_RETRYABLE
    failure_class: FailureClass
    outcome_unknown: bool = False


REFUSED = ConnectionRefusedError("refused")
NOT_KEPT_WRITE = "the call was made and succeeded; its result was not kept: "
TOO_BIG = f"it has {RESULT_BYTES_MAX + 3} bytes, the limit is {RESULT_BYTES_MAX}"
UNKNOWN_WRITE = Stops(failure_class=FailureClass.UNKNOWN, outcome_unknown=True)


def outcome_of_plain(failure_class: FailureClass) -> Stops:
    return Stops(failure_class=failure_class, outcome_unknown=True)


SITUATIONS: dict[str, tuple[ToolEffect, object, Goes | Requeued | Stops]] = {
    "a read returns": (READ, {"cents": 12}, Goes(result={"cents": 12})),
    "a keyed write returns": (KEYED, None, Goes(result=None)),
    "a plain write returns": (PLAIN, [1, "two"], Goes(result=[1, "two"])),
    # Retryable, budget left.
    "a read's connection is refused": (READ, REFUSED, Requeued(seconds=0.75, tries=1)),
    "a read meets a 503": (READ, ModelError("down", status=503), Requeued(seconds=0.75, tries=1)),
    "a read is throttled": (READ, rate_limited(), Requeued(seconds=0.75)),
    "a read is told how long to wait": (READ, rate_limited(40), Requeued(seconds=40)),
    "a read meets an open circuit": (READ, CircuitOpenError("open"), Requeued(seconds=0.75)),
    "a keyed write's connection is refused": (KEYED, REFUSED, Requeued(seconds=DEADLINE_SECONDS, tries=1)),
    "a keyed write is throttled": (KEYED, rate_limited(), Requeued(seconds=0.75)),
    # Not retryable.
    "a read meets a 401": (READ, ModelError("who?", status=401), Stops(failure_class=FailureClass.AUTH)),
    "a read meets a 400": (READ, ModelError("what?", status=400), Stops(failure_class=FailureClass.CLIENT_ERROR)),
    "a keyed write meets a 403": (KEYED, ModelError("no", status=403), Stops(failure_class=FailureClass.AUTH)),
    "a keyed write raises what nobody knows": (KEYED, KeyError("x"), Stops(failure_class=FailureClass.UNKNOWN)),
    # A read raised something UNKNOWN.
    "a read raises what nobody knows": (READ, KeyError("x"), Goes(result="KeyError: 'x'", is_error=True)),
    "a read wants to exit": (READ, SystemExit(3), Goes(result="SystemExit: 3", is_error=True)),
    # A plain write raised, whatever the class.
    "a plain write's connection is refused": (PLAIN, REFUSED, outcome_of_plain(FailureClass.CONNECTION)),
    "a plain write is throttled": (PLAIN, rate_limited(), outcome_of_plain(FailureClass.RATE_LIMIT)),
    "a plain write meets a 401": (PLAIN, ModelError("no", status=401), outcome_of_plain(FailureClass.AUTH)),
    "a plain write raises what nobody knows": (PLAIN, KeyError("x"), UNKNOWN_WRITE),
    "a plain write wants to exit": (PLAIN, SystemExit(3), UNKNOWN_WRITE),
    # ToolError.
    "a read says it failed": (READ, ToolError("no such order"), Goes(result="no such order", is_error=True)),
    "a keyed write says it failed": (KEYED, ToolError("hm"), Stops(failure_class=FailureClass.UNKNOWN)),
    "a plain write says it failed": (PLAIN, ToolError("hm"), UNKNOWN_WRITE),
    "a keyed write was refused": (KEYED, ToolError("no", nothing_happened=True), Goes(result="no", is_error=True)),
    "a plain write was refused": (PLAIN, ToolError("no", nothing_happened=True), Goes(result="no", is_error=True)),
    # A result that can't be kept.
    "a read's result is too big": (
        READ,
        "x" * (RESULT_BYTES_MAX + 1),
        Goes(result=f"no result: {TOO_BIG}", is_error=True, note="result_not_kept"),
    ),
    "a keyed write's result is too big": (
        KEYED,
        "x" * (RESULT_BYTES_MAX + 1),
        Goes(result=NOT_KEPT_WRITE + TOO_BIG, note="result_not_kept"),
    ),
    "a plain write's result is too big": (
        PLAIN,
        "x" * (RESULT_BYTES_MAX + 1),
        Goes(result=NOT_KEPT_WRITE + TOO_BIG, note="result_not_kept"),
    ),
    # What neither database can hold.
    "a write's result holds NUL, NaN and half a pair": (
        PLAIN,
        ["a\0b", float("nan"), float("inf"), "\ud800"],
        Goes(result=["a\ufffdb", None, None, "\ufffd"]),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation_and_outcome(make_spine: MakeSpine, situation: str) -> None:
    """The table of what a step may end as; every promise about repeating rests on it."""
    effect, outcome, expected = SITUATIONS[situation]
    act = Act(outcome)
    spine = make_spine(act.as_tool(effect))
    run_id = spine.asked("act")

    executed = spine.execute(run_id)

    assert act.calls == 1
    check_outcome(spine, run_id, expected)
    assert (executed.stopped is not None) == isinstance(expected, Stops), "what ends a run is red in Flower"


def check_outcome(spine: Spine, run_id: str, expected: Goes | Requeued | Stops) -> None:
    run, step = spine.run(run_id), spine.step(run_id)
    match expected:
        case Goes():
            assert (step.state, step.result, step.is_error) == (
                StepState.COMPLETED,
                expected.result,
                expected.is_error,
            )
            assert spine.events(run_id, "step.settled")[-1].data.get("note") == expected.note
            assert run.status is RunStatus.RUNNING and run.pending_effect is None
            assert spine.broker.numbers == [FIRST_CALL + 1], "the model's turn is woken"
        case Requeued():
            assert (step.state, step.attempt, step.tries) == (StepState.AVAILABLE, 2, expected.tries)
            due_in = spine.events(run_id, "step.requeued")[-1].data["due_in_seconds"]
            assert due_in == pytest.approx(expected.seconds, abs=0.5)
            assert run.status is RunStatus.RUNNING and run.pending_effect is None
            assert spine.broker.published == [], "a row with due_at, no message"
        case Stops():
            assert run.status is RunStatus.FAILED and step.state is StepState.DEAD_LETTERED
            assert run.dead_letter is not None
            letter = run.dead_letter
            assert (letter.reason, letter.failure_class, letter.outcome_unknown) == (
                expected.reason,
                expected.failure_class,
                expected.outcome_unknown,
            )
            assert (run.pending_effect is not None) == expected.outcome_unknown, (
                "the fence stands over an unknown write"
            )


@pytest.mark.parametrize(
    ("effect", "outcome", "spent", "expected"),
    [
        (READ, REFUSED, {"tries": TRIES_MAX - 1}, Requeued(seconds=3, tries=TRIES_MAX)),
        (
            READ,
            REFUSED,
            {"tries": TRIES_MAX},
            Stops(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=FailureClass.CONNECTION),
        ),
        (
            KEYED,
            REFUSED,
            {"tries": TRIES_MAX},
            Stops(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=FailureClass.CONNECTION),
        ),
        (READ, rate_limited(), {"tries": TRIES_MAX}, Requeued(seconds=6, tries=TRIES_MAX)),
        (
            READ,
            rate_limited(),
            {"throttled_since": datetime.now(UTC) - timedelta(seconds=PATIENCE_SECONDS)},
            Stops(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=FailureClass.RATE_LIMIT),
        ),
    ],
)
def test_a_budget_has_an_end(
    make_spine: MakeSpine,
    effect: ToolEffect,
    outcome: BaseException,
    spent: dict[str, Any],
    expected: Requeued | Stops,
) -> None:
    """Tries are counted, patience is timed; neither is spent by the other."""
    spine = make_spine(Act(outcome).as_tool(effect))
    run_id = spine.asked("act")
    spine.stage.change_step(run_id, FIRST_CALL, **spent)
    spine.execute(run_id)
    check_outcome(spine, run_id, expected)


def test_a_read_may_ask_for_the_dead_letter(make_spine: MakeSpine) -> None:
    """Some failures are for a person, not for the model."""
    spine = make_spine(Act(KeyError("x")).as_tool(READ, unknown_is_dead_letter=True))
    run_id = spine.asked("act")
    spine.execute(run_id)
    check_outcome(spine, run_id, Stops(failure_class=FailureClass.UNKNOWN))


@pytest.mark.parametrize("effect", [READ, KEYED])
def test_an_interactive_run_settles_failed(make_spine: MakeSpine, effect: ToolEffect) -> None:
    """Whoever drives it sees it fail: nothing waits for anybody else."""
    spine = make_spine(Act(ModelError("no", status=401)).as_tool(effect), dispatcher=False)
    run_id = spine.asked("act", mode=RunMode.INTERACTIVE)
    spine.execute(run_id)
    run = spine.run(run_id)
    assert (run.status, run.dead_letter) == (RunStatus.FAILED, None)


def test_an_interactive_runs_unknown_write_is_listed(make_spine: MakeSpine) -> None:
    """An unknown outcome is never hidden, whoever drove the run."""
    spine = make_spine(Act(REFUSED).as_tool(PLAIN), dispatcher=False)
    run_id = spine.asked("act", mode=RunMode.INTERACTIVE)
    spine.execute(run_id)
    check_outcome(spine, run_id, outcome_of_plain(FailureClass.CONNECTION))


@pytest.mark.parametrize(
    ("effect", "result"),
    [(READ, "no result: "), (KEYED, NOT_KEPT_WRITE), (PLAIN, NOT_KEPT_WRITE)],
)
@pytest.mark.parametrize("returned", [{1, object()}, 10**5000], ids=["no JSON", "too many digits"])
def test_a_result_that_is_not_json(make_spine: MakeSpine, effect: ToolEffect, returned: object, result: str) -> None:
    """A write that returns nonsense has happened all the same: never an error result, never tried again."""
    spine = make_spine(Act(returned).as_tool(effect))
    run_id = spine.asked("act")
    spine.execute(run_id)
    step = spine.step(run_id)
    assert step.state is StepState.COMPLETED
    assert isinstance(step.result, str) and step.result.startswith(result) and "JSON" in step.result
    assert step.is_error == (effect is READ)


@pytest.mark.parametrize("effect", [READ, KEYED, PLAIN])
def test_a_result_that_the_database_refuses(make_spine: MakeSpine, effect: ToolEffect) -> None:
    """The run goes on with the notice; a write is never made again for it."""
    act = Act()
    spine = make_spine(act.as_tool(effect))
    run_id = spine.asked("act")
    spine.steps.script.fail("settle", StoreRefusedError("too much"))
    spine.execute(run_id)
    step = spine.step(run_id)
    assert (step.state, step.is_error, act.calls) == (StepState.COMPLETED, effect is READ, 1)
    assert step.result == ("no result: too much" if effect is READ else NOT_KEPT_WRITE + "too much")


# --- What the store can't take --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [AuditRefusedError("disk full"), StoreRefusedError("no")])
@pytest.mark.parametrize("effect", [KEYED, PLAIN])
def test_without_a_fence_nothing_happened(make_spine: MakeSpine, effect: ToolEffect, error: Exception) -> None:
    """The step stays as it is and is tried again: no dead letter for a database blink, no budget spent."""
    act = Act()
    spine = make_spine(act.as_tool(effect))
    run_id = spine.asked("act")
    spine.steps.script.fail("fence", error)
    assert spine.execute(run_id) == NOTHING
    step = spine.step(run_id)
    assert (act.calls, step.state, step.attempt, step.tries) == (0, StepState.AVAILABLE, 1, 0)
    assert spine.execute(run_id).agent == "support", "the lease was given back cleanly"
    assert act.calls == 1


def test_a_lost_reply_to_the_fence_is_asked_again(make_spine: MakeSpine) -> None:
    """It stands by an earlier try, and is ours: called once, with one fence."""
    act = Act()
    spine = make_spine(act.as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.steps.script.lose_reply("fence", AWAY)
    spine.execute(run_id)
    assert (act.calls, spine.steps.script.calls.count("fence")) == (1, 2)
    assert len({request.id for request in spine.steps.fences}) == 1
    check_outcome(spine, run_id, Goes(result="done"))


def test_a_fence_that_got_old_while_the_database_was_away_is_taken_back(make_spine: MakeSpine) -> None:
    """A call that would begin at its deadline isn't begun, and that is told."""
    act = Act()
    spine = make_spine(act.as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.steps.script.fail("fence", *[AWAY] * 60)
    assert spine.execute(run_id) == NOTHING
    assert (act.calls, spine.call_limit.limits) == (0, []), "a limit in the past would end the process"
    run, step = spine.run(run_id), spine.step(run_id)
    assert (run.pending_effect, step.state, step.attempt, step.tries) == (None, StepState.AVAILABLE, 1, 0)


def test_taking_back_goes_on_until_the_store_knows(make_spine: MakeSpine) -> None:
    """ "Not called" is an outcome too: left unsaid it would be an unknown write."""
    spine = make_spine(Act().as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.steps.script.before["fence"] = lambda: setattr(spine.clock, "now", spine.clock.now + DEADLINE_SECONDS)
    spine.steps.script.fail("take_back", AWAY, AWAY)
    spine.execute(run_id)
    assert spine.steps.script.calls.count("take_back") == 3
    assert spine.run(run_id).pending_effect is None


def test_a_database_blink_fails_no_read(make_spine: MakeSpine) -> None:
    """Recorded again while the lease is ours; then dropped and redone later, at no charge."""
    act = Act()
    spine = make_spine(act.as_tool(READ))
    run_id = spine.asked("act")
    spine.steps.script.fail("settle", *[AWAY] * 100)
    assert spine.execute(run_id) == NOTHING
    step = spine.step(run_id)
    assert (step.state, step.attempt, step.tries, step.crashes) == (StepState.AVAILABLE, 1, 0, 0)
    assert sum(spine.clock.slept) <= SETTLE_PATIENCE_SECONDS
    spine.steps.script.end()
    spine.execute(run_id)
    check_outcome(spine, run_id, Goes(result="done"))


def test_a_refused_event_of_a_read_is_counted_and_the_run_goes_on(make_spine: MakeSpine) -> None:
    """Fail-soft: an observer's trouble with its log stops nobody."""
    spine = make_spine(Act().as_tool(READ))
    run_id = spine.asked("act")
    spine.steps.script.fail("settle", AuditRefusedError("disk full"))
    spine.execute(run_id)
    run = spine.run(run_id)
    assert (run.status, run.events_lost, spine.step(run_id).result) == (RunStatus.RUNNING, 1, "done")


@pytest.mark.parametrize("effect", [KEYED, PLAIN])
def test_a_refused_event_of_a_write_stops_the_run(make_spine: MakeSpine, effect: ToolEffect) -> None:
    """Fail-closed: no run goes on over a write that the audit log doesn't hold, and it isn't made again."""
    act = Act()
    spine = make_spine(act.as_tool(effect))
    run_id = spine.asked("act")
    spine.steps.script.fail("settle", AuditRefusedError("disk full"))

    executed = spine.execute(run_id)

    check_outcome(spine, run_id, Stops(failure_class=FailureClass.UNKNOWN, outcome_unknown=effect is PLAIN))
    assert executed.stopped is not None and executed.stopped.error.startswith("AuditPersistenceFailedException: ")
    assert spine.step(run_id).may_have_happened == (effect is KEYED)
    assert act.calls == 1
    assert spine.executor.execute(spine.ref(run_id)) == NOTHING
    assert act.calls == 1


@pytest.mark.parametrize("effect", [KEYED, PLAIN])
def test_a_write_that_can_not_be_recorded_for_a_minute_is_red(make_spine: MakeSpine, effect: ToolEffect) -> None:
    """The fence stands, so the keeper will judge it; until then Flower says what happened."""
    act = Act()
    spine = make_spine(act.as_tool(effect))
    run_id = spine.asked("act")
    spine.steps.script.fail("settle", *[AWAY] * 100)
    executed = spine.execute(run_id)
    assert executed.stopped is not None and executed.stopped.outcome_unknown == (effect is PLAIN)
    assert SETTLE_PATIENCE_SECONDS - 5 < sum(spine.clock.slept) <= SETTLE_PATIENCE_SECONDS
    assert spine.run(run_id).pending_effect is not None
    assert spine.execute(run_id) == NOTHING, "nobody calls over a fence"
    assert act.calls == 1


def test_a_lost_reply_to_the_settle_is_no_second_result(make_spine: MakeSpine) -> None:
    """Settled by me: the next steps are woken all the same."""
    spine = make_spine(Act().as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.steps.script.lose_reply("settle", AWAY)
    spine.execute(run_id)
    check_outcome(spine, run_id, Goes(result="done"))
    assert len(spine.events(run_id, "step.settled")) == 2, "the turn's and the call's"


def test_a_call_that_was_never_made_is_no_unknown_write(make_spine: MakeSpine) -> None:
    """Arguments that stopped fitting: the model is told, or, with the database away, nothing happened."""

    @tool(effect=PLAIN, name="act")
    def act(order: int) -> None:
        raise AssertionError("not with these arguments")

    spine = make_spine(Act().as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.know(act)
    spine.steps.script.fail("settle", *[AWAY] * 100)
    assert spine.execute(run_id) == NOTHING
    assert spine.run(run_id).status is RunStatus.RUNNING
    spine.steps.script.end()
    spine.execute(run_id)
    check_outcome(spine, run_id, Goes(result="invalid arguments for act: order: required", is_error=True))


# --- Who may call -------------------------------------------------------------------------------------------------


class TestAWriteNeedsALeaseAndAPersistedRun:
    """Take any of these guards away and a tool is called over a run that nobody will ever account for."""

    @pytest.fixture
    def act(self) -> Act:
        return Act()

    @pytest.fixture
    def ready(self, make_spine: MakeSpine, act: Act) -> Spine:
        return make_spine(act.as_tool(PLAIN))

    def test_no_run(self, ready: Spine, act: Act) -> None:
        """A message of a database that was set back, or of another one."""
        run_id = ready.asked("act")
        stranger = replace(ready.ref(run_id), run_id="nobody")
        assert ready.executor.execute(stranger) == NOTHING
        assert (act.calls, ready.steps.fences) == (0, [])

    def test_a_lease_of_another(self, ready: Spine, act: Act) -> None:
        """Somebody is at it."""
        run_id = ready.asked("act")
        ready.leases.acquire(ready.ref(run_id), "another", 15)
        assert ready.execute(run_id) == NOTHING
        assert (act.calls, ready.steps.script.calls) == (0, [])

    def test_a_started_attempt(self, ready: Spine, act: Act) -> None:
        """A dead worker's message that the broker delivers again starts nothing."""
        run_id = ready.asked("act")
        ready.leases.acquire(ready.ref(run_id), "another", 15)
        ready.clock.now += 16
        assert ready.execute(run_id) == NOTHING
        assert (act.calls, ready.steps.script.calls) == (0, [])

    def test_no_redis(self, ready: Spine, act: Act) -> None:
        """Without a lease the step waits, at no charge."""
        run_id = ready.asked("act")
        ready.leases.script.fail("acquire", LeasesUnavailableError("Redis is away"))
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0
        assert ready.step(run_id).attempt == 1

    @pytest.mark.parametrize("method", ["load", "hand_back"])
    def test_no_database(self, ready: Spine, act: Act, method: str) -> None:
        """Nothing was called: the keeper publishes the step again."""
        run_id = ready.asked("act")
        ready.call_limit.can_end_calls = method != "hand_back"
        ready.steps.script.fail(method, AWAY)
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0

    def test_a_refused_fence(self, ready: Spine, act: Act) -> None:
        """The run ended between the look and the stamp."""
        run_id = ready.asked("act")
        ready.steps.script.before["fence"] = lambda: ready.stage.runs.cancel(run_id, actor="ann", reason="no")
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0
        assert ready.run(run_id).status is RunStatus.CANCELLED

    def test_a_standing_fence(self, ready: Spine, act: Act) -> None:
        """A write is in flight, or unknown."""
        run_id = ready.asked("act")
        ready.steps.script.before["load"] = lambda: stamp(ready, run_id)
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0
        assert ready.run(run_id).pending_effect is not None

    @pytest.mark.parametrize("why", ["held", "over", "fenced"])
    def test_each_such_delivery_is_counted(self, ready: Spine, act: Act, why: str) -> None:
        """Who asks how often a message came gets the number, without a call or a commit for it."""
        run_id = ready.asked("act")
        ref = ready.ref(run_id)
        match why:
            case "held":
                ready.leases.acquire(ref, "another", 15)
            case "over":
                ready.stage.runs.cancel(run_id, actor="ann", reason="no")
            case "fenced":
                stamp(ready, run_id)
        ready.leases.script.calls.clear()
        assert ready.executor.execute(ref) == NOTHING
        assert ready.leases.script.calls == (["acquire"] if why == "held" else ["acquire", "release"])
        assert ready.leases.view(ref).suppressed == 1

    def test_what_was_counted_until_then_goes_with_the_settle(self, ready: Spine, act: Act) -> None:
        """In its one transaction: the write's last word with Redis was the extension of its lease."""
        ready.leases.survey([])
        ready.clock.now += 1000
        run_id = ready.asked("act")
        ready.steps.script.before["fence"] = lambda: ready.leases.acquire(ready.ref(run_id), "another", 15)
        ready.leases.script.calls.clear()
        ready.execute(run_id)
        assert ready.step(run_id).suppressed == 1
        assert ready.leases.script.calls == ["acquire", "acquire", "renew", "release"], "the second is the duplicate's"

    def test_a_lease_that_was_lost_before_the_call(self, ready: Spine, act: Act) -> None:
        """The fence is taken back: it costs nothing, and nobody need ask what happened."""
        run_id = ready.asked("act")
        ref = ready.ref(run_id)

        def stall() -> None:
            ready.clock.now += LEASE_SECONDS + 1
            ready.leases.acquire(replace(ref, attempt=2), "another", 15)

        ready.steps.script.before["fence"] = stall
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0
        assert ready.run(run_id).pending_effect is None
        assert ready.step(run_id).state is StepState.AVAILABLE

    def test_a_lease_that_could_not_be_extended(self, ready: Spine, act: Act) -> None:
        """Nobody knows whether it reaches to the deadline."""
        run_id = ready.asked("act")
        ready.leases.script.fail("renew", LeasesUnavailableError("Redis is away"))
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0
        assert ready.run(run_id).pending_effect is None

    def test_a_process_that_slept_before_its_call(self, ready: Spine, act: Act) -> None:
        """The last look comes after the limit is set, so that no sleep fits between them."""
        run_id = ready.asked("act")
        ready.call_limit.when_set = lambda: setattr(ready.clock, "now", ready.clock.now + DEADLINE_SECONDS)
        assert ready.execute(run_id) == NOTHING
        assert act.calls == 0
        assert ready.run(run_id).pending_effect is None

    def test_a_process_that_can_not_end_a_call(self, ready: Spine, act: Act) -> None:
        """A thread beside others: it hands the write back to a worker that can."""
        run_id = ready.asked("act")
        ready.call_limit.can_end_calls = False
        assert ready.execute(run_id) == NOTHING
        step = ready.step(run_id)
        assert (act.calls, step.attempt, step.tries, step.dispatched_at) == (0, 1, 0, None)
        assert ready.steps.fences == []

    def test_the_call_itself(self, ready: Spine, act: Act) -> None:
        """With lease, fence and limit in place, and nobody else able to get at it."""
        run_id = ready.asked("act")
        seen: list[object] = []

        def look() -> None:
            fence = ready.run(run_id).pending_effect
            holder = ready.leases.view(ready.ref(run_id)).owner
            assert fence is not None
            seen.append((fence.owner, holder, ready.call_limit.is_set))

        act.meanwhile = look
        ready.execute(run_id)
        owner = ready.steps.fences[0].owner
        assert seen == [(owner, owner, True)]
        assert ready.call_limit.limits == [DEADLINE_SECONDS] and not ready.call_limit.is_set


def stamp(spine: Spine, run_id: str) -> None:
    request = FenceRequest(
        ref=spine.ref(run_id),
        id=run_id,
        owner="another",
        tool="act",
        effect=PLAIN,
        deadline_seconds=30,
        settles_within_seconds=None,
    )
    spine.stage.steps.fence(request)


def test_a_read_needs_no_fence_and_no_limit(make_spine: MakeSpine) -> None:
    """One commit a read: its result. What is paused is asked at most once a second."""
    act = Act()
    spine = make_spine(act.as_tool(READ))
    run_id = spine.asked("act")
    spine.call_limit.can_end_calls = False
    spine.execute(run_id)
    assert spine.steps.script.calls == ["load", "pauses", "settle"]
    assert (act.calls, spine.call_limit.limits) == (1, [])


def test_a_deadline_of_the_tools_own(make_spine: MakeSpine) -> None:
    """The fence, the limit and the tool's context say the same."""
    act = Act()
    spine = make_spine(act.as_tool(PLAIN, deadline=7, settles_within=60))
    run_id = spine.asked("act")
    left: list[float] = []
    act.meanwhile = lambda: left.append(act.contexts[0].deadline_seconds)
    spine.execute(run_id)
    (request,) = spine.steps.fences
    assert (request.deadline_seconds, request.settles_within_seconds) == (7, 60)
    assert (spine.call_limit.limits, left) == ([7], [7])


def test_the_stricter_effect_counts(make_spine: MakeSpine) -> None:
    """A deploy that weakens a tool must not repeat what an older one began."""
    act = Act()
    spine = make_spine(act.as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.know(act.as_tool(READ))
    spine.execute(run_id)
    (request,) = spine.steps.fences
    assert request.effect is PLAIN
    spine.know(act.as_tool(READ))
    run_id = spine.asked("act")
    spine.know(act.as_tool(PLAIN))
    spine.execute(run_id)
    assert spine.steps.fences[-1].effect is PLAIN and len(spine.steps.fences) == 2


def test_a_tool_knows_its_attempt(make_spine: MakeSpine) -> None:
    """The key is the same for every attempt of a call, and never that of another call."""
    act = Act(REFUSED)
    spine = make_spine(act.as_tool(READ))
    run_id = spine.asked("act", "act")
    spine.execute(run_id, 2)
    spine.execute(run_id, 3)
    spine.stage.change_step(run_id, 2, due_at=datetime.now(UTC) - timedelta(seconds=1))
    spine.execute(run_id, 2)
    first, second, again = act.contexts
    assert (first.attempt, first.attempts_left, again.attempt, again.attempts_left) == (1, 3, 2, 2)
    assert first.idempotency_key == again.idempotency_key != second.idempotency_key
    assert first.idempotency_key == idempotency_key(run_id, 2, "call-1")
    assert (first.run_id, first.step, second.step) == (run_id, 2, 3)


def test_a_tool_hears_of_a_cancel(make_spine: MakeSpine) -> None:
    """A long call may stop early; it ends under its fence, and its outcome is recorded."""
    act = Act()
    spine = make_spine(act.as_tool(PLAIN))
    run_id = spine.asked("act")

    def cancelled() -> None:
        spine.stage.runs.cancel(run_id, actor="ann", reason="no")
        spine.heartbeat.beat()
        act.outcome = act.contexts[0].is_cancelled

    act.meanwhile = cancelled
    executed = spine.execute(run_id)
    assert spine.step(run_id).result is True
    assert (spine.run(run_id).status, executed.stopped, spine.broker.published) == (RunStatus.CANCELLED, None, [])


def test_a_cancelled_runs_failed_call_is_no_red_task(make_spine: MakeSpine) -> None:
    """The run was cancelled, not stopped by this step."""
    act = Act(ModelError("no", status=401))
    spine = make_spine(act.as_tool(KEYED))
    run_id = spine.asked("act")
    act.meanwhile = lambda: spine.stage.runs.cancel(run_id, actor="ann", reason="no")
    assert spine.execute(run_id).stopped is None
    assert spine.run(run_id).status is RunStatus.CANCELLED


# --- What this worker doesn't know ----------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [READ, KEYED, PLAIN])
@pytest.mark.parametrize("can_end_calls", [True, False])
def test_an_unknown_tool_is_handed_back_and_then_an_error(
    make_spine: MakeSpine, effect: ToolEffect, can_end_calls: bool
) -> None:
    """Another worker may know it, for as long as a deploy takes; then it fails closed, and costs no budget."""
    spine = make_spine(Act().as_tool(effect))
    run_id = spine.asked("act")
    spine.know()
    spine.call_limit.can_end_calls = can_end_calls

    assert spine.execute(run_id) == NOTHING
    step = spine.step(run_id)
    assert (step.state, step.attempt, step.tries, step.dispatched_at) == (StepState.AVAILABLE, 1, 0, None)
    (event,) = spine.events(run_id, "step.handed_back")
    assert event.data["why"] == "this worker's agent 'support' has no tool 'act'"

    long_ago = datetime.now(UTC) - timedelta(seconds=HAND_BACK_SECONDS + 1)
    spine.stage.change_step(run_id, FIRST_CALL, handed_back_since=long_ago, due_at=long_ago)
    spine.execute(run_id)
    check_outcome(spine, run_id, Goes(result="there is no tool 'act' any more", is_error=True))
    (request,) = spine.steps.fences
    assert (request.effect, request.is_callable) == (PLAIN, False)


def test_an_unknown_tools_error_that_can_not_be_stored_is_no_unknown_write(make_spine: MakeSpine) -> None:
    """Its fence says that nothing could be called, so the keeper requeues it."""
    spine = make_spine(Act().as_tool(PLAIN))
    run_id = spine.asked("act")
    spine.know()
    long_ago = datetime.now(UTC) - timedelta(seconds=HAND_BACK_SECONDS + 1)
    spine.stage.change_step(run_id, FIRST_CALL, handed_back_since=long_ago)
    spine.steps.script.fail("settle", *[AWAY] * 100)
    assert spine.execute(run_id) == NOTHING
    run = spine.run(run_id)
    assert run.status is RunStatus.RUNNING and run.pending_effect is not None and not run.pending_effect.is_callable


def test_an_unknown_agents_run_waits_for_a_worker_that_knows_it(make_spine: MakeSpine) -> None:
    """However long that takes: nothing is charged, and the log names what is missing."""
    spine = make_spine()
    run_id = spine.stage.queued(agent="stranger")
    for _ in range(3):
        spine.stage.change_step(run_id, 1, due_at=datetime.now(UTC) - timedelta(seconds=1))
        assert spine.execute(run_id, 1) == NOTHING
    step = spine.step(run_id, 1)
    assert (step.state, step.attempt, step.tries, step.crashes) == (StepState.AVAILABLE, 1, 0, 0)
    (event,) = spine.events(run_id, "step.handed_back")
    assert event.data["why"] == "this worker serves no agent 'stranger'"


# --- A model turn ---------------------------------------------------------------------------------------------------


def test_a_turns_calls_are_stored_before_any_is_woken(make_spine: MakeSpine) -> None:
    """The reply survives whatever happens next; only the first batch runs."""
    spine = make_spine(Act().as_tool(READ))
    run_id = spine.stage.queued()
    calls = tuple(ToolCall(id=f"c{number}", name="act", arguments={}) for number in (1, 2))
    spine.models.replies.append(ModelReply(text="looking", tool_calls=calls))
    executed = spine.execute(run_id, 1)
    assert [wakeup.ref.number for wakeup in executed.wakeups] == spine.broker.numbers == [2, 3]
    message = spine.step(run_id, 1).result
    assert isinstance(message, dict) and message["content"] == "looking"
    assert json.dumps(message).count('"function"') == 4


def test_an_answer_ends_the_run(make_spine: MakeSpine) -> None:
    """Its text is the run's output."""
    spine = make_spine()
    run_id = spine.stage.queued()
    spine.models.replies.append(ModelReply(text="all done"))
    executed = spine.execute(run_id, 1)
    assert (spine.run(run_id).status, spine.run(run_id).output) == (RunStatus.COMPLETED, "all done")
    assert (executed.wakeups, executed.stopped) == ((), None)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ConnectionResetError("cut"), None),
        (ModelError("slow down", status=429), None),
        (ModelReplyMalformedError("no JSON"), None),
        (ModelError("who?", status=401), FailureClass.AUTH),
        (ModelError("too long", status=413), FailureClass.CLIENT_ERROR),
        (ValueError("a defect"), FailureClass.UNKNOWN),
        (SystemExit(1), FailureClass.UNKNOWN),
        (ModelReply(tool_calls=(ToolCall(id="1", name="act", arguments={"x": object()}),)), FailureClass.UNKNOWN),
    ],
)
def test_a_failed_turn_is_retried_or_stops_the_run(
    make_spine: MakeSpine, failure: ModelReply | BaseException, expected: FailureClass | None
) -> None:
    """The classifier decides; a reply that can't be stored is a failure too, not one that comes for ever."""
    spine = make_spine(Act().as_tool(READ))
    run_id = spine.stage.queued()
    spine.models.replies.append(failure)
    spine.execute(run_id, 1)
    run, step = spine.run(run_id), spine.step(run_id, 1)
    if expected is None:
        assert (run.status, step.state, step.attempt) == (RunStatus.RUNNING, StepState.AVAILABLE, 2)
    else:
        assert run.dead_letter is not None
        assert (run.dead_letter.reason, run.dead_letter.failure_class) == (DeadLetterReason.NOT_RETRYABLE, expected)


def test_a_turn_whose_message_is_refused_stops_the_run(make_spine: MakeSpine) -> None:
    """A turn is nothing without its message, and asking the model again would be refused again, for money."""
    spine = make_spine(Act().as_tool(READ))
    run_id = spine.stage.queued()
    spine.models.replies.append(ModelReply(text="all done"))
    spine.steps.script.fail("settle", StoreRefusedError("too much"))
    executed = spine.execute(run_id, 1)
    assert executed.stopped is not None and executed.stopped.error == "StoreRefusedError: too much"
    run = spine.run(run_id)
    assert run.dead_letter is not None and not run.dead_letter.outcome_unknown


def test_a_turn_that_nobody_can_store_is_asked_again_later(make_spine: MakeSpine) -> None:
    """A database blink fails no observe-only run."""
    spine = make_spine()
    run_id = spine.stage.queued()
    spine.models.replies.append(ModelReply(text="all done"))
    spine.steps.script.fail("settle", *[AWAY] * 100)
    assert spine.execute(run_id, 1) == NOTHING
    step = spine.step(run_id, 1)
    assert (step.state, step.attempt, step.tries) == (StepState.AVAILABLE, 1, 0)


def test_an_agent_that_goes_round_in_circles_is_stopped(make_spine: MakeSpine) -> None:
    """It spends money until somebody looks, or a limit does."""
    spine = make_spine(Act().as_tool(READ))
    run_id = spine.stage.queued()
    for number in range(1, 2 * TURNS_MAX, 2):
        call = ToolCall(id=f"c{number}", name="act", arguments={})
        spine.models.replies.append(ModelReply(tool_calls=(call,)))
        spine.execute(run_id, number)
        spine.execute(run_id, number + 1)
    executed = spine.execute(run_id, 2 * TURNS_MAX + 1)
    assert executed.stopped is not None and "no answer after 5 model turns" in executed.stopped.error
    assert spine.run(run_id).status is RunStatus.FAILED


def test_next_steps_that_the_broker_can_not_take_are_left_to_the_keeper(make_spine: MakeSpine) -> None:
    """They are rows; the settle stands."""
    spine = make_spine(Act().as_tool(READ))
    run_id = spine.asked("act")
    spine.broker.is_away = True
    executed = spine.execute(run_id)
    assert [wakeup.kind for wakeup in executed.wakeups] == [StepKind.MODEL]
    assert spine.step(run_id).state is StepState.COMPLETED


def test_the_lease_is_given_back_whatever_happens(make_spine: MakeSpine) -> None:
    """A mark that stays behind tells of a death, and would be charged as one."""
    for outcome in ("done", KeyError("x"), REFUSED):
        made = make_spine(Act(outcome).as_tool(PLAIN))
        run_id = made.asked("act")
        ref = made.ref(run_id)
        made.executor.execute(ref)
        assert made.leases.view(ref) == LeaseView(owner=None, started_attempt=None)
