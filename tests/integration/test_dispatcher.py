"""The dispatcher against a real Valkey: what it sends, how it counts, and that it never waits."""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, signals
from kombu.connection import Connection

from agentq.bootstrap import Wiring
from agentq.config.celery import celery_app
from agentq.config.settings import Settings
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import BrokerUnavailableError
from agentq.domain.model import StepKind, StepRef
from agentq.ports.dispatch import Dispatcher, Wakeup
from tests.support.valkey import ValkeyServer

SOON_SECONDS = 2.0


def wakeup(number: int = 3, **changes: Any) -> Wakeup:
    given: dict[str, Any] = {
        "ref": StepRef(run_id="run-1", number=number, attempt=2),
        "agent": "support",
        "kind": StepKind.TOOL,
        "tool": "send_refund",
        "effect": ToolEffect.NON_IDEMPOTENT_WRITE,
    }
    return Wakeup(**given | changes)


TURN = wakeup(kind=StepKind.MODEL, tool=None, effect=ToolEffect.READ_ONLY)


@pytest.fixture(scope="module")
def shared() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def server(shared: ValkeyServer) -> ValkeyServer:
    shared.flush()
    return shared


def make(server: ValkeyServer, **settings: Any) -> Dispatcher:
    return Wiring(Settings(broker_url=server.url, **settings)).dispatcher


def sent(server: ValkeyServer, queue: str) -> list[dict[str, Any]]:
    """The messages of that queue, the oldest first."""
    messages: Any = server.client().lrange(queue, 0, -1)
    return [json.loads(message) for message in reversed(messages)]


class TestMessages:
    def test_a_message_is_what_celery_sends(self, server: ValkeyServer) -> None:
        """Any Celery reads it; when Celery's own changes, ours has to follow."""
        make(server).publish([wakeup()])
        plain = Celery(broker=server.url, set_as_current=False)
        options = {"queue": "agentq.tools", "ignore_result": True, "time_limit": 1.0, "shadow": "its name in Flower"}
        plain.send_task("agentq.step", args=["run-1", 3, 2], **options)
        ours, celerys = sent(server, "agentq.tools")
        assert ours["body"] == celerys["body"]
        assert _shape(ours) == _shape(celerys)

    def test_a_plain_consumer_reads_it(self, server: ValkeyServer) -> None:
        """Ids only: what the step is about stays in SQL."""
        make(server).publish([wakeup()])
        with Connection(server.url) as connection:
            message = connection.SimpleQueue("agentq.tools").get(timeout=5)
            message.ack()
        assert message.payload[:2] == [["run-1", 3, 2], {}]
        assert message.headers["task"] == "agentq.step"

    @pytest.mark.parametrize(
        ("given", "queue"),
        [
            (TURN, "agentq.model"),
            (wakeup(), "agentq.tools"),
            (wakeup(effect=ToolEffect.READ_ONLY), "agentq.tools"),
            (wakeup(is_isolated=True), "agentq.isolated"),
            (wakeup(kind=StepKind.MODEL, tool=None, is_isolated=True), "agentq.isolated"),
        ],
    )
    def test_a_step_goes_to_its_queue(self, server: ValkeyServer, given: Wakeup, queue: str) -> None:
        """A write on a threads worker could not be ended."""
        make(server).publish([given])
        queues = ("agentq.model", "agentq.tools", "agentq.isolated", "agentq.control")
        assert [name for name in queues if sent(server, name)] == [queue]

    def test_another_prefix_has_queues_of_its_own(self, server: ValkeyServer) -> None:
        """Two deployments on one Redis."""
        make(server, key_prefix="other").publish([TURN])
        assert len(sent(server, "other.model")) == 1
        assert make(server).is_drained()

    @pytest.mark.parametrize(
        ("given", "limit"),
        [
            (wakeup(), [30.0 + 60.0 + 15.0, None]),
            (wakeup(deadline_seconds=5.0), [5.0 + 60.0 + 15.0, None]),
            (TURN, [None, None]),
        ],
    )
    def test_a_call_has_a_hard_time_limit_only(
        self, server: ValkeyServer, given: Wakeup, limit: list[float | None]
    ) -> None:
        """By then it has ended and been recorded; a soft limit would raise in the middle of a settle."""
        make(server).publish([given])
        [message] = sent(server, "agentq.model") + sent(server, "agentq.tools")
        assert message["headers"]["timelimit"] == limit

    def test_many_are_sent_in_their_order(self, server: ValkeyServer) -> None:
        """The oldest run starts first."""
        make(server).publish([wakeup(number) for number in range(100)])
        numbers = [message["headers"]["argsrepr"].split()[1] for message in sent(server, "agentq.tools")]
        assert numbers == [f"step={number}" for number in range(100)]

    def test_none_is_no_command(self) -> None:
        """Not even a connection."""
        with ValkeyServer() as server:
            dispatcher = make(server)
        dispatcher.publish([])

    def test_instruments_see_it(self, server: ValkeyServer) -> None:
        """Tracing hangs on Celery's signal, and adds headers."""

        def trace(headers: dict[str, Any], **_: Any) -> None:
            headers["traceparent"] = "00-1"

        signals.before_task_publish.connect(trace)
        try:
            make(server).publish([wakeup()])
        finally:
            signals.before_task_publish.disconnect(trace)
        [message] = sent(server, "agentq.tools")
        assert message["headers"]["traceparent"] == "00-1"

    def test_flower_shows_what_it_is(self, server: ValkeyServer) -> None:
        """A person looks for an agent and a tool, not for three arguments."""
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "tests.support.transport_app", "worker", "-P", "threads"),
                *("-c", "1", "-Q", "agentq.tools", "--without-mingle", "--without-gossip"),
            ],
            env={**os.environ, "AGENTQ_BROKER_URL": server.url},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            received: list[dict[str, Any]] = []
            handlers = {
                "worker-heartbeat": lambda _: make(server).publish([wakeup()]),  # It is there, and we hear it.
                "task-received": received.append,
            }
            app = celery_app(Settings(broker_url=server.url), set_as_current=False)
            with app.connection_for_read() as connection:
                for _ in app.events.Receiver(connection, handlers=handlers).itercapture(limit=None, timeout=30):
                    if received:
                        break
            event = received[0]
            assert event["name"] == "agentq.step support/send_refund"
            assert event["args"] == "run=run-1 step=3 attempt=2"
            assert event["kwargs"] == "agent=support tool=send_refund"
        finally:
            worker.terminate()
            worker.wait(15)


