"""A keeper that tells people of dead letters, by a real command and a real Celery task, however those behave."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentq.domain.model import RunMode
from tests.support import teller
from tests.support.databases import fresh_postgresql
from tests.support.processes import LoggedProcess, is_alive
from tests.support.stage import PLAIN, READ, Stage
from tests.support.system import System
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess, environment

TASK, QUEUE = "ops.page", "ops"
COMMAND_SECONDS = 4.0  # What a command may take here: shorter than the waits of the tests, longer than its start.
OPS = """
import json, os
from celery import Celery

app = Celery(broker=os.environ["OPS_BROKER_URL"])

@app.task(name="ops.page")
def page(notification):
    with open("paged", "a") as paged:
        paged.write(json.dumps(notification) + "\\n")
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Dead letters are told by both; no keeper runs yet."""
    folder = tmp_path_factory.mktemp("told")
    command = f"{sys.executable} {teller.__file__} {folder}"
    options = {"notify_command": command, "notify_seconds": COMMAND_SECONDS, "notify_task": TASK, "notify_queue": QUEUE}
    with fresh_postgresql() as url, System(folder, url, **options) as system:
        yield system


@pytest.fixture
def stage(system: System) -> Stage:
    (system.folder / "how").write_text("tell")
    return Stage(database=system.database)


@pytest.fixture
def consumer(system: System) -> Iterator[LoggedProcess]:
    """A worker of somebody's own, of a Celery app that knows nothing of agentq."""
    (system.folder / "ops.py").write_text(OPS)
    process = LoggedProcess(
        (sys.executable, "-m", "celery", "-A", "ops", "worker", "-P", "solo", "-Q", QUEUE, "-l", "info"),
        log_path=system.folder / "ops.log",
        environ={**environment(system.settings, system.folder), "OPS_BROKER_URL": system.settings.effective_broker_url},
        folder=system.folder,
        ready_text=" ready.",
    )
    process.start()
    process.wait_ready()
    yield process
    process.stop(seconds=5)


def told(system: System, by: str = "told") -> list[str]:
    """The runs whose dead letters were told, as often as they were."""
    path = system.folder / by
    lines = path.read_text().splitlines() if path.exists() else []
    return [letter["run_id"] for line in lines if line for letter in json.loads(line)["dead_letters"]]


def test_each_dead_letter_is_told_by_the_command_and_by_the_task(
    system: System, stage: Stage, consumer: LoggedProcess
) -> None:
    """Once, if nothing goes wrong; and without a word that was said in the run."""
    before = [stage.failed(READ), stage.unknown(PLAIN)]
    decided = stage.failed(READ)
    stage.decisions.discard(decided, actor="ann", reason="")
    keeper = system.keeper()
    eventually(lambda: set(before) <= set(told(system)), what="those that were there are told")
    after = stage.failed(READ)
    eventually(lambda: after in told(system) and after in told(system, "paged"), what="the new one is told")
    assert sorted(told(system)) == sorted(told(system, "paged")) == sorted([*before, after])
    eventually(lambda: unmarked(system) == 0, what="they are marked")
    assert "refund order" not in (system.folder / "told").read_text()
    assert "the tool raised" not in (system.folder / "paged").read_text()
    assert "told of 1 dead letters through AGENTQ_NOTIFY_COMMAND" in keeper.log()


def test_a_command_that_hangs_is_ended_and_holds_up_nothing(system: System, stage: Stage) -> None:
    """Whoever is told late is told; a run that is recovered late is an outage."""
    (system.folder / "how").write_text("hang")
    waiting = stage.failed(READ)
    keeper = system.keeper()
    child = int(eventually(lambda: read(system.folder / "hanging"), what="the command hangs"))
    lost = stage.queued(mode=RunMode.INTERACTIVE)
    system.wait(lost, seconds=system.settings.lease_seconds + 2 * system.settings.keeper_interval_seconds + 2)
    assert is_alive(child), "it was to be reaped while the command hung"

    eventually(lambda: not is_alive(child), what="it is ended with what it started")
    eventually(lambda: "it took longer than 4 s, and was ended" in keeper.log(), what="the log says so")
    assert waiting not in told(system)
    (system.folder / "how").write_text("tell")
    eventually(lambda: waiting in told(system), seconds=20, what="it is told when the command works again")
    assert told(system).count(waiting) == 1
    eventually(lambda: unmarked(system) == 0, what="it is marked")


def test_a_command_that_fails_is_tried_again(system: System, stage: Stage) -> None:
    """Nothing is marked as told that wasn't."""
    (system.folder / "how").write_text("fail")
    waiting = stage.failed(READ)
    keeper = system.keeper()
    eventually(lambda: f"it ended with exit code {teller.FAILED}" in keeper.log(), what="it failed")
    assert unmarked(system) == 1 and waiting not in told(system)
    (system.folder / "how").write_text("tell")
    eventually(lambda: waiting in told(system), seconds=20, what="it is told")


def test_a_keeper_that_dies_while_it_tells_is_followed_by_one_that_tells(system: System, stage: Stage) -> None:
    """Told twice is better than never; and its command doesn't outlive it."""
    (system.folder / "hanging").unlink(missing_ok=True)
    (system.folder / "how").write_text("hang")
    waiting = stage.failed(READ)
    first = system.keeper()
    eventually(lambda: read(system.folder / "hanging"), what="the command hangs")
    first.kill(signal.SIGKILL)
    first.wait()
    (system.folder / "how").write_text("tell")
    system.keeper()
    eventually(lambda: waiting in told(system), seconds=20, what="the next one tells")
    eventually(lambda: unmarked(system) == 0, what="it is marked")


def test_a_program_that_is_not_there_is_said_at_the_start(system: System, stage: Stage) -> None:
    """Not first in the night in which it was to wake somebody; and the keeper keeps."""
    keeper = KeeperProcess(replace(system.settings, notify_command="/nowhere/wake-ann"), system.folder)
    system.processes.append(keeper)
    keeper.start()
    keeper.wait_for_log("notifications: there is no program '/nowhere/wake-ann' here")
    lost = stage.queued(mode=RunMode.INTERACTIVE)
    system.wait(lost)


def unmarked(system: System) -> int:
    [(count,)] = system.execute("SELECT count(*) FROM dead_letters WHERE closed_at IS NULL AND notified_at IS NULL")
    return int(count)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
