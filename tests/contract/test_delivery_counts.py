"""What a settlement carries of a step's deliveries is stored with it, the same on every path and every database."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.effects import ToolEffect
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, Event
from agentq.domain.outcomes import Join, Recorded, Retried, Stopped
from agentq.ports.steps import Settlement, Verdict
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage

DONE = Recorded(result="ok", then=Join())
AGAIN = Retried(charge=Charge.TRY, error="refused")
STOPPED = Stopped(reason=DeadLetterReason.NOT_RETRYABLE, failure_class=FailureClass.AUTH, error="no")
WORKER = "host/boot/7-7/x"
HELD_SECONDS = 1.2344


@pytest.fixture(params=["sqlite", "postgresql", "postgresql, in general"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """On PostgreSQL what fits is one function call, the rest is Python: both must mean the same."""
    with fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql() as url:
        stage = Stage(database=Database(url))
        stage.steps = SqlStepStore(stage.database, always_general=request.param == "postgresql, in general")
        yield stage
        stage.database.dispose()


@dataclass
class Case:
    """A run with a first call of that effect, and settlements of it."""

    stage: Stage
    effect: ToolEffect

    def __post_init__(self) -> None:
        self.run_id = self.stage.asked(READ) if self.effect is READ else self.stage.fenced(self.effect)

    def settlement(self, change: Recorded | Retried | Stopped, **values: Any) -> Settlement:
        settlement = Settlement(
            ref=self.stage.ref(self.run_id, FIRST_CALL),
            owner=WORKER,
            effect=self.effect,
            change=change,
            fence_id=None if self.effect is READ else self.run_id,
            held_seconds=HELD_SECONDS,
        )
        return replace(settlement, **values)

    def settle(self, change: Recorded | Retried | Stopped, **values: Any) -> None:
        settled = self.stage.steps.settle(self.settlement(change, **values))
        assert settled.verdict is Verdict.APPLIED

    @property
    def suppressed(self) -> int | None:
        return self.stage.runs.run(self.run_id).steps[FIRST_CALL - 1].suppressed

    def event(self, kind: str) -> Event:
        return next(
            each for each in self.stage.runs.events(self.run_id) if each.kind == kind and each.number == FIRST_CALL
        )


@pytest.mark.parametrize("effect", [READ, KEYED, PLAIN])
@pytest.mark.parametrize("change", [DONE, STOPPED])
def test_the_count_is_stored_with_the_end(stage: Stage, effect: ToolEffect, change: Recorded | Stopped) -> None:
    """Redis forgets it after a day."""
    case = Case(stage, effect)
    assert case.suppressed is None
    case.settle(change, suppressed=3)
    assert case.suppressed == 3


@pytest.mark.parametrize("effect", [READ, KEYED])
def test_the_count_is_stored_with_a_requeue_and_replaced_by_the_next(stage: Stage, effect: ToolEffect) -> None:
    """It counts over all attempts, so that the newest one is the whole."""
    case = Case(stage, effect)
    case.settle(AGAIN, suppressed=2)
    assert case.suppressed == 2
    case.settle(DONE, suppressed=5, owner="host/boot/8-8/y", effect=READ, fence_id=None)
    assert case.suppressed == 5


@pytest.mark.parametrize("change", [DONE, STOPPED, AGAIN])
def test_who_does_not_know_leaves_what_is_known(stage: Stage, change: Recorded | Retried | Stopped) -> None:
    """At least so many came to nothing, whatever Redis forgot since."""
    case = Case(stage, READ)
    case.settle(AGAIN, suppressed=2)
    case.settle(change, suppressed=None, owner="host/boot/8-8/y")
    assert case.suppressed == 2


def test_a_late_outcome_leaves_the_count_alone(stage: Stage) -> None:
    """What it carries is older than what the requeue stored."""
    case = Case(stage, KEYED)
    late = case.settlement(DONE, suppressed=1)
    case.settle(AGAIN, suppressed=4, owner="keeper/1")
    assert stage.steps.settle(late).verdict is Verdict.LATE
    assert case.suppressed == 4


@pytest.mark.parametrize(
    ("change", "kind"), [(DONE, "step.settled"), (AGAIN, "step.requeued"), (STOPPED, "run.dead_lettered")]
)
def test_the_event_of_an_end_says_who_had_it_and_for_how_long(
    stage: Stage, change: Recorded | Retried | Stopped, kind: str
) -> None:
    """Where no fence's event says so: a read writes one event, and it has to tell the whole."""
    read = Case(stage, READ)
    read.settle(change)
    assert read.event(kind).data["seconds"] == 1.234
    assert "worker" not in read.event(kind).data
    dead = Case(stage, READ)
    dead.settle(change, owner="keeper/1", held_by=WORKER)
    assert (dead.event(kind).data["worker"], dead.event(kind).actor) == (WORKER, "keeper/1")
    fenced = Case(stage, KEYED)
    fenced.settle(change)
    assert "seconds" not in fenced.event(kind).data, "its fence's event has the time"


def test_a_dead_letter_s_event_says_why(stage: Stage) -> None:
    """The dead letter itself is closed and out of sight after a replay."""
    case = Case(stage, READ)
    case.settle(STOPPED)
    assert case.event("run.dead_lettered").data["error"] == "no"


def test_who_hands_a_step_back_is_written_down(stage: Stage) -> None:
    """Which worker has old code is the question then."""
    case = Case(stage, READ)
    stage.steps.hand_back(stage.ref(case.run_id, FIRST_CALL), due_in_seconds=0, why="no such tool", owner=WORKER)
    assert case.event("step.handed_back").actor == WORKER


def test_how_old_a_run_is_is_read_with_it(stage: Stage) -> None:
    """Against it is held for how long Redis has counted; both are durations, so no two clocks meet."""
    case = Case(stage, READ)
    loaded = stage.steps.load(stage.ref(case.run_id, FIRST_CALL))
    assert loaded is not None
    run = stage.runs.run(case.run_id)
    assert run.age_seconds is not None and 0 <= loaded.run_age_seconds <= run.age_seconds < 60
    [step] = [each for each in stage.keeping.in_flight(after=None, limit=9) if each.wakeup.ref.run_id == case.run_id]
    assert 0 <= step.run_age_seconds < 60
