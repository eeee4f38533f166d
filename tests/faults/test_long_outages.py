"""Servers that are away for half a minute: whoever waits for them must be there again soon after them.

Half a minute is long enough for every wait between two tries to have grown to its limit.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from celery import Celery

from agentq.domain.model import RunStatus, StepState
from agentq.services.enqueue import new_run_id
from tests.support.proxy import Loss, PostgresProxy
from tests.support.system import AGENT, System, call
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess

AWAY_SECONDS = 30.0
ENQUEUE_SECONDS = 5.0
WORKING_SECONDS = 10.0  # Of the server's return.
SETTLE_PATIENCE_SECONDS = 60.0  # As by default: longer than the outage.
FENCE = '"is_callable"'  # What its statement carries beside the run's id.


@pytest.fixture(scope="module")
def deployment(proxy: PostgresProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Workers and keeper reach the database through the proxy, the test does not."""
    folder = tmp_path_factory.mktemp("deployment")
    with System(folder, proxy.server_url, settle_patience_seconds=SETTLE_PATIENCE_SECONDS) as it:
        it.workers("model", "tools", database_url=proxy.url, tools_concurrency=6)
        keeper = KeeperProcess(replace(it.settings, database_url=proxy.url), it.folder)
        it.processes.append(keeper)
        keeper.start()
        keeper.wait_ready()  # One that begins while the database is away gives up.
        yield it


def wait_until(moment: float) -> None:
    eventually(lambda: time.monotonic() > moment, seconds=AWAY_SECONDS + 5, what="the outage has lasted")


def test_a_broker_that_is_away_for_long_keeps_nobody_from_enqueueing(system: System) -> None:
    """Who enqueues needs the database only; what was enqueued, and what ran meanwhile, goes on when it is back."""
    running = system.enqueue([call("pay", "over the outage"), call("look", "behind it")])
    run_ids = []
    with system.receiver.holding("over the outage"):
        system.receiver.wait_for("over the outage")
        system.valkey.stop()
        ends_at = time.monotonic() + AWAY_SECONDS
        for name in ("enqueued first", "enqueued next"):
            began = time.monotonic()
            run_ids.append(system.enqueue([call("look", name)]))
            assert time.monotonic() - began < ENQUEUE_SECONDS
    eventually(lambda: system.step(running, 2).state is StepState.COMPLETED, what="the write is recorded meanwhile")
    wait_until(ends_at)
    assert {system.client.status(run_id) for run_id in run_ids} == {RunStatus.QUEUED}
    system.valkey.start()
    system.receiver.wait_for("enqueued first", seconds=WORKING_SECONDS)
    for run_id in (running, *run_ids):
        run = system.completes(run_id)
        assert all((step.attempt, step.crashes, step.tries) == (1, 0, 0) for step in run.steps)
    assert system.receiver.effects_of(running) == 1


def test_a_database_that_is_away_for_long_costs_nothing_but_time(system: System, proxy: PostgresProxy) -> None:
    """At every moment of a step at once: each goes on where it was, and another service's wish isn't lost."""
    tools = ("look", "put", "pay")
    fenced, unfenced = new_run_id(), new_run_id()
    proxy.trap(FENCE, fenced, loss=Loss.OF_THE_REST)
    trap = proxy.trap(FENCE, unfenced, loss=Loss.OF_STATEMENT, goes_away=True)
    with system.receiver.holding("a turn", "called", *(f"{tool} ends" for tool in tools)):
        turn = system.enqueue([call("look", "asked for")], asks=["a turn"])
        ending = [system.enqueue([call(tool, f"{tool} ends")]) for tool in tools]
        system.enqueue([call("pay", "called")], run_id=fenced)
        for name in ("a turn", "called", *(f"{tool} ends" for tool in tools)):
            system.receiver.wait_for(name)
        system.enqueue([call("pay", "not called")], run_id=unfenced)
        trap.wait()
        ends_at = time.monotonic() + AWAY_SECONDS
    by_name = uuid.uuid4().hex
    request = {"agent": AGENT, "input": {"turns": [[call("pay", "by name")]]}}
    service = Celery(broker=system.settings.broker_url, set_as_current=False)
    service.send_task("agentq.enqueue", kwargs=request, queue="agentq.control", task_id=by_name)
    wait_until(ends_at)
    assert system.receiver.requests("not called") == system.receiver.requests("by name") == []
    proxy.come_back()
    system.receiver.wait_for("by name", seconds=WORKING_SECONDS)
    run_ids = [turn, *ending, fenced, unfenced, system.client.get_by_key(by_name).id]
    for run_id in run_ids:
        run = system.completes(run_id, seconds=WORKING_SECONDS)
        assert all((step.attempt, step.crashes, step.tries) == (1, 0, 0) for step in run.steps)
    names = [f"{tool} ends" for tool in tools]
    names += ["a turn", "asked for", "called", "not called", "by name"]
    assert {name: len(system.receiver.requests(name)) for name in names} == dict.fromkeys(names, 1)
