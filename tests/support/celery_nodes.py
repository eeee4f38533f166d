"""pytest-celery's nodes over processes, and over containers where a Docker daemon runs: the same tests on both.

pytest-celery asks little of what a node wraps: `celeryconfig`, `status`, `name`, `id`, `logs()`, `ready()`, `kill()`,
`restart()`, `reload()` and `teardown()`.
"""

import os
import signal
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from agentq.adapters.embedded.valkey import READY_TEXT, embedded_valkey
from agentq.adapters.sql.migration import upgrade
from agentq.config.settings import Settings, environment_of
from tests.support.processes import LoggedProcess
from tests.support.waiting import eventually
from tests.support.workers import PROJECT, WorkerProcess
from tests.support.workers import READY_TEXT as WORKER_READY_TEXT

BROKER_IMAGE = "valkey/valkey:9-alpine"
DATABASE_IMAGE = "postgres:18-alpine"


class Container(Protocol):
    """What a node of pytest-celery wraps."""

    celeryconfig: dict[str, str]

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def status(self) -> str: ...

    def logs(self) -> str: ...

    def ready(self) -> bool: ...

    def kill(self, signal: str | int) -> None: ...

    def restart(self, timeout: float) -> None: ...

    def reload(self) -> None: ...

    def teardown(self) -> None: ...


class Machine(Protocol):
    """Where the nodes of one test run. `settings` are as the test itself reaches what is there."""

    settings: Settings

    def broker(self) -> Container: ...

    def worker(self, role: str) -> Container: ...

    def close(self) -> None: ...


class ProcessContainer:
    """A process in the place of a container."""

    def __init__(self, name: str, process: LoggedProcess, *, celeryconfig: dict[str, str]) -> None:
        self.name = name
        self.celeryconfig = celeryconfig
        self._process = process
        process.start()

    @property
    def id(self) -> str:
        return f"{self._process.pid:012d}"

    @property
    def status(self) -> str:
        return "running" if self._process.is_running else "exited"

    def logs(self) -> str:
        return self._process.log()

    def ready(self) -> bool:
        self._process.wait_ready()
        return True

    def kill(self, signal: str | int) -> None:
        self._process.kill(_signal(signal))
        if _signal(signal) in _ENDING:
            self._process.wait()

    def restart(self, timeout: float) -> None:
        self._process.stop(seconds=timeout)
        self._process.start()
        self._process.wait_ready()

    def reload(self) -> None:
        """A process knows its own state."""

    def teardown(self) -> None:
        self._process.stop()


