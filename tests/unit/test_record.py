"""`record_step`: it never throws, and True means stored."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentq.domain.effects import ToolEffect
from agentq.domain.errors import AuditRefusedError, SchemaError, StoreRefusedError, StoreUnavailableError
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, StepRef
from agentq.domain.outcomes import Answer, Join, Recorded, Retried, Stopped
from agentq.ports.steps import Settled, Settlement, StepStore, Verdict
from agentq.services.record import RESULT_NOT_KEPT, StepRecorder
from tests.support.fakes import FakeClock, ScriptedSteps
from tests.support.stage import KEYED, PLAIN, READ

AWAY = StoreUnavailableError("the database is away")
REFUSED = StoreRefusedError("too much")
NO_EVENT = AuditRefusedError("the log is full")
PATIENCE_SECONDS = 60


class TakingSteps:
    """A store that takes everything; what it answers is the test's."""

    verdict = Verdict.APPLIED

    def settle(self, settlement: Settlement) -> Settled:
        return Settled(verdict=self.verdict)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"recording needs no {name}")


class Desk:
    """A recorder with the store and the clock that it works on."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.taking = TakingSteps()
        store: StepStore = self.taking
        self.steps = ScriptedSteps(store)
        self.clock = FakeClock()
        self.recorder = StepRecorder(self.steps, self.clock, patience_seconds=patience_seconds)

    @property
    def last(self) -> Settlement:
        return self.steps.settlements[-1]

    def record(self, settlement: Settlement, *, still_useful: Callable[[], bool] = lambda: True) -> bool:
        return self.recorder.record_step(settlement, still_useful=still_useful)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def settlement(effect: ToolEffect = READ, change: Recorded | Retried | Stopped | None = None) -> Settlement:
    return Settlement(
        ref=StepRef(run_id="r", number=2, attempt=1),
        owner="me",
        effect=effect,
        change=change or Recorded(result="found", then=Join()),
        fence_id="f" if effect.is_write else None,
    )


@pytest.mark.parametrize("verdict", list(Verdict))
def test_whatever_the_settle_says_it_is_stored(desk: Desk, verdict: Verdict) -> None:
    """A late settle is neither true nor false: that is the settle's own answer."""
    desk.taking.verdict = verdict
    assert desk.record(settlement())
    assert desk.recorder.answer == Settled(verdict=verdict)


@pytest.mark.parametrize("effect", list(ToolEffect))
def test_a_store_that_is_away_is_asked_again(desk: Desk, effect: ToolEffect) -> None:
    """Recording again isn't writing again; it waits longer each time, and not for ever longer."""
    desk.steps.script.fail("settle", *[AWAY] * 8)
    assert desk.record(settlement(effect))
    assert desk.clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2])
    assert len({id(each) for each in desk.steps.settlements}) == 1, "the same settlement, so that it finds itself"


def test_a_lost_reply_is_not_an_answer(desk: Desk) -> None:
    """The store says ALREADY to the same settlement by the same owner."""
    desk.steps.script.lose_reply("settle", AWAY)
    assert desk.record(settlement(PLAIN))
    assert desk.steps.settlements[0] is desk.steps.settlements[1]


@pytest.mark.parametrize("effect", list(ToolEffect))
def test_patience_has_an_end(desk: Desk, effect: ToolEffect) -> None:
    """A worker must not be held for ever; whoever called decides what follows."""
    desk.steps.script.fail("settle", *[AWAY] * 1000)
    assert not desk.record(settlement(effect))
    assert (desk.recorder.error, desk.recorder.answer) == (AWAY, None)
    assert PATIENCE_SECONDS - 2 <= sum(desk.clock.slept) <= PATIENCE_SECONDS


def test_without_patience_it_is_tried_once() -> None:
    """For whoever has waited already."""
    desk = Desk(patience_seconds=0)
    desk.steps.script.fail("settle", AWAY)
    assert not desk.record(settlement(PLAIN))
    assert (len(desk.steps.settlements), desk.clock.slept) == (1, [])


