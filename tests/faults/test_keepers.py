"""Keepers under bad conditions: two at once, nothing but orphans, no slot free, long queues."""

import signal
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import psutil
import pytest
from sqlalchemy import update

from agentq.adapters.sql.engine import now_plus
from agentq.adapters.sql.schema import steps
from agentq.domain.model import Fence, RunMode, RunStatus, StepState
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.processes import LoggedProcess
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import environment

ORPHANS_EACH = 50
BACKLOG_MAX = 20
SLACK_SECONDS = 2.0  # For a busy machine.


for_any_database = pytest.mark.parametrize("deployment", ["sqlite", "postgresql"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A short backlog, so that it is reached."""
    folder = tmp_path_factory.mktemp("deployment")
    database = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
    with database as url, System(folder, url, backlog_max=BACKLOG_MAX) as system:
        system.keeper()
        yield system


@for_any_database
class TestTwoReapers:
    @pytest.fixture
    def late_reaper(self, system: System) -> Iterator[LoggedProcess]:
        """It stops itself when it knows what nobody holds."""
        process = LoggedProcess(
            (sys.executable, "-m", "tests.support.stopping_reaper"),
            log_path=system.folder / "late-reaper.log",
            environ=environment(system.settings, system.folder),
            folder=system.folder,
        )
        yield process
        process.stop(seconds=0)

    @pytest.mark.parametrize("tool", ["look", "put"])
    def test_a_late_one_changes_nothing_that_has_moved_on(
        self, system: System, late_reaper: LoggedProcess, tool: str
    ) -> None:
        """It decides on what it read; under the run's lock only what is still so is changed, and no live fence goes."""
        name = f"judged twice {tool}"
        with system.receiver.holding(name):
            with system.keepers_paused():
                _, worker = system.workers("model", "tools")
                run_id = system.enqueue([call(tool, name)])
                system.receiver.wait_for(name)
                first = system.client.get(run_id).pending_effect
                system.end(worker)
                eventually(lambda: self.is_given_up(system, run_id, first), what="nobody holds it any more")
                late_reaper.start()
                eventually(lambda: is_stopped(late_reaper), seconds=30, what="the late reaper knows, and stops")
            system.worker("tools")
            system.receiver.wait_for(name, 2)
            second = system.client.get(run_id).pending_effect
            late_reaper.kill(signal.SIGCONT)
            assert late_reaper.wait() == 0, late_reaper.log()
            assert system.client.get(run_id).pending_effect == second
            assert (second is not None and second != first) == (tool == "put")
        run = system.completes(run_id)
        assert (run.steps[1].attempt, run.steps[1].crashes) == (2, 1)
        assert len(system.events(run_id, "step.requeued")) == 1
        assert len(system.receiver.requests(name)) == 2

    def is_given_up(self, system: System, run_id: str, fence: Fence | None) -> bool:
        is_past_deadline = fence is None or datetime.now(UTC) > fence.deadline_at
        return is_past_deadline and not system.is_held(run_id, 2)


def is_stopped(process: LoggedProcess) -> bool:
    assert process.is_running, process.log()
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


@for_any_database
class TestOrphans:
    def test_runs_that_nobody_knows_of_reach_their_end(self, system: System) -> None:
        """Whatever state they were left in by whoever left them, a keeper and workers are enough."""
        stage = Stage(database=system.database)
        ends = {
            RunStatus.COMPLETED: [
                stage.queued,
                lambda: undispatched(stage),
                lambda: stage.asked(READ),
                lambda: stage.asked(READ, READ, KEYED, PLAIN),
                lambda: stage.fenced(KEYED, deadline_seconds=-60),
                lambda: stage.fenced(PLAIN, deadline_seconds=-60, is_callable=False),
                lambda: without_open_step(stage),
            ],
            RunStatus.FAILED: [
                lambda: stage.fenced(PLAIN, deadline_seconds=-60),
                lambda: stage.queued(mode=RunMode.INTERACTIVE),
                lambda: stage.fenced(PLAIN, deadline_seconds=-60, mode=RunMode.INTERACTIVE),
            ],
            RunStatus.CANCELLED: [lambda: cancelled_without_open_step(stage)],
        }
        with system.keepers_paused():
            orphans = {
                run_id: end for end, makes in ends.items() for make in makes for run_id in many(make, ORPHANS_EACH)
            }
        system.workers("model", "tools")
        for run_id, end in orphans.items():
            assert system.wait(run_id, seconds=60).status is end


def many(make: Callable[[], str], count: int) -> list[str]:
    return [make() for _ in range(count)]


def undispatched(stage: Stage) -> str:
    run_id = stage.queued()
    stage.change_step(run_id, 1, dispatched_at=None)
    return run_id


def without_open_step(stage: Stage) -> str:
    """Its next call was never opened."""
    run_id = stage.asked(READ)
    stage.change_step(run_id, FIRST_CALL, state=StepState.WAITING.value, dispatched_at=None)
    stage.change_run(run_id, open_calls=0)
    return run_id


def cancelled_without_open_step(stage: Stage) -> str:
    run_id = without_open_step(stage)
    stage.change_run(run_id, cancel_requested=True)
    return run_id


class TestBusy:
    def test_a_stale_run_is_reaped_while_a_tool_hangs_on_every_slot(self, system: System) -> None:
        """The keeper waits for no worker."""
        model_worker, *_ = system.workers("model", "tools", "isolated")
        recovery_seconds = system.settings.lease_seconds + system.settings.keeper_interval_seconds
        hung = [f"hung {number}" for number in range(system.settings.tools_concurrency)]
        with system.receiver.holding(*hung, "stale"):
            for name in hung:
                system.enqueue([call("look", name)])
                system.receiver.wait_for(name)
            stale = system.enqueue(asks=["stale"])
            system.receiver.wait_for("stale")
            system.end(model_worker)
            system.receiver.wait_for("stale", 2, seconds=recovery_seconds + SLACK_SECONDS)
            system.receiver.release("stale")
            assert system.completes(stale).steps[0].attempt == 2
            system.worker("model")  # The others have a turn to come.

    def test_runs_that_wait_long_for_a_slow_worker_spend_nothing(self, system: System) -> None:
        """A long queue is no failure: the broker holds a bounded part of it, and no attempt is lost by waiting."""
        with system.receiver.holding("slow"):
            first = system.enqueue(asks=["slow"])
            waiting = [system.enqueue() for _ in range(BACKLOG_MAX * 10)]
            system.worker("model", model_concurrency=1)
            system.receiver.wait_for("slow")
            eventually(lambda: system.broker.queued("model") == BACKLOG_MAX, what="the keeper fills the queue")
            # As if they had waited for many times the grace that a message has.
            with system.database.writing() as connection:
                is_dispatched = (steps.c.dispatched_at.is_not(None), steps.c.state == StepState.AVAILABLE.value)
                connection.execute(update(steps).where(*is_dispatched).values(dispatched_at=now_plus(-86_400)))
            eventually(lambda: system.broker.queued("model") > BACKLOG_MAX, what="they are taken for lost, once")
            assert system.broker.queued("model") <= BACKLOG_MAX * 2
        lengths = []
        for run_id in (first, *waiting):
            run = system.completes(run_id)
            lengths.append(system.broker.queued("model"))
            assert (run.steps[0].attempt, run.steps[0].crashes, run.steps[0].tries) == (1, 0, 0)
        assert max(lengths) <= BACKLOG_MAX * 2