class TestCounts:
    def test_a_backlog_is_counted_by_kind(self, server: ValkeyServer) -> None:
        """The dispatcher feeds the broker into the room that is left."""
        dispatcher = make(server)
        assert dispatcher.backlog() == {StepKind.MODEL: 0, StepKind.TOOL: 0}
        dispatcher.publish([TURN, TURN, wakeup(), wakeup(is_isolated=True)])
        assert dispatcher.backlog() == {StepKind.MODEL: 2, StepKind.TOOL: 2}

    def test_it_is_drained_when_nothing_is_queued_or_at_work(self, server: ValkeyServer) -> None:
        """A step that is in neither was lost, and may be published again."""
        dispatcher = make(server)
        assert dispatcher.is_drained()
        dispatcher.publish([wakeup()])
        assert not dispatcher.is_drained()
        app = celery_app(Settings(broker_url=server.url), set_as_current=False)
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue("agentq.tools").get(timeout=5)
            assert not dispatcher.is_drained()
            message.ack()
            assert dispatcher.is_drained()


class TestTrouble:
    @pytest.mark.parametrize("trouble", ["away", "hung", "full", "read-only"])
    def test_trouble_is_told_at_once(self, trouble: str) -> None:
        """Who enqueues has stored the run already, and waits for nobody."""
        with ValkeyServer() as server:
            dispatcher = make(server)
            dispatcher.publish([wakeup()])
            _make_trouble(server, trouble)
            calls: list[Callable[[], object]] = [
                lambda: dispatcher.publish([wakeup()]),
                lambda: dispatcher.publish([wakeup(), wakeup()]),
            ]
            if trouble in ("away", "hung"):
                calls += [dispatcher.backlog, dispatcher.is_drained]
            for call in calls:
                began = time.monotonic()
                with pytest.raises(BrokerUnavailableError):
                    call()
                assert time.monotonic() - began < SOON_SECONDS

    def test_it_publishes_again_when_the_broker_is_back(self) -> None:
        """Without anybody's help."""
        with ValkeyServer() as server:
            dispatcher = make(server)
            dispatcher.publish([wakeup()])
            server.restart()
            dispatcher.publish([wakeup()])
            assert len(sent(server, "agentq.tools")) == 1

    def test_threads_share_it(self, server: ValkeyServer) -> None:
        """A model worker has a hundred."""
        dispatcher = make(server)
        with ThreadPoolExecutor(50) as threads:
            list(threads.map(lambda number: dispatcher.publish([wakeup(number)]), range(500)))
        assert len(sent(server, "agentq.tools")) == len(range(500))

    def test_a_forked_child_has_a_connection_of_its_own(self, server: ValkeyServer) -> None:
        """Two processes on one socket would read each other's answers."""
        dispatcher = make(server)
        dispatcher.publish([wakeup()])
        children = [multiprocessing.get_context("fork").Process(target=_publish_many, args=[dispatcher]) for _ in "ab"]
        for child in children:
            child.start()
        _publish_many(dispatcher)
        for child in children:
            child.join(15)
        assert [child.exitcode for child in children] == [0, 0]
        assert len(sent(server, "agentq.tools")) == 1 + 3 * len(MANY)


MANY = range(200)


def _publish_many(dispatcher: Dispatcher) -> None:
    for number in MANY:
        dispatcher.publish([wakeup(number)])
        assert dispatcher.backlog()[StepKind.TOOL] > 0


def _make_trouble(server: ValkeyServer, trouble: str) -> None:
    match trouble:
        case "away":
            server.stop()
        case "hung":
            server.pause()
        case "full":
            server.client().config_set("maxmemory", "1")
        case "read-only":
            server.client().replicaof("127.0.0.1", "1")


def _shape(value: object) -> object:
    """What there is, without what it says."""
    if isinstance(value, dict):
        return {name: _shape(part) for name, part in value.items()}
    return type(value).__name__ if value is not None else "None"
