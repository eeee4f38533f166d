"""What a real worker does when its connection breaks or a child dies, and what of kombu that rests on."""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kombu
import psutil
import pytest
from celery import Celery
from kombu.connection import Connection as KombuConnection
from kombu.entity import Queue
from kombu.transport import redis, virtual
from redis import Redis

from agentq.config import transport
from agentq.config.celery import celery_app
from agentq.config.settings import Settings
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually

BACK_SECONDS = 10.0
NOTICED_SECONDS = 3.0
POOLS = ("prefork", "threads")


@dataclass
class Worker:
    """A `celery worker` process beside its own Valkey, and an app to send it tasks."""

    process: subprocess.Popen[bytes]
    server: ValkeyServer
    app: Celery
    folder: Path

    def send(self, name: str, *, until: str | None = None) -> Path:
        """Send a task that writes to the file returned; it runs until the file `until` is there."""
        path = self.folder / name
        waits_for = str(self.folder / until) if until else None
        self.app.send_task("test.note", args=[str(path), waits_for], queue="agentq.tools")
        return path

    def runs_now(self, name: str) -> None:
        path = self.send(name)
        eventually(lambda: lines(path) == ["begins", "ends"], seconds=BACK_SECONDS, what=f"{name} runs")

    def release(self, until: str) -> None:
        (self.folder / until).touch()

    def reset_connections(self) -> None:
        with self.server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer(is_durable=True) as server:
        yield server


@pytest.fixture(params=POOLS)
def worker(request: pytest.FixtureRequest, server: ValkeyServer, tmp_path: Path) -> Iterator[Worker]:
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "celery", "-A", "tests.support.transport_app", "worker", "-l", "INFO"),
            *(
                "-P",
                request.param,
                "-c",
                "2",
                "-Q",
                "agentq.tools,agentq.control",
                "--without-mingle",
                "--without-gossip",
            ),
        ],
        env={**os.environ, "AGENTQ_BROKER_URL": server.url},
        stdout=log,
        stderr=log,
    )
    worker = Worker(process, server, celery_app(Settings(broker_url=server.url), set_as_current=False), tmp_path)
    try:
        eventually(lambda: " ready." in worker.log, seconds=30, what="the worker is ready")
        yield worker
    finally:
        for until in tmp_path.glob("*.until"):
            until.touch()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        finally:
            process.kill()
            process.wait()
            log.close()


