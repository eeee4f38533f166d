"""Probes: what a tool may declare, what follows from each answer, and how the spine and the reaper ask."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentq import ProbeAnswer
from agentq.domain.errors import ConfigurationError, StoreUnavailableError
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, Fence, RunMode, RunStatus, Step, StepKind, StepRef, StepState
from agentq.domain.outcomes import Retried, Stopped
from agentq.domain.probes import ProbeReport, ProbeVerdict
from agentq.domain.tools import ResultNotJsonError, Tool, ToolContext, ToolError, tool
from agentq.ports.dispatch import Wakeup
from agentq.ports.keeping import InFlight
from agentq.ports.leases import LeaseView
from agentq.ports.steps import Loaded, RunHead
from agentq.services.probe import AskAgain, after_probe
from agentq.services.reap import AskProbe, Republish, judge
from tests.support.spine import PROBES_MAX, Spine, policy
from tests.support.stage import FIRST_CALL, KEYED, PLAIN

MakeSpine = Callable[..., Spine]
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def pay(context: ToolContext, order: str, cents: int = 5) -> str:
    """Pay for an order.

    Args:
        order: whose
    """
    return f"{order}: {cents}"


def payer(**options: Any) -> Tool:
    return tool(effect=PLAIN, **options)(pay)


# --- Declaring ------------------------------------------------------------------------------------------------------


def test_a_probe_takes_the_call_s_arguments_and_key() -> None:
    """They are all that it needs to find the call."""
    asked = []
    paying = payer()

    @paying.probe
    def look_up(order: str, context: ToolContext, cents: int = 5) -> ProbeAnswer:
        asked.append((order, cents, context.idempotency_key))
        return ProbeAnswer.happened({"order": order})

    report = paying.ask(ToolContext(idempotency_key="k"), {"order": "17"})
    assert (report.verdict, report.result, asked) == (ProbeVerdict.HAPPENED, {"order": "17"}, [("17", 5, "k")])
    assert paying.has_probe and not payer().has_probe


def test_a_probe_may_be_async() -> None:
    """So may its tool."""
    paying = payer()

    @paying.probe
    async def look_up(order: str, cents: int = 5) -> ProbeAnswer:
        return ProbeAnswer.not_yet()

    assert paying.ask(ToolContext(), {"order": "17"}).verdict is ProbeVerdict.NOT_YET


def takes_less(order: str) -> ProbeAnswer:
    return ProbeAnswer.cant_tell()


def takes_more(order: str, shop: str, cents: int = 5) -> ProbeAnswer:
    return ProbeAnswer.cant_tell()


def takes_another_type(order: int, cents: int = 5) -> ProbeAnswer:
    return ProbeAnswer.cant_tell()


def takes_no_default(order: str, cents: int) -> ProbeAnswer:
    return ProbeAnswer.cant_tell()


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        (takes_less, "lacks 'cents'"),
        (takes_more, "takes 'shop' besides"),
        (takes_another_type, "another type or default for 'order'"),
        (takes_no_default, "another type or default for 'cents'"),
        (ProbeAnswer, "can't be the probe of 'pay'"),
    ],
)
def test_a_probe_that_the_arguments_don_t_fit_is_refused(probe: Callable[..., Any], problem: str) -> None:
    """It would fail on the day when somebody's payment is in doubt."""
    with pytest.raises(ConfigurationError, match=problem):
        payer().probe(probe)


def test_only_a_write_has_a_probe_and_only_one() -> None:
    """Two could disagree, and a read is simply made again."""
    paying = payer()
    paying.probe(finds_nothing)
    with pytest.raises(ConfigurationError, match="has a probe already"):
        paying.probe(finds_nothing)
    with pytest.raises(ConfigurationError, match="only reads"):
        tool(pay).probe(finds_nothing)


def finds_nothing(order: str, cents: int = 5) -> ProbeAnswer:
    return ProbeAnswer.did_not_happen()


def test_nonsense_counts_as_can_t_tell(caplog: pytest.LogCaptureFixture) -> None:
    """It must neither pass for an answer nor go unnoticed."""
    paying = payer()

    @paying.probe
    def look_up(order: str, cents: int = 5) -> Any:
        return True

    assert paying.ask(ToolContext(), {"order": "17"}).verdict is ProbeVerdict.CANT_TELL
    assert "the probe of pay returned bool, no ProbeAnswer" in caplog.text


def test_a_result_that_is_no_json_is_told_apart_from_a_failed_probe() -> None:
    """The call happened all the same."""
    paying = payer()

    @paying.probe
    def look_up(order: str, cents: int = 5) -> ProbeAnswer:
        return ProbeAnswer.happened(object())

    with pytest.raises(ResultNotJsonError):
        paying.ask(ToolContext(), {"order": "17"})


