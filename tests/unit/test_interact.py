"""An interactive run: the same spine, in the caller's own process, published to nobody."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from agentq.domain.errors import LeasesUnavailableError, NotFoundError, RefusedError, StoreUnavailableError
from agentq.domain.model import ModelReply, Run, RunMode, RunStatus, StepState, ToolCall
from agentq.domain.tools import tool
from agentq.ports.runs import NewRun, RunStore
from agentq.services.interact import Interaction
from agentq.services.reap import session_ref
from tests.support.spine import Spine
from tests.support.stage import PLAIN

MakeSpine = Callable[..., Spine]


@tool
def look() -> str:
    """Look around."""
    return "12 cents"


@tool(effect=PLAIN)
def pay() -> str:
    """Pay it back."""
    return "paid"


class BlinkingRuns:
    """A RunStore that is away for the next so many readings."""

    def __init__(self, real: RunStore, away: int) -> None:
        self._real = real
        self.away = away

    def run(self, run_id: str) -> Run:
        if self.away:
            self.away -= 1
            raise StoreUnavailableError("the database is away")
        return self._real.run(run_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def interaction(spine: Spine, runs: RunStore | None = None) -> Interaction:
    return Interaction(
        executor=spine.executor,
        runs=runs or spine.stage.runs,
        heartbeat=spine.heartbeat,
        clock=spine.clock,
        new_owner=spine.new_owner,
        patience_seconds=60,
    )


def new_run() -> NewRun:
    return NewRun(id=uuid.uuid4().hex, agent="support", input="Refund order 17", mode=RunMode.INTERACTIVE)


@pytest.fixture
def ready(make_spine: MakeSpine) -> Spine:
    """A spine that publishes nothing, with a model that looks, pays and answers."""
    spine = make_spine(look, pay, dispatcher=False)
    calls = tuple(ToolCall(id=name, name=name, arguments={}) for name in ("look", "pay"))
    spine.models.replies += [ModelReply(tool_calls=calls), ModelReply(text="refunded")]
    return spine


def test_it_is_driven_to_its_end(ready: Spine) -> None:
    """With the same steps as in a worker: the write is fenced, alone and after the read."""
    run = interaction(ready).drive(new_run())
    assert (run.status, run.output) == (RunStatus.COMPLETED, "refunded")
    assert [step.result for step in run.steps[1:3]] == ["12 cents", "paid"]
    assert len(ready.steps.fences) == 1


def test_nothing_is_published(ready: Spine) -> None:
    """No worker takes its steps up, and no keeper finds them due."""
    interaction(ready).drive(new_run())
    assert ready.broker.published == []


def test_a_person_sees_it_happen(ready: Spine) -> None:
    """The run is shown before each step and at its end."""
    seen: list[Run] = []
    interaction(ready).drive(new_run(), seen.append)
    assert [run.status for run in seen][:: len(seen) - 1] == [RunStatus.QUEUED, RunStatus.COMPLETED]
    done = [sum(step.state is StepState.COMPLETED for step in run.steps) for run in seen]
    assert done == [0, 1, 2, 3, 4]


def test_the_caller_holds_a_lease_all_the_while(ready: Spine) -> None:
    """That is how the keeper knows that it lives; and it is given back."""
    mine = new_run()
    owners: list[str | None] = []
    interaction(ready).drive(mine, lambda _: owners.append(ready.leases.view(session_ref(mine.id)).owner))
    assert len(set(owners)) == 1 and owners[0] is not None
    assert ready.leases.view(session_ref(mine.id)).owner is None


def test_without_a_lease_nothing_is_stored(ready: Spine) -> None:
    """A run that nobody could notice dying is not begun."""
    mine = new_run()
    ready.leases.script.fail("acquire", LeasesUnavailableError("Redis is away"))
    with pytest.raises(LeasesUnavailableError):
        interaction(ready).drive(mine)
    with pytest.raises(NotFoundError):
        ready.run(mine.id)


def test_two_do_not_drive_one_run(ready: Spine) -> None:
    """The second is told."""
    mine = new_run()
    ready.leases.acquire(session_ref(mine.id), "another", 15)
    with pytest.raises(RefusedError, match="driven by another process"):
        interaction(ready).drive(mine)


def test_a_retry_is_waited_for(ready: Spine) -> None:
    """Nobody else would see to it."""
    ready.models.replies.insert(0, ConnectionResetError("cut"))
    mine = new_run()

    def hurry(run: Run) -> None:
        if run.steps[0].attempt == 2 and run.steps[0].state is StepState.AVAILABLE:
            ready.stage.change_step(run.id, 1, due_at=run.created_at)

    run = interaction(ready).drive(mine, hurry)
    assert (run.status, run.steps[0].attempt) == (RunStatus.COMPLETED, 2)


def test_a_cancel_from_elsewhere_ends_it(ready: Spine) -> None:
    """It is a row like any other."""

    def cancel(run: Run) -> None:
        if run.steps[0].state is StepState.COMPLETED:
            ready.stage.runs.cancel(run.id, actor="ann", reason="no")

    run = interaction(ready).drive(new_run(), cancel)
    assert run.status is RunStatus.CANCELLED


def test_a_failure_settles_it_failed(ready: Spine) -> None:
    """It is no dead letter: the person is there."""
    ready.models.replies[:] = [PermissionError("who?")]
    run = interaction(ready).drive(new_run())
    assert (run.status, run.dead_letter) == (RunStatus.FAILED, None)
    assert run.error is not None and "who?" in run.error


@pytest.mark.parametrize("method", ["load", "fence", "settle"])
def test_a_database_blink_costs_time(ready: Spine, method: str) -> None:
    """The same as in a worker."""
    ready.steps.script.fail(method, StoreUnavailableError("away"))
    assert interaction(ready).drive(new_run()).status is RunStatus.COMPLETED


@pytest.mark.parametrize(("away", "fails"), [(250, False), (1000, True)])
def test_a_database_that_is_away_between_steps_is_waited_for(ready: Spine, away: int, fails: bool) -> None:
    """As long as for a settle: no run fails of a blink, and no caller hangs for ever."""
    runs: Any = BlinkingRuns(ready.stage.runs, away)
    if fails:
        with pytest.raises(StoreUnavailableError):
            interaction(ready, runs).drive(new_run())
    else:
        assert interaction(ready, runs).drive(new_run()).status is RunStatus.COMPLETED
