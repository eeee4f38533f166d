"""A PostgreSQL that crashes and is started again under running steps."""

import signal
import time
from collections.abc import Iterator

import pytest

from agentq.adapters.sql.migration import upgrade
from tests.support.databases import PostgresServer
from tests.support.system import System, call

WORKING_SECONDS = 10.0  # Of the server's return.


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer().create().start()
    server.execute("CREATE DATABASE agentq")
    upgrade(server.url("agentq"))
    yield server
    server.remove()


@pytest.fixture(scope="module")
def deployment(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("deployment"), server.url("agentq")) as it:
        it.keeper()
        it.workers("model", "tools", tools_concurrency=4)
        yield it


def test_whatever_ran_and_whatever_comes_is_done_soon_after_its_return(system: System, server: PostgresServer) -> None:
    """It keeps what it committed, so that nothing is done twice; and nobody has to start a worker again."""
    names = ["a turn over a crash", "look over a crash", "put over a crash", "pay over a crash"]
    tools = ("look", "put", "pay")
    with system.receiver.holding(*names):
        run_ids = [system.enqueue(asks=["a turn over a crash"])]
        run_ids += [system.enqueue([call(tool, f"{tool} over a crash")]) for tool in tools]
        for name in names:
            system.receiver.wait_for(name)
        server.stop(signal.SIGKILL)
    server.start()
    began = time.monotonic()
    run_ids.append(system.enqueue([call("pay", "after a crash")]))
    for run_id in run_ids:
        run = system.completes(run_id, seconds=WORKING_SECONDS - (time.monotonic() - began))
        assert all((step.attempt, step.crashes, step.tries) == (1, 0, 0) for step in run.steps)
    names.append("after a crash")
    assert {name: len(system.receiver.requests(name)) for name in names} == dict.fromkeys(names, 1)
