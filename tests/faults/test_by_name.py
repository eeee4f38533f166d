"""Runs that another service starts by the task's name alone, while the database or the broker's connections fail."""

import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery

from agentq.domain.errors import NotFoundError
from agentq.domain.model import Run, RunStatus
from tests.support.proxy import PostgresProxy
from tests.support.system import AGENT, System, call
from tests.support.waiting import eventually

TRIES = 6  # A worker that is stopped just between two waits pops nothing.


@pytest.fixture(scope="module")
def deployment(proxy: PostgresProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The worker that answers such messages reaches the database through the proxy, nobody else does."""
    with System(tmp_path_factory.mktemp("deployment"), proxy.server_url) as it:
        it.keeper()
        it.worker("model")
        it.worker("tools", database_url=proxy.url)
        yield it


@pytest.fixture
def service(system: System) -> "Service":
    return Service(system)


class Service:
    """Another service: it has Celery, and the broker's address."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._app = Celery(broker=system.settings.broker_url, set_as_current=False)

    def send(self, name: str, *, task_id: str, **fields: Any) -> None:
        """Ask for a run that pays under that name, in a message with that id."""
        request = {"agent": AGENT, "input": {"turns": [[call("pay", name)]]}, **fields}
        self._app.send_task("agentq.enqueue", kwargs=request, queue="agentq.control", task_id=task_id)

    def wait_until_done(self, task_id: str, *, deliveries: int = 1) -> None:
        """The message was carried out so often; not asked of the broker, where a message may be in neither list."""
        done = f"agentq.enqueue[{task_id}] succeeded"
        eventually(
            lambda: sum(process.log().count(done) for process in self._system.processes) == deliveries,
            what=f"{deliveries} deliveries of {task_id} are done",
        )

    def run_of(self, key: str) -> Run:
        """The run that has ended; fails when none is stored under the key."""
        return self._system.wait(self._system.client.get_by_key(key).id)


def test_the_messages_id_is_the_key_when_none_is_given(system: System, service: Service) -> None:
    """A message that a broker delivers twice is one wish."""
    task_id = uuid.uuid4().hex
    for _ in range(2):
        service.send("sent twice", task_id=task_id)
    service.wait_until_done(task_id, deliveries=2)
    assert service.run_of(task_id).status is RunStatus.COMPLETED
    assert len(system.receiver.requests("sent twice")) == 1


def test_messages_wait_unacknowledged_while_the_database_is_away(
    system: System, service: Service, proxy: PostgresProxy
) -> None:
    """Two deliveries of one message that wait beside each other find one run."""
    task_id = uuid.uuid4().hex
    with proxy.away():
        for _ in range(2):
            service.send("while away", task_id=task_id)
        proxy.wait_for_refusals(4)
        assert len(system.broker.in_hand()) == 2
    service.wait_until_done(task_id, deliveries=2)
    assert service.run_of(task_id).status is RunStatus.COMPLETED
    assert len(system.receiver.requests("while away")) == 1


def test_broken_connections_lose_and_repeat_no_message(system: System, service: Service, proxy: PostgresProxy) -> None:
    """The worker goes on waiting for the database, and acknowledges through a new connection."""
    task_id = uuid.uuid4().hex
    with proxy.away():
        service.send("through broken connections", task_id=task_id)
        proxy.wait_for_refusals(2)
        system.broker.break_connections()
        eventually(lambda: system.broker.waiting_workers() >= 2, what="both workers are connected again")
        assert len(system.broker.in_hand()) == 1
    service.wait_until_done(task_id)
    assert service.run_of(task_id).status is RunStatus.COMPLETED
    assert len(system.receiver.requests("through broken connections")) == 1


def test_the_same_key_is_the_same_run_whoever_asks(system: System, service: Service) -> None:
    """A service that changes over from messages to the client starts nothing anew."""
    task_id = uuid.uuid4().hex
    service.send("asked for by two", task_id=task_id, idempotency_key="ticket-1")
    service.wait_until_done(task_id)
    run = service.run_of("ticket-1")
    assert system.client.enqueue(AGENT, run.input, idempotency_key="ticket-1") == run.id
    assert len(system.receiver.requests("asked for by two")) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"agent": "nobody"}, "unknown agent 'nobody'"),
        ({"input": "x" * 300_000}, "agent 'support' takes at most 262,144"),
        ({"prompt": "please"}, "unknown field 'prompt'"),
    ],
)
def test_a_refused_one_is_a_row_with_its_reason(
    system: System, service: Service, fields: dict[str, Any], reason: str
) -> None:
    """Nobody is at the other end to read an exception; it is found by the message's id."""
    task_id = uuid.uuid4().hex
    service.send("refused", task_id=task_id, **fields)
    service.wait_until_done(task_id)
    run = service.run_of(task_id)
    assert run.status is RunStatus.FAILED and reason in (run.error or "")
    assert system.receiver.requests("refused") == []


def test_the_same_key_for_something_else_is_refused(system: System, service: Service) -> None:
    """The first run keeps its key; the conflict is a row of its own."""
    for wish in ("first wish", "second wish"):
        task_id = uuid.uuid4().hex
        service.send(wish, task_id=task_id, idempotency_key="ticket-2")
        service.wait_until_done(task_id)
    assert service.run_of("ticket-2").status is RunStatus.COMPLETED
    [refused] = [run for run in system.client.runs(status=["failed"]) if "ticket-2" in (run.error or "")]
    assert refused.idempotency_key is None
    assert (len(system.receiver.requests("first wish")), system.receiver.requests("second wish")) == (1, [])


def test_a_message_that_dies_with_a_stopped_worker_is_lost_and_can_be_sent_again(
    system: System, service: Service
) -> None:
    """What the broker may do to any message, and the README says: nothing is half there, and the key makes a second
    one safe."""
    worker = system.processes[-1]  # The one that answers such messages.
    for number in range(TRIES):
        name, task_id = f"lost {number}", uuid.uuid4().hex
        eventually(lambda: system.broker.waiting_workers() >= 2, what="both workers wait for a message")
        worker.kill(signal.SIGSTOP)
        service.send(name, task_id=task_id, idempotency_key=task_id)
        is_lost = system.is_drained()
        worker.kill()
        worker.wait()
        worker.start()
        if is_lost:
            with pytest.raises(NotFoundError):
                system.client.get_by_key(task_id)
            service.send(name, task_id=uuid.uuid4().hex, idempotency_key=task_id)
        eventually(lambda: is_stored(system, task_id), what="the run is in SQL")  # noqa: B023 - called here and now
        assert service.run_of(task_id).status is RunStatus.COMPLETED
        assert len(system.receiver.requests(name)) == 1
        if is_lost:
            return
        worker.wait_ready()
    pytest.fail("no message was popped by a stopped worker")


def is_stored(system: System, key: str) -> bool:
    with suppress(NotFoundError):
        return system.client.get_by_key(key).idempotency_key == key
    return False