@pytest.mark.parametrize(("effect", "is_recorded"), [(READ, False), (KEYED, True), (PLAIN, True)])
def test_a_lost_lease_ends_the_wait_of_a_read_alone(desk: Desk, effect: ToolEffect, is_recorded: bool) -> None:
    """Somebody else reads again; nobody else knows what a write came to."""
    desk.steps.script.fail("settle", AWAY, AWAY)
    assert desk.record(settlement(effect), still_useful=lambda: False) == is_recorded


def test_a_reads_refused_event_is_left_out(desk: Desk) -> None:
    """Fail-soft: the result is stored, and the store counts what is missing."""
    desk.steps.script.fail("settle", NO_EVENT)
    assert desk.record(settlement())
    assert desk.last == replace(settlement(), with_events=False)


@pytest.mark.parametrize("effect", [KEYED, PLAIN])
def test_a_writes_refused_event_is_an_end_at_once(desk: Desk, effect: ToolEffect) -> None:
    """Fail-closed: no run goes on over a write that the audit log doesn't hold."""
    desk.steps.script.fail("settle", NO_EVENT)
    assert not desk.record(settlement(effect))
    assert (desk.recorder.error, desk.clock.slept) == (NO_EVENT, [])
    assert all(each.with_events for each in desk.steps.settlements)


@pytest.mark.parametrize(
    ("effect", "result", "is_error"),
    [
        (READ, "no result: too much", True),
        (KEYED, "the call was made and succeeded; its result was not kept: too much", False),
        (PLAIN, "the call was made and succeeded; its result was not kept: too much", False),
    ],
)
def test_a_refused_result_becomes_a_notice(desk: Desk, effect: ToolEffect, result: str, is_error: bool) -> None:
    """Of a write the model must hear that it happened, or it asks for it again."""
    desk.steps.script.fail("settle", REFUSED)
    assert desk.record(settlement(effect))
    assert desk.last.change == Recorded(result=result, then=Join(), is_error=is_error, note=RESULT_NOT_KEPT)


def test_trouble_may_come_in_any_order(desk: Desk) -> None:
    """Away, then refused, then its event too: a read is stored all the same."""
    desk.steps.script.fail("settle", AWAY, REFUSED, AWAY, NO_EVENT, AWAY)
    assert desk.record(settlement())
    assert desk.last.with_events is False and isinstance(desk.last.change, Recorded)
    assert desk.last.change.note == RESULT_NOT_KEPT


@pytest.mark.parametrize(
    "change",
    [
        Recorded(result={"role": "assistant"}, then=Answer(output="done")),
        Retried(charge=Charge.TRY, error="refused"),
        Stopped(reason=DeadLetterReason.NOT_RETRYABLE, failure_class=FailureClass.AUTH, error="who?"),
    ],
)
def test_what_has_no_result_to_leave_out_is_refused(desk: Desk, change: Recorded | Retried | Stopped) -> None:
    """A model turn is nothing without its message: a notice in its place would be read as the model's own words."""
    desk.steps.script.fail("settle", REFUSED)
    assert not desk.record(settlement(change=change))
    assert (desk.recorder.error, len(desk.steps.settlements)) == (REFUSED, 1)


@pytest.mark.parametrize("errors", [[REFUSED, REFUSED], [NO_EVENT, NO_EVENT], [REFUSED, NO_EVENT, REFUSED]])
def test_a_notice_that_is_refused_too_is_an_end(desk: Desk, errors: list[Exception]) -> None:
    """Nothing is tried without end."""
    desk.steps.script.fail("settle", *errors)
    assert not desk.record(settlement())
    assert desk.recorder.error is errors[-1]


@pytest.mark.parametrize("effect", list(ToolEffect))
@pytest.mark.parametrize("error", [TypeError("a defect"), SchemaError("run it"), RecursionError(), MemoryError()])
def test_it_never_throws(desk: Desk, effect: ToolEffect, error: Exception) -> None:
    """Whoever calls it holds the only knowledge of what happened."""
    desk.steps.script.fail("settle", error)
    assert not desk.record(settlement(effect))
    assert desk.recorder.error is error