# --- What follows from an answer ------------------------------------------------------------------------------------


def fence(**fields: Any) -> Fence:
    values: dict[str, Any] = {
        "id": "f",
        "number": 2,
        "attempt": 1,
        "tool": "pay",
        "effect": PLAIN,
        "owner": "host/boot/9-1/x",
        "stamped_at": NOW - timedelta(seconds=30),
        "deadline_at": NOW,
        "settles_within_seconds": 10.0,
        "has_probe": True,
        "probes": 1,
    }
    return Fence(**{**values, **fields})


def looked(seconds: float, **fields: Any) -> Loaded:
    """The step, read that long after the fence's deadline."""
    step = Step(
        run_id="r",
        number=2,
        kind=StepKind.TOOL,
        state=StepState.AVAILABLE,
        attempt=1,
        tool="pay",
        effect=PLAIN,
        **fields,
    )
    run = RunHead(id="r", agent="support", input="x", mode=RunMode.QUEUED, metadata={})
    return Loaded(run=run, step=step, loaded_at=NOW + timedelta(seconds=seconds))


NOTHING = ProbeReport(verdict=ProbeVerdict.DID_NOT_HAPPEN)
NOT_YET = ProbeReport(verdict=ProbeVerdict.NOT_YET)
CANT_TELL = ProbeReport(verdict=ProbeVerdict.CANT_TELL)
BLINKED = ProbeReport(verdict=ProbeVerdict.FAILED, error="reset", is_worth_repeating=True)
BROKEN = ProbeReport(verdict=ProbeVerdict.FAILED, error="no such page")
CRASHED = Charge.CRASH
UNKNOWN = "unknown"
LATER, SETTLED = "later", "when it is settled"

ANSWERS: dict[str, tuple[ProbeReport, float, Fence, object]] = {
    "nothing, in time": (NOTHING, -5, fence(), LATER),
    "nothing, before the receiver has settled": (NOTHING, 5, fence(), LATER),
    "nothing, half of the budget spent early": (NOTHING, 5, fence(probes=4), SETTLED),
    "nothing, at the last moment that doesn't count": (NOTHING, 10, fence(), LATER),
    "nothing, when it counts": (NOTHING, 11, fence(), CRASHED),
    "nothing, when it counts, budget spent": (NOTHING, 11, fence(probes=8), CRASHED),
    "nothing, after a call that may be tried again": (
        NOTHING,
        11,
        fence(failure_class=FailureClass.CONNECTION, error="reset"),
        Charge.TRY,
    ),
    "nothing, after a call that was refused for good": (
        NOTHING,
        11,
        fence(failure_class=FailureClass.AUTH, error="401"),
        DeadLetterReason.NOT_RETRYABLE,
    ),
    "nothing, and nobody can say for how long, in time": (NOTHING, -5, fence(settles_within_seconds=None), LATER),
    "nothing, and nobody can say for how long": (NOTHING, 99, fence(settles_within_seconds=None), UNKNOWN),
    "not yet, in time": (NOT_YET, -5, fence(), LATER),
    "not yet": (NOT_YET, 99, fence(), LATER),
    "not yet, budget spent": (NOT_YET, 99, fence(probes=8), UNKNOWN),
    "not yet, budget spent, but the caller may live": (NOT_YET, -5, fence(probes=8), SETTLED),
    "can't tell, but the caller may live": (CANT_TELL, -5, fence(), SETTLED),
    "can't tell": (CANT_TELL, 1, fence(), UNKNOWN),
    "it blinked": (BLINKED, 99, fence(), LATER),
    "it blinked too often": (BLINKED, 99, fence(probes=8), UNKNOWN),
    "it is broken": (BROKEN, 99, fence(), UNKNOWN),
    "it is broken, but the caller may live": (BROKEN, -5, fence(), SETTLED),
}


@pytest.mark.parametrize("situation", ANSWERS)
def test_what_follows_from_an_answer(situation: str) -> None:
    """Only "happened" counts at any time; nothing is given up before the caller must have ended."""
    report, seconds, over, expected = ANSWERS[situation]
    change = after_probe(report, over, looked(seconds), policy=policy(), probes_max=PROBES_MAX, chance=0.5)
    match change:
        case AskAgain():
            assert (SETTLED if change.waits_for_fence else LATER) == expected
        case Retried():
            assert change.charge is expected
        case Stopped():
            assert (UNKNOWN if change.outcome_unknown else change.reason) == expected


