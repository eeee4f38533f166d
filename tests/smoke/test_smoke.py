"""The whole of it, as another service and an operator meet it: enqueue by name, kill, restart."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_celery import CeleryTestSetup

from agentq import AgentQ, RunStatus
from agentq.domain.errors import NotFoundError
from agentq.domain.model import Run
from tests.support.celery_nodes import Machine
from tests.support.waiting import eventually

WAIT_SECONDS = 45


@pytest.fixture
def client(nodes: Machine, celery_setup: CeleryTestSetup) -> Iterator[AgentQ]:
    with AgentQ(nodes.settings) as found:
        yield found


def enqueue_by_name(setup: CeleryTestSetup) -> str:
    """As a service does that has a Celery client and nothing of agentq; the run's id."""
    run_id = str(uuid.uuid4())
    arguments = {"agent": "clerk", "input": "Refund order 17", "run_id": run_id}
    setup.app.send_task("agentq.enqueue", kwargs=arguments, queue="agentq.control")
    return run_id


def wait(client: AgentQ, run_id: str) -> Run:
    """The run once it has ended; it is a message before it is a row."""

    def is_stored() -> bool:
        try:
            return bool(client.status(run_id))
        except NotFoundError:
            return False

    eventually(is_stored, seconds=WAIT_SECONDS, what="the message's run in the database")
    return client.wait(run_id, timeout=WAIT_SECONDS)


def refunds(folder: Path) -> list[str]:
    ledger = folder / "ledger.txt"
    return ledger.read_text().splitlines() if ledger.exists() else []


def test_another_service_starts_a_run_by_name(
    celery_setup: CeleryTestSetup, client: AgentQ, agents_folder: Path
) -> None:
    """The main job, with nothing faked: the broker, both workers, the database."""
    assert celery_setup.ready()
    run_id = enqueue_by_name(celery_setup)
    run = wait(client, run_id)
    assert run.status is RunStatus.COMPLETED
    assert refunds(agents_folder) == [f"{run_id} 17"]


def test_a_run_that_finds_no_worker_waits_for_one(
    celery_setup: CeleryTestSetup, client: AgentQ, agents_folder: Path
) -> None:
    """A worker that was killed costs time, no run."""
    celery_setup.worker.kill()
    run_id = enqueue_by_name(celery_setup)
    celery_setup.worker.restart()
    run = wait(client, run_id)
    assert run.status is RunStatus.COMPLETED
    assert refunds(agents_folder) == [f"{run_id} 17"]


def test_workers_go_on_when_the_broker_is_back(
    celery_setup: CeleryTestSetup, client: AgentQ, agents_folder: Path
) -> None:
    """Nobody restarts workers by hand after a broker's upgrade."""
    celery_setup.broker.kill()
    celery_setup.broker.restart()
    run_id = enqueue_by_name(celery_setup)
    run = wait(client, run_id)
    assert run.status is RunStatus.COMPLETED
    assert refunds(agents_folder) == [f"{run_id} 17"]
