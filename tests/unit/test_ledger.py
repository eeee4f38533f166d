"""The delivery ledger: events become attempts, and a count is never more certain than what it is from."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentq.domain.events import EventKind
from agentq.domain.ledger import MEANWHILE, Attempt, AttemptEnd, Counted, Held, Suppressed, ledger_of
from agentq.domain.model import Event, Run, RunMode, RunStatus, Step, StepKind, StepState

BEGAN = datetime(2026, 3, 1, 3, 0, tzinfo=UTC)
ANN, BOB, KEEPER = "a/boot/1-1/x", "b/boot/2-2/y", "keeper/1"


def event(second: float, kind: str, actor: str = ANN, attempt: int | None = 1, **data: Any) -> Event:
    at = BEGAN + timedelta(seconds=second)
    return Event(run_id="r", sequence=1, at=at, kind=kind, number=1, attempt=attempt, actor=actor, data=data)


def step(state: StepState = StepState.COMPLETED, attempt: int = 1, suppressed: int | None = None) -> Step:
    return Step(
        run_id="r",
        number=1,
        kind=StepKind.TOOL,
        state=state,
        attempt=attempt,
        suppressed=suppressed,
        finished_at=BEGAN + timedelta(seconds=99),
    )


def run_of(its_step: Step, copied_steps: int = 0) -> Run:
    return Run(
        id="r",
        agent="support",
        input="x",
        status=RunStatus.RUNNING,
        mode=RunMode.QUEUED,
        created_at=BEGAN,
        copied_steps=copied_steps,
        steps=(its_step,),
        age_seconds=100.0,
    )


def attempts_of(its_step: Step, *events: Event, counted: Counted | None = None) -> tuple[Attempt, ...]:
    return ledger_of(run_of(its_step), events, counted).steps[0].attempts


def seconds_of(moment: datetime | None) -> float | None:
    return None if moment is None else (moment - BEGAN).total_seconds()


STAMPED = event(2, "fence.stamped")
DIED = event(9, "step.requeued", KEEPER, charge="crash", error="died", worker=ANN, seconds=3.0)
LETTER = event(9, "run.dead_lettered", KEEPER, reason="NOT_RETRYABLE", outcome_unknown=True, worker=ANN)
SETTLED_2 = event(20, "step.settled", BOB, 2, seconds=1.0)

CASES: list[tuple[str, Step, list[Event], list[tuple[Any, ...]]]] = [
    # What it is, the step, its events, and of each attempt: end, started, ended, worker, who wrote the end.
    ("a read", step(), [event(5, "step.settled", seconds=2.0)], [(AttemptEnd.SETTLED, 3, 5, ANN, ANN)]),
    ("a write", step(), [STAMPED, event(5, "step.settled")], [(AttemptEnd.SETTLED, 2, 5, ANN, ANN)]),
    (
        "a death",
        step(attempt=2),
        [DIED, SETTLED_2],
        [(AttemptEnd.DIED, 6, 9, ANN, KEEPER), (AttemptEnd.SETTLED, 19, 20, BOB, BOB)],
    ),
    (
        "who left without an outcome didn't die",
        step(StepState.AVAILABLE, 2),
        [STAMPED, event(9, "step.requeued", KEEPER, charge="nothing")],
        [(AttemptEnd.REQUEUED, 2, 9, ANN, KEEPER), (None, None, None, None, None)],
    ),
    (
        "a failed call",
        step(StepState.AVAILABLE, 2),
        [event(5, "step.requeued", charge="try", seconds=1.0)],
        [(AttemptEnd.REQUEUED, 4, 5, ANN, ANN), (None, None, None, None, None)],
    ),
    (
        "an unknown write",
        step(StepState.DEAD_LETTERED),
        [STAMPED, LETTER],
        [(AttemptEnd.DEAD_LETTERED, 2, 9, ANN, KEEPER)],
    ),
    (
        "a person's answer",
        step(),
        [STAMPED, LETTER, event(50, "write.resolved", "eve", decision="happened")],
        [(AttemptEnd.RESOLVED, 2, 50, ANN, "eve")],
    ),
    (
        "a person's no ends nothing",
        step(StepState.DEAD_LETTERED),
        [STAMPED, LETTER, event(50, "write.resolved", "eve", decision="did_not_happen")],
        [(AttemptEnd.DEAD_LETTERED, 2, 9, ANN, KEEPER)],
    ),
    (
        "a write that was taken back after it was shown goes on",
        step(StepState.AVAILABLE),
        [STAMPED, LETTER, event(12, "dead_letter.withdrawn"), event(12, "fence.taken_back")],
        [(None, 2, None, ANN, None)],
    ),
    (
        "a probe's answer is recorded by the prober, and the call was another's",
        step(),
        [STAMPED, event(30, "probe.answered", BOB, answer="happened"), event(30, "step.settled", BOB)],
        [(AttemptEnd.SETTLED, 2, 30, ANN, BOB)],
    ),
    (
        "a late outcome overtakes a newer attempt",
        step(attempt=2),
        [STAMPED, DIED, event(12, "fence.stamped", BOB, 2), event(15, "outcome.late")],
        [(AttemptEnd.SETTLED_LATE, 2, 15, ANN, ANN), (AttemptEnd.SUPERSEDED, 12, None, BOB, None)],
    ),
    ("a lost event", step(), [], [(AttemptEnd.SETTLED, None, 99, None, None)]),
    ("a closed step", step(StepState.CLOSED), [], [(AttemptEnd.CLOSED, None, 99, None, None)]),
    (
        "a call that can't be made is nobody's",
        step(),
        [event(5, "step.settled", note="not_called")],
        [(AttemptEnd.SETTLED, None, 5, None, ANN)],
    ),
    ("a step that waits for others", step(StepState.WAITING), [], []),
    (
        "a replay's attempt follows the one that failed",
        step(StepState.AVAILABLE, 2),
        [event(9, "run.failed", "keeper")],
        [(AttemptEnd.FAILED, None, 9, None, "keeper"), (None, None, None, None, None)],
    ),
]


@pytest.mark.parametrize(
    ("its_step", "events", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_events_become_attempts(its_step: Step, events: list[Event], expected: list[tuple[Any, ...]]) -> None:
    """Who looks at 3 a.m. must find in one place who had it, when, and how it ended."""
    found = [
        (each.end, seconds_of(each.started_at), seconds_of(each.ended_at), each.worker, each.ended_by)
        for each in attempts_of(its_step, *events)
    ]
    assert found == expected


def test_what_was_done_about_an_attempt_meanwhile_is_told_in_order() -> None:
    """Handed back, parked and probed: each is why it took so long."""
    [attempt] = attempts_of(
        step(),
        event(1, "step.handed_back", BOB, why="no such tool"),
        event(2, "step.parked", "agentq", tool="pay"),
        STAMPED,
        event(3, "probe.answered", BOB, fence="f", answer="not_yet", asked_again_in_seconds=2.0),
        event(9, "step.settled", BOB),
    )
    told = [(each.what, each.by, dict(each.told)) for each in attempt.happenings]
    assert told == [
        ("handed back", BOB, {"why": "no such tool"}),
        ("parked", "agentq", {}),
        ("probed", BOB, {"answer": "not_yet", "asked_again_in_seconds": 2.0}),
    ]


def test_an_end_that_was_none_is_still_told() -> None:
    """Why a person was called must not be gone once they answered."""
    [attempt] = attempts_of(step(), STAMPED, LETTER, event(50, "write.resolved", "eve", decision="happened"))
    [letter] = attempt.happenings
    assert (letter.what, seconds_of(letter.at), letter.told["reason"]) == ("dead-lettered", 9, "NOT_RETRYABLE")


def test_a_copied_step_has_no_attempts() -> None:
    """Its result came with the copy: nobody delivered it in this run."""
    assert ledger_of(run_of(step(), copied_steps=1), [], None).steps[0].attempts == ()


def test_who_holds_it_now_is_known_from_redis() -> None:
    """A read leaves no trace in SQL before its result."""
    held = Counted(covers_run=True, suppressed={1: 0}, held={1: Held(attempt=1, worker=BOB, seconds=40.0)})
    nobody = Counted(covers_run=True, suppressed={1: 0}, held={})
    [attempt] = attempts_of(step(StepState.AVAILABLE), counted=held)
    assert (attempt.worker, seconds_of(attempt.started_at), attempt.is_held) == (BOB, 60, True)
    assert [each.is_held for each in attempts_of(step(StepState.AVAILABLE), counted=nobody)] == [False]
    assert [each.is_held for each in attempts_of(step(StepState.AVAILABLE))] == [None]


@pytest.mark.parametrize(
    ("stored", "live", "covers_run", "expected"),
    [
        (None, 0, True, Suppressed(count=0, is_exact=True)),
        (1, 3, True, Suppressed(count=3, is_exact=True)),
        (None, None, False, None),  # Redis is away, and nothing was ever kept.
        (None, 0, False, None),  # Redis forgot.
        (None, 2, False, Suppressed(count=2, is_exact=False)),
        (3, None, False, Suppressed(count=3, is_exact=False)),
        (3, 1, False, Suppressed(count=3, is_exact=False)),  # Counted anew after a flush.
        (0, None, False, Suppressed(count=0, is_exact=False)),
    ],
)
def test_a_count_is_never_more_certain_than_what_it_is_from(
    stored: int | None, live: int | None, covers_run: bool, expected: Suppressed | None
) -> None:
    """A number that could be too small says so."""
    counted = None if live is None else Counted(covers_run=covers_run, suppressed={1: live}, held={})
    assert ledger_of(run_of(step(suppressed=stored)), [], counted).steps[0].suppressed == expected


def test_every_event_of_an_attempt_is_told() -> None:
    """A new kind of event must not be missing from the ledger by mistake."""
    of_attempts = {
        *("fence.stamped", "step.settled", "step.requeued", "run.dead_lettered", "run.failed", "outcome.late"),
        "write.resolved",
        *MEANWHILE,
    }
    assert set(EventKind) - of_attempts == {
        *("run.enqueued", "run.refused", "run.completed", "run.cancelled", "run.resumed", "run.replayed", "run.copied"),
        *("cancel.requested", "tool.paused", "tool.resumed", "dead_letter.discarded", "decision.refused"),
        "runs.purged",
    }