def test_waits_for_an_answer_grow() -> None:
    """A receiver that takes its time isn't asked every second."""
    waits = [
        after_probe(NOT_YET, fence(probes=asked), looked(99), policy=policy(), probes_max=99, chance=0.5)
        for asked in (1, 2, 3, 9)
    ]
    assert waits == [AskAgain(wait_seconds=seconds) for seconds in (4.0, 8.0, 16.0, 60.0)]


# --- The reaper -----------------------------------------------------------------------------------------------------

DIED = LeaseView(owner=None, started_attempt=1)
NOBODY = LeaseView(owner=None, started_attempt=None)


def in_flight(over: Fence, *, is_past: bool = False, seconds: float = 1.0, is_cancelled: bool = False) -> InFlight:
    return InFlight(
        wakeup=Wakeup(ref=StepRef(run_id="r", number=2, attempt=1), agent="support", kind=StepKind.TOOL, tool="pay"),
        crashes=0,
        dispatched_seconds=seconds,
        republished=0,
        is_cancelled=is_cancelled,
        fence=over,
        fence_is_past_deadline=is_past,
    )


@pytest.mark.parametrize(
    ("step", "view", "expected"),
    [
        (in_flight(fence(probes=0)), DIED, AskProbe),
        (in_flight(fence(probes=7), is_past=True), DIED, AskProbe),
        (in_flight(fence(probes=8)), DIED, type(None)),
        (in_flight(fence(probes=8), is_past=True), DIED, Stopped),
        (in_flight(fence(), is_past=True), NOBODY, type(None)),
        (in_flight(fence(), is_past=True, seconds=31), NOBODY, Republish),
        (in_flight(fence(effect=KEYED)), DIED, type(None)),
        (in_flight(fence(effect=KEYED), is_cancelled=True), DIED, AskProbe),
    ],
)
def test_the_reaper_has_a_probe_asked_when_nobody_holds_it(step: InFlight, view: LeaseView, expected: type) -> None:
    """A person is called only when the budget is spent; a question that waits in a queue isn't counted again."""
    assert isinstance(judge(step, view, policy(), is_drained=False, probes_max=PROBES_MAX), expected)


def test_a_turn_whose_process_died_runs_next_alone_and_only_then_is_charged() -> None:
    """A hundred turns shared the process; ninety-nine of them are innocent."""
    step = in_flight(fence())
    turn = replace(step, fence=None, wakeup=replace(step.wakeup, kind=StepKind.MODEL, tool=None))
    first = judge(turn, DIED, policy(), is_drained=False, probes_max=PROBES_MAX)
    assert isinstance(first, Retried) and (first.charge, first.is_isolated) == (Charge.NOTHING, True)
    alone = replace(turn, wakeup=replace(turn.wakeup, is_isolated=True))
    second = judge(alone, DIED, policy(), is_drained=False, probes_max=PROBES_MAX)
    assert isinstance(second, Retried) and second.charge is Charge.CRASH


# --- The spine ------------------------------------------------------------------------------------------------------


