"""Two deployments, each with a database of its own, on one Redis."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentq import AgentQ
from agentq.adapters.sql.engine import Database
from agentq.cli.exit_codes import ExitCode
from agentq.config.settings import Settings
from agentq.domain.model import RunStatus
from tests.support.databases import fresh_sqlite
from tests.support.fault_agents import RECEIVER_FILE
from tests.support.invariants import World, check_invariants
from tests.support.system import AGENT, System, call
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess, WorkerProcess


@pytest.fixture
def second(system: System, tmp_path: Path) -> Iterator[Settings]:
    """A second deployment's settings; its tools ask the same receiver."""
    (tmp_path / RECEIVER_FILE).write_text(system.receiver.url)
    with fresh_sqlite(tmp_path) as url:
        yield replace(system.settings, home=tmp_path, database_url=url)


def test_the_second_refuses_to_start(system: System, second: Settings, tmp_path: Path) -> None:
    """Each would take the other's leases and messages for its own."""
    system.worker("model")
    for process in (WorkerProcess("model", second, tmp_path), KeeperProcess(second, tmp_path)):
        process.start()
        assert process.wait() == ExitCode.REFUSED
        [line] = [line for line in process.log().splitlines() if line.startswith(("agentq: ", "error: "))]
        assert "deployment" in line and "AGENTQ_KEY_PREFIX" in line


def test_with_a_prefix_of_its_own_the_second_lives_beside_the_first_and_each_reaps_its_own(
    system: System, second: Settings, tmp_path: Path
) -> None:
    """A keeper that knows nothing of a run must not decide about it."""
    second = replace(second, key_prefix="second")
    seconds_model, seconds_tools = (WorkerProcess(role, second, tmp_path) for role in ("model", "tools"))
    system.processes += [seconds_model, seconds_tools]
    seconds_model.start()
    seconds_tools.start()
    _, firsts_tools = system.workers("model", "tools")
    seconds_tools.wait_ready()
    with AgentQ(second) as client:
        with system.receiver.holding("first's", "second's"):
            first_id = system.enqueue([call("look", "first's")])
            second_id = client.enqueue(AGENT, {"turns": [[call("look", "second's")]]})
            system.receiver.wait_for("first's")
            system.receiver.wait_for("second's")
            system.end(seconds_tools)
            system.end(firsts_tools)
            # Died last, reaped first: its keeper has had the time to judge the other's step.
            eventually(lambda: system.step(first_id, 2).crashes, what="the first's keeper requeues its step")
        assert client.get(second_id).steps[1].attempt == 1
        keeper = KeeperProcess(second, tmp_path)
        system.processes.append(keeper)
        keeper.start()
        eventually(lambda: client.get(second_id).steps[1].crashes, what="the second's keeper requeues its step")
        system.worker("tools")
        system.completes(first_id)
        seconds_tools.start()
        system.processes.append(seconds_tools)
        assert client.wait(second_id).status is RunStatus.COMPLETED
        assert system.step(first_id, 2).attempt == client.get(second_id).steps[1].attempt == 2
    database = Database(second.database_url)
    check_invariants(database, world=World(effects=system.receiver.effects))
    database.dispose()
