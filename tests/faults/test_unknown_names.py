"""Workers of another version get messages about agents and tasks that they don't know: nothing is lost or charged."""

import sys
from collections.abc import Iterator

import pytest
from celery import Celery

from tests.support.databases import fresh_postgresql
from tests.support.processes import LoggedProcess
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import READY_TEXT, environment

STRANGERS = ("tests.support.smoke_agents",)  # They serve no agent of these runs.


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with fresh_postgresql() as url, System(tmp_path_factory.mktemp("deployment"), url) as system:
        system.keeper()
        yield system


def test_a_step_of_an_unknown_agent_is_handed_back_until_somebody_knows_it(system: System) -> None:
    """In the middle of a deploy; for as long as it takes, at no charge, and the log names what is missing."""
    stranger = system.worker("model", agents=STRANGERS)
    why = "this worker serves no agent 'support'"
    run_id = system.enqueue()
    eventually(lambda: stranger.log().count(why) >= 2, what="it is handed back again and again")
    assert {event.data["why"] for event in system.events(run_id, "step.handed_back")} == {why}
    system.end(stranger)
    system.worker("model")
    run = system.completes(run_id)
    assert [(step.attempt, step.tries, step.crashes) for step in run.steps] == [(1, 0, 0)]


def test_a_step_that_another_program_takes_for_an_unknown_task_comes_again(system: System) -> None:
    """A worker that listens at the wrong queue drops what it doesn't know; the message was only a wake-up call."""
    system.worker("model")
    foreign = LoggedProcess(
        (
            *(sys.executable, "-m", "celery", "--broker", system.settings.broker_url, "worker"),
            *("--queues", system.settings.queue("tools"), "--pool", "solo", "--loglevel", "INFO"),
        ),
        log_path=system.folder / "foreign.log",
        environ=environment(system.settings),
        folder=system.folder,
        ready_text=READY_TEXT,
    )
    foreign.start()
    foreign.wait_ready()
    run_id = system.enqueue([call("pay", "dropped")])
    foreign.wait_for_log("Received unregistered task of type 'agentq.step'")
    foreign.stop()
    system.worker("tools")
    run = system.completes(run_id)
    assert {(step.attempt, step.tries, step.crashes) for step in run.steps} == {(1, 0, 0)}
    assert len(system.receiver.requests("dropped")) == 1


def test_a_task_that_a_worker_does_not_know_is_named_in_its_log(system: System) -> None:
    """Nobody else will ever hear of it: Celery drops it."""
    worker = system.worker("tools")
    service = Celery(broker=system.settings.broker_url, set_as_current=False)
    service.send_task("agentq.of_the_next_version", queue=system.settings.queue("control"))
    worker.wait_for_log("unknown task name=agentq.of_the_next_version")
    system.eventually_drained()
