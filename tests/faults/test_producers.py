"""Producers that die between the database and the broker."""

import signal
import subprocess
import sys

import pytest

from agentq.domain.model import RunStatus
from agentq.services.enqueue import new_run_id
from tests.support.system import System
from tests.support.workers import environment

pytestmark = pytest.mark.parametrize("deployment", ["sqlite"], indirect=True, scope="module")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_whose_producer_died_starts_once(system: System, when: str) -> None:
    """Between its commit and the publish, or between the publish and the return: the run is stored, so it runs."""
    run_id = new_run_id()
    died = subprocess.run(
        [sys.executable, "-m", "tests.support.dying_producer", when, run_id],
        env=environment(system.settings),
        check=False,
        timeout=60,
    )
    assert died.returncode == -signal.SIGKILL
    run = system.completes(run_id)
    system.eventually_drained()
    assert len(system.receiver.requests(run_id)) == 1
    assert [(step.attempt, step.crashes) for step in run.steps] == [(1, 0)]


@pytest.mark.usefixtures("workers")
def test_a_producer_that_calls_again_after_its_death_finds_its_run(system: System) -> None:
    """With a key, or an id of its own, a producer that doesn't know whether it was stored just asks again."""
    run_id = new_run_id()
    again = [system.enqueue(asks=[run_id], run_id=run_id, idempotency_key=run_id) for _ in range(2)]
    assert again == [run_id, run_id]
    assert system.completes(run_id).status is RunStatus.COMPLETED
    assert len(system.receiver.requests(run_id)) == 1