class Paying:
    """A plain write that does `outcome`, and a probe that gives the answers in their order, the last one for ever."""

    def __init__(self, outcome: object, *answers: object) -> None:
        self.outcome = outcome
        self.answers = list(answers)
        self.calls = 0
        self.keys: list[str] = []

    def as_tool(self, **options: Any) -> Tool:
        @tool(effect=PLAIN, name="pay", **{"settles_within": 0.0, **options})
        def act(context: ToolContext) -> Any:
            self.calls += 1
            self.keys.append(context.idempotency_key)
            return self._or_raise(self.outcome)

        @act.probe
        def look_up(context: ToolContext) -> Any:
            self.keys.append(context.idempotency_key)
            return self._or_raise(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

        return act

    def _or_raise(self, outcome: object) -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


RESET = ConnectionResetError("reset")


def answers(spine: Spine, run_id: str) -> list[str]:
    return [event.data["answer"] for event in spine.events(run_id, "probe.answered")]


def test_a_call_that_raised_is_asked_about_at_once(make_spine: MakeSpine) -> None:
    """Mostly the reply was lost, not the request; the same key finds it."""
    paying = Paying(RESET, ProbeAnswer.happened("found"))
    spine = make_spine(paying.as_tool())
    run_id = spine.asked("pay")
    spine.execute(run_id)
    step = spine.step(run_id)
    assert (step.state, step.result, paying.calls) == (StepState.COMPLETED, "found", 1)
    assert len(set(paying.keys)) == 1
    assert answers(spine, run_id) == ["happened"]


def test_a_call_that_raised_is_asked_about_again_and_never_made_again_meanwhile(make_spine: MakeSpine) -> None:
    """Its fence stands; each delivery is a question."""
    paying = Paying(RESET, ProbeAnswer.did_not_happen(), ProbeAnswer.not_yet(), ProbeAnswer.happened("found"))
    spine = make_spine(paying.as_tool())
    run_id = spine.asked("pay")
    spine.execute(run_id)
    fence = spine.run(run_id).pending_effect
    assert fence is not None and (fence.probes, fence.error) == (1, "ConnectionResetError: reset")
    for _ in range(2):
        spine.stage.change_step(run_id, FIRST_CALL, due_at=NOW.replace(year=2020))
        spine.execute(run_id)
    assert (spine.step(run_id).result, paying.calls) == ("found", 1)
    assert answers(spine, run_id) == ["did_not_happen", "not_yet", "happened"]


def test_a_call_that_didn_t_happen_is_made_again_when_that_is_certain(make_spine: MakeSpine) -> None:
    """By a look that came after the deadline and what the receiver may still do."""
    paying = Paying(RESET, ProbeAnswer.did_not_happen())
    spine = make_spine(paying.as_tool())
    run_id = spine.asked("pay")
    spine.execute(run_id)
    spine.stage.age_fence(run_id, timedelta(minutes=1))
    spine.stage.change_step(run_id, FIRST_CALL, due_at=NOW.replace(year=2020))
    spine.execute(run_id)
    step = spine.step(run_id)
    assert (step.attempt, step.tries, step.state, paying.calls) == (2, 1, StepState.AVAILABLE, 1)
    assert spine.run(run_id).pending_effect is None


@pytest.mark.parametrize("answer", [ProbeAnswer.cant_tell(), LookupError("no such page"), True])
def test_a_call_that_raised_and_that_nobody_can_tell_of_is_unknown_at_once(
    make_spine: MakeSpine, answer: object
) -> None:
    """Its caller has ended, so there is nothing to wait for."""
    paying = Paying(RESET, answer)
    spine = make_spine(paying.as_tool())
    run_id = spine.asked("pay")
    stopped = spine.execute(run_id).stopped
    assert stopped is not None and stopped.outcome_unknown and stopped.error == "ConnectionResetError: reset"


def test_an_interactive_run_asks_at_once_and_never_again(make_spine: MakeSpine) -> None:
    """A person waits at a terminal; the write is listed."""
    paying = Paying(RESET, ProbeAnswer.not_yet())
    spine = make_spine(paying.as_tool(), dispatcher=False)
    run_id = spine.asked("pay", mode=RunMode.INTERACTIVE)
    spine.execute(run_id)
    run = spine.run(run_id)
    assert (run.status, run.dead_letter is not None and run.dead_letter.outcome_unknown) == (RunStatus.FAILED, True)


def test_a_definite_refusal_is_not_asked_about(make_spine: MakeSpine) -> None:
    """The receiver has said what became of it."""
    paying = Paying(ToolError("declined", nothing_happened=True), AssertionError("asked"))
    spine = make_spine(paying.as_tool())
    run_id = spine.asked("pay")
    spine.execute(run_id)
    assert (spine.step(run_id).result, answers(spine, run_id)) == ("declined", [])


def test_a_worker_without_the_tool_leaves_the_question_to_others(make_spine: MakeSpine) -> None:
    """In the middle of a deploy another worker knows it."""
    paying = Paying(RESET, ProbeAnswer.not_yet())
    spine = make_spine(paying.as_tool())
    run_id = spine.asked("pay")
    spine.execute(run_id)
    spine.know()
    spine.stage.change_step(run_id, FIRST_CALL, due_at=NOW.replace(year=2020))
    spine.execute(run_id)
    assert answers(spine, run_id) == ["not_yet", "failed"]
    fence = spine.run(run_id).pending_effect
    assert fence is not None and fence.probes == 2


def test_a_probe_may_take_its_own_time_and_no_more(make_spine: MakeSpine) -> None:
    """The kernel ends one that hangs."""
    spine = make_spine(Paying(RESET, ProbeAnswer.happened()).as_tool())
    spine.execute(spine.asked("pay"))
    assert spine.call_limit.limits[-1] == 10.0


def test_what_a_probe_said_waits_for_the_database(make_spine: MakeSpine) -> None:
    """How the call failed is known to this worker alone: forgotten, its try would be charged as a crash."""
    spine = make_spine(Paying(RESET, ProbeAnswer.not_yet()).as_tool())
    run_id = spine.asked("pay")
    spine.steps.script.fail("ask_again", StoreUnavailableError("away"), StoreUnavailableError("still away"))
    spine.execute(run_id)
    fence = spine.run(run_id).pending_effect
    assert fence is not None and fence.failure_class is FailureClass.CONNECTION
    assert spine.leases.view(spine.ref(run_id)).owner is None