class TestBrokenConnection:
    def test_a_reset_starts_no_second_copy(self, worker: Worker) -> None:
        """A step that runs goes on alone, whatever its connection does, and the worker with it."""
        running = worker.send("running", until="a.until")
        eventually(lambda: lines(running))
        for again in range(3):
            worker.reset_connections()
            worker.runs_now(f"next-{again}")
        self.ends_alone(worker, running)

    @pytest.mark.parametrize("is_graceful", [True, False])
    def test_a_restart_starts_no_second_copy(self, worker: Worker, is_graceful: bool) -> None:
        """Consuming again within ten seconds of Redis being back, untouched by hand."""
        running = worker.send("running", until="a.until")
        eventually(lambda: lines(running))
        worker.server.stop(signal.SIGTERM if is_graceful else signal.SIGKILL)
        # Away for long enough that the waits between two tries have grown.
        eventually(lambda: worker.log.count("Cannot connect to") >= 3, seconds=30)
        worker.server.start()
        back_at = time.monotonic()
        worker.runs_now("next")
        assert time.monotonic() - back_at < BACK_SECONDS
        self.ends_alone(worker, running)

    def test_a_task_that_ends_while_redis_is_away_is_acknowledged_later(self, worker: Worker) -> None:
        """It isn't run again, and nothing stays behind that looks like a step at work."""
        running = worker.send("running", until="a.until")
        eventually(lambda: lines(running))
        worker.server.stop()
        worker.release("a.until")
        eventually(lambda: lines(running) == ["begins", "ends"])
        eventually(lambda: worker.log.count("Cannot connect to") >= 1, seconds=30)
        worker.server.start()
        worker.runs_now("next")
        eventually(lambda: nothing_unacknowledged(worker.server.client()), seconds=BACK_SECONDS)
        assert lines(running) == ["begins", "ends"]

    def test_an_acknowledgement_that_met_a_hung_redis_is_sent_again(self, worker: Worker) -> None:
        """Otherwise each one costs the worker a slot, until it consumes no more."""
        running = [worker.send(f"running-{n}", until="a.until") for n in range(2)]
        eventually(lambda: all(map(lines, running)))
        worker.server.pause()
        worker.release("a.until")
        eventually(lambda: "Couldn't ack" in worker.log or "Connection to broker lost" in worker.log, seconds=30)
        worker.server.resume()
        later = [worker.send(f"later-{n}") for n in range(4)]
        eventually(lambda: all(lines(path) == ["begins", "ends"] for path in later), seconds=2 * BACK_SECONDS)
        eventually(lambda: nothing_unacknowledged(worker.server.client()), seconds=BACK_SECONDS)
        assert [lines(path) for path in running] == [["begins", "ends"]] * 2

    @pytest.mark.parametrize("worker", ["prefork"], indirect=True)  # Threads can't be ended before their tasks.
    def test_a_worker_that_stops_gives_back_what_it_has_not_done(self, worker: Worker) -> None:
        """Another worker does it at once, not after the visibility timeout."""
        running = [worker.send(f"running-{n}", until="never.until") for n in range(2)]
        eventually(lambda: all(map(lines, running)))
        worker.reset_connections()
        eventually(lambda: worker.log.count("Connected to") > 1, seconds=BACK_SECONDS)
        worker.process.send_signal(signal.SIGQUIT)
        worker.process.wait(30)
        client = worker.server.client()
        assert client.llen("agentq.tools") == len(running)
        assert nothing_unacknowledged(client)

    def ends_alone(self, worker: Worker, running: Path) -> None:
        assert lines(running) == ["begins"]
        worker.release("a.until")
        eventually(lambda: lines(running) == ["begins", "ends"])
        eventually(lambda: nothing_unacknowledged(worker.server.client()), what="it is acknowledged")
        assert worker.server.client().llen("agentq.tools") == 0
        assert lines(running) == ["begins", "ends"]
        assert worker.process.poll() is None


def nothing_unacknowledged(client: Redis) -> bool:
    return not client.exists("agentq.unacked", "agentq.unacked_index")


@pytest.mark.parametrize("worker", ["prefork"], indirect=True)
class TestDeaths:
    def test_a_childs_death_is_noticed_soon_and_its_message_is_gone(self, worker: Worker) -> None:
        """The keeper brings the step back and charges the crash; the broker would repeat it without end."""
        running = worker.send("running", until="a.until")
        eventually(lambda: lines(running))
        for child in psutil.Process(worker.process.pid).children():
            child.kill()
        eventually(lambda: "WorkerLostError" in worker.log, seconds=NOTICED_SECONDS)
        eventually(lambda: nothing_unacknowledged(worker.server.client()))
        worker.runs_now("next")
        assert lines(running) == ["begins"]

    def test_a_child_past_its_time_limit_is_ended_and_its_message_is_gone(self, worker: Worker) -> None:
        """A call that hangs must not hold its slot, nor be made again by the broker."""
        running = worker.folder / "running"
        arguments = [str(running), str(worker.folder / "never.until")]
        worker.app.send_task("test.note", args=arguments, queue="agentq.tools", time_limit=1.0)
        eventually(lambda: "TimeLimitExceeded" in worker.log)
        eventually(lambda: nothing_unacknowledged(worker.server.client()))
        worker.runs_now("next")
        assert lines(running) == ["begins"]


class TestClients:
    @pytest.mark.parametrize("worker", ["threads"], indirect=True)
    def test_a_plain_client_is_understood(self, worker: Worker) -> None:
        """Another service has Celery as it comes, and none of our settings."""
        path = worker.folder / "plain"
        plain = Celery(broker=worker.server.url, set_as_current=False)
        plain.send_task("test.note", args=[str(path)], queue="agentq.control", ignore_result=True)
        eventually(lambda: lines(path) == ["begins", "ends"])