class ProcessMachine:
    """This machine, with the embedded servers."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self.settings = replace(settings, home=folder / "home")
        self.settings.home.mkdir(mode=0o700)
        upgrade(self.settings.effective_database_url)

    def broker(self) -> Container:
        server = embedded_valkey(self.settings.home)
        process = LoggedProcess(
            server.argv, log_path=self._folder / "valkey.log", environ=os.environ, ready_text=READY_TEXT
        )
        container = ProcessContainer("broker", process, celeryconfig={"url": server.url, "host_url": server.url})
        container.ready()
        return container

    def worker(self, role: str) -> Container:
        return ProcessContainer(role, WorkerProcess(role, self.settings, self._folder), celeryconfig={})

    def close(self) -> None:
        """Each node ends by its own teardown."""


class DockerContainer:
    """A container of the Docker daemon."""

    def __init__(self, container: Any, *, celeryconfig: dict[str, str], ready_text: str) -> None:
        self.celeryconfig = celeryconfig
        self._container = container
        self._ready_text = ready_text

    @property
    def id(self) -> str:
        return str(self._container.id)

    @property
    def name(self) -> str:
        return str(self._container.name)

    @property
    def status(self) -> str:
        return str(self._container.status)

    def logs(self) -> str:
        output: bytes = self._container.logs()
        return output.decode(errors="replace")

    def ready(self) -> bool:
        eventually(lambda: self._ready_text in self.logs(), seconds=60, what=f"{self._ready_text!r} of {self.name}")
        self.reload()
        return True

    def kill(self, signal: str | int) -> None:
        self._container.kill(signal=signal)
        if _signal(signal) in _ENDING:
            self._container.wait()

    def restart(self, timeout: float) -> None:
        readies = self.logs().count(self._ready_text)
        self._container.restart(timeout=int(timeout))
        eventually(lambda: self.logs().count(self._ready_text) > readies, seconds=60)
        self.reload()

    def reload(self) -> None:
        self._container.reload()

    def teardown(self) -> None:
        self._container.remove(force=True, v=True)


class DockerMachine:
    """The Docker daemon, with the project's own image, Valkey and PostgreSQL in a network of their own."""

    def __init__(self, client: Any, folder: Path, settings: Settings) -> None:
        self._client = client
        self._folder = folder
        self._id = f"agentq-smoke-{uuid.uuid4().hex[:8]}"
        self._image, _ = client.images.build(path=str(PROJECT), tag="agentq:smoke")
        self._network = client.networks.create(self._id)
        self._database = self._run(DATABASE_IMAGE, "database", {"POSTGRES_HOST_AUTH_METHOD": "trust"}, port=5432)
        self.settings = replace(settings, home=folder / "home", database_url=self._database_url("127.0.0.1", 5432))
        eventually(self._is_migrated, seconds=60, what="a database to migrate")

    def broker(self) -> Container:
        container = self._run(BROKER_IMAGE, "broker", {}, port=6379)
        host_url = f"redis://127.0.0.1:{_published(container, 6379)}/0"
        self.settings = replace(self.settings, broker_url=host_url)
        node = DockerContainer(
            container,
            celeryconfig={"url": f"redis://{container.name}:6379/0", "host_url": host_url},
            ready_text=READY_TEXT,
        )
        node.ready()
        return node

    def worker(self, role: str) -> Container:
        inside = replace(
            self.settings,
            home=Path("/data/home"),
            database_url=f"postgresql://postgres@{self._id}-database/postgres",
            broker_url=f"redis://{self._id}-broker:6379/0",
        )
        container = self._run(
            self._image, role, {**environment_of(inside), "PYTHONPATH": "/data"}, command=["agentq", "worker", role]
        )
        return DockerContainer(container, celeryconfig={}, ready_text=WORKER_READY_TEXT)

    def close(self) -> None:
        self._database.remove(force=True, v=True)
        self._network.remove()

    def _run(
        self, image: Any, name: str, environ: Mapping[str, str], *, port: int | None = None, command: Any = None
    ) -> Any:
        container = self._client.containers.run(
            image,
            command,
            name=f"{self._id}-{name}",
            network=self._network.name,
            environment=dict(environ),
            volumes={str(self._folder): {"bind": "/data", "mode": "rw"}},
            # The host's port stays the same over a restart, as a service's address does.
            ports={f"{port}/tcp": ("127.0.0.1", 0)} if port else {},
            detach=True,
        )
        if port:
            eventually(lambda: _published(container, port), what=f"a port of {container.name}")
        return container

    def _database_url(self, host: str, port: int) -> str:
        return f"postgresql://postgres@{host}:{_published(self._database, port)}/postgres"

    def _is_migrated(self) -> bool:
        try:
            upgrade(self.settings.database_url)
        except Exception:  # Whatever a server says that is still starting.
            return False
        return True


def machine(folder: Path, settings: Settings) -> Machine:
    """Docker where a daemon answers, else this machine; SMOKE_NODES=processes or =docker says which."""
    wanted = os.environ.get("SMOKE_NODES", "")
    client = None if wanted == "processes" else _docker_client()
    if client is not None:
        return DockerMachine(client, folder, settings)
    assert wanted != "docker", "SMOKE_NODES is docker, but no Docker daemon answers"
    return ProcessMachine(folder, settings)


def _docker_client() -> Any | None:
    import docker

    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except docker.errors.DockerException:
        return None
    return client


def _published(container: Any, port: int) -> int:
    container.reload()
    bindings = container.ports.get(f"{port}/tcp") or [{"HostPort": 0}]
    return int(bindings[0]["HostPort"])


_ENDING = (signal.SIGKILL, signal.SIGTERM)


def _signal(given: str | int) -> signal.Signals:
    return signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
