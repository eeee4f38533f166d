"""An interactive caller that is killed in the middle of a step: its run fails, and nothing of it is hidden."""

import json
import signal
import sys
import uuid
from collections.abc import Iterator

import pytest

from agentq.domain.errors import AlreadyDecidedError
from agentq.domain.model import Run, RunMode, RunStatus, StepState
from tests.support.databases import fresh_sqlite
from tests.support.processes import LoggedProcess
from tests.support.system import AGENT, Call, System, call
from tests.support.workers import environment


@pytest.fixture(scope="module", params=["with workers around", "without workers"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("interactive")
    with fresh_sqlite(folder) as url, System(folder, url) as system:
        if request.param == "with workers around":
            system.workers("model", "tools")
        system.keeper()
        yield system


class Callers:
    """`agentq run`, each at a terminal of its own."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._processes: list[LoggedProcess] = []

    def run(self, *calls: Call) -> LoggedProcess:
        """Begin a run whose one turn asks for these calls."""
        arguments = ("run", AGENT, "--json", "--input-json", json.dumps({"turns": [calls]}))
        caller = LoggedProcess(
            (sys.executable, "-m", "agentq.cli.main", *arguments),
            log_path=self._system.folder / f"caller-{uuid.uuid4().hex}.log",
            environ=environment(self._system.settings, self._system.folder),
            folder=self._system.folder,
        )
        self._processes.append(caller)
        caller.start()
        return caller

    def stop(self) -> None:
        for process in self._processes:
            process.stop()


@pytest.fixture
def callers(system: System) -> Iterator[Callers]:
    callers = Callers(system)
    yield callers
    callers.stop()
    system.check()


def kill(caller: LoggedProcess) -> None:
    """Nothing of it gets to say anything."""
    caller.kill(signal.SIGKILL)
    caller.wait()


def ended(system: System, run_id: str | None) -> Run:
    assert run_id is not None
    run = system.wait(run_id)
    assert run.mode is RunMode.INTERACTIVE
    return run


def test_killed_in_the_middle_of_a_read(system: System, callers: Callers) -> None:
    """FAILED, and nobody goes on with it: the person who asked is gone."""
    name = uuid.uuid4().hex
    with system.receiver.holding(name):
        caller = callers.run(call("look", name))
        request = system.receiver.wait_for(name)
        kill(caller)
        run = ended(system, request.run_id)
    assert (run.status, run.error) == (RunStatus.FAILED, "the process that drove this run is gone")
    assert (run.dead_letter, run.pending_effect) == (None, None)
    assert len(system.receiver.requests(name)) == 1
    assert system.client.dead_letters(agent=AGENT, limit=100) == []


def test_killed_in_the_middle_of_a_plain_write(system: System, callers: Callers) -> None:
    """FAILED; its write is listed like a dead letter, can be resolved, and is made by nobody again."""
    name = uuid.uuid4().hex
    with system.receiver.holding(name):
        caller = callers.run(call("pay", name), call("look", f"{name} after"))
        request = system.receiver.wait_for(name)
        kill(caller)
        run = ended(system, request.run_id)
    assert run.status is RunStatus.FAILED
    assert run.dead_letter is not None and run.dead_letter.outcome_unknown
    assert run.pending_effect is not None and run.pending_effect.tool == "pay"
    assert [letter.run_id for letter in system.client.dead_letters(outcome_unknown=True)] == [run.id]

    step = system.client.resolve(run.id, happened="paid", reason="the receiver says so")

    assert (step.state, step.result) == (StepState.COMPLETED, "paid")
    with pytest.raises(AlreadyDecidedError):
        system.client.resolve(run.id, did_not_happen=True, looked_at="now")
    assert system.client.get(run.id).pending_effect is None
    assert system.receiver.effects_of(run.id) == 1
    assert system.receiver.requests(f"{name} after") == []


def test_a_living_callers_run_is_left_alone(system: System, callers: Callers) -> None:
    """However long its call takes: a pass of the keeper that fails a lost caller's run leaves it to its own."""
    living, lost = uuid.uuid4().hex, uuid.uuid4().hex
    with system.receiver.holding(living, lost):
        caller = callers.run(call("look", living))
        request = system.receiver.wait_for(living)
        doomed = callers.run(call("look", lost))
        lost_request = system.receiver.wait_for(lost)
        kill(doomed)
        ended(system, lost_request.run_id)
    assert caller.wait() == 0
    assert ended(system, request.run_id).status is RunStatus.COMPLETED
    assert {each.pid for each in system.receiver.requests(living)} == {caller.pid}