class TestRests:
    """What we rely on in kombu. When one of these fails after an upgrade, read `config/transport.py` again."""

    def test_kombu_is_the_version_that_was_read(self) -> None:
        """Its private parts are overridden: another minor version has to be read first."""
        assert kombu.__version__.split(".")[:2] == ["5", "7"]

    def test_what_is_overridden_still_exists(self) -> None:
        """An override that kombu no longer calls would be silent."""
        expected: dict[Any, list[str]] = {
            redis.QoS.ack: ["self", "delivery_tag"],
            redis.QoS.restore_by_tag: ["self", "tag", "client", "leftmost"],
            redis.QoS._remove_from_indices: ["self", "delivery_tag", "pipe"],
            virtual.QoS.can_consume: ["self"],
            virtual.QoS.restore_unacked_once: ["self", "stderr"],
            redis.Channel._get_pool: ["self", "asynchronous"],
            redis.Channel._create_client: ["self", "asynchronous"],
            redis.Channel.conn_or_acquire: ["self", "client"],
            KombuConnection.collect: ["self", "socket_timeout"],
            KombuConnection.get_transport_cls: ["self"],
        }
        found = {function: list(inspect.signature(function).parameters) for function in expected}
        assert found == expected

    @pytest.mark.parametrize(("connection_class", "given_back"), [(KombuConnection, 1), (transport.Connection, 0)])
    def test_only_ours_gives_nothing_back_when_a_connection_breaks(
        self, server: ValkeyServer, connection_class: Any, given_back: int
    ) -> None:
        """The day kombu's own does the same, ours can go."""
        connection = connection_class(server.url)
        received: list[Any] = []
        queue = connection.SimpleQueue("some")
        queue.put("a message")
        queue.close()
        consumer = connection.Consumer(Queue("some"), callbacks=[lambda _, message: received.append(message)])
        consumer.consume()
        connection.drain_events(timeout=5)

        connection.collect()

        client = server.client()
        assert (len(received), client.llen("some")) == (1, given_back)
        if given_back == 0:
            received[0].ack()  # Through a channel that is closed, whose connection is gone.
            assert not client.exists("unacked", "unacked_index")

    @pytest.mark.parametrize(
        ("url", "transport_class", "parts"),
        [
            ("redis://h:1/2", transport.Transport, ("h", 1, "2", None, None)),
            ("valkey://user:p%40ss@h", transport.Transport, ("h", 6379, "0", "user", "p@ss")),
            ("rediss://h", transport.Transport, ("h", 6379, "0", None, None)),
            (
                "redis+socket:///a/b.sock?virtual_host=3",
                transport.Transport,
                ("socket:///a/b.sock?virtual_host=3", None, "/", None, None),
            ),
            (
                "sentinel://:pass@a;b:2?master_name=m",
                transport.SentinelTransport,
                ("a", 26379, "0", None, "pass"),
            ),
        ],
    )
    def test_each_kind_of_url_gets_our_transport(
        self, url: str, transport_class: type, parts: tuple[object, ...]
    ) -> None:
        """A kind that slipped through would lose its steps' peace without a word."""
        app = celery_app(Settings(broker_url=url), set_as_current=False)
        connection = app.connection_for_read()
        found = (connection.hostname, connection.port, connection.virtual_host, connection.userid, connection.password)
        assert found == parts
        assert type(connection.transport) is type(connection.clone().transport) is transport_class

    def test_a_tls_connection_checks_the_certificate(self) -> None:
        """kombu's default is not to."""
        app = celery_app(Settings(broker_url="rediss://h?ssl_ca_certs=ca.pem"), set_as_current=False)
        ssl = app.connection_for_read().ssl
        assert (ssl["ssl_cert_reqs"].name, ssl["ssl_ca_certs"]) == ("CERT_REQUIRED", "ca.pem")
