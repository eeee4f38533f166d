"""A worker that would break a promise doesn't start: one clear line says what is wrong and what to do, exit code 2."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.migration import upgrade
from agentq.adapters.sql.schema import VERSION, deployment
from agentq.config.settings import Settings
from tests.support.valkey import ValkeyServer
from tests.support.workers import environment

WORKER = ("-m", "agentq.cli.main", "worker", "tools")
PLAIN_CELERY = ("-m", "celery", "-A", "agentq.tasks.app:app", "worker", "-c", "1")
NOBODY_LISTENS = "redis://127.0.0.1:1/0"
REFUSED = 2


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def settings(tmp_path: Path, valkey: ValkeyServer) -> Settings:
    """With these a worker starts."""
    valkey.flush()
    settings = Settings(
        home=tmp_path, broker_url=valkey.url, agents=("tests.support.smoke_agents",), keeper_beside_worker=False
    )
    upgrade(settings.effective_database_url)
    return settings


def refusal(settings: Settings, command: tuple[str, ...] = WORKER) -> str:
    """The one line that such a worker leaves behind."""
    ended = subprocess.run(
        (sys.executable, *command),
        env=environment(settings, settings.home),
        cwd=settings.home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == REFUSED, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith(("agentq: ", "error: "))]
    return line.partition(": ")[2]


def change_deployment(settings: Settings, **values: Any) -> None:
    database = Database(settings.effective_database_url)
    with database.writing() as connection:
        connection.execute(update(deployment).values(**values))
    database.dispose()


def test_a_database_without_schema(settings: Settings, tmp_path: Path) -> None:
    """Somebody forgot the migration, or named another database."""
    empty = replace(settings, database_url=f"sqlite:///{tmp_path / 'empty.db'}")
    assert refusal(empty) == "the database has no schema yet: run `agentq db upgrade`"


def test_a_schema_that_is_too_old(settings: Settings) -> None:
    """Code of the next release on a database of this one."""
    change_deployment(settings, version=VERSION - 1)
    assert refusal(settings) == (
        f"the database's schema is at version {VERSION - 1}, this agentq needs {VERSION}: run `agentq db upgrade`"
    )


def test_a_schema_that_no_longer_admits_this_version(settings: Settings) -> None:
    """A worker that was forgotten in a deploy would write rows that the others can't read."""
    change_deployment(settings, version=VERSION + 5, oldest_code_version=VERSION + 1)
    assert refusal(settings) == (
        f"the database's schema admits agentq from schema version {VERSION + 1} on, this one knows {VERSION}: "
        "install a newer agentq"
    )


def test_a_redis_of_another_deployment(settings: Settings, valkey: ValkeyServer) -> None:
    """Two databases on one Redis would reap each other's steps."""
    with valkey.client() as client:
        client.set("agentq:deployment", "another")
    line = refusal(settings)
    assert line.startswith("the Redis keys under 'agentq' belong to deployment 'another', the database to ")
    assert "set AGENTQ_KEY_PREFIX to another value" in line
    with valkey.client() as client:
        assert client.get("agentq:deployment") == "another"


@pytest.mark.parametrize("queue", ["tools", "isolated"])
def test_threads_that_would_write(settings: Settings, queue: str) -> None:
    """A call in a thread can't be ended, so nobody could say by when a write has ended."""
    line = refusal(settings, (*PLAIN_CELERY, "--pool", "threads", "-Q", f"agentq.control,agentq.{queue}"))
    assert line == (
        "this pool can't end a call that outlives its deadline, but 'refund' writes: "
        f"serve agentq.{queue} with --pool prefork"
    )


def test_a_module_of_agents_that_is_not_there(settings: Settings) -> None:
    """A typing error in AGENTQ_AGENTS must not become a worker that serves nobody."""
    line = refusal(replace(settings, agents=("shop.agents",)))
    assert line == "agents module 'shop.agents' can't be imported: ModuleNotFoundError: No module named 'shop'"


def test_a_module_of_agents_that_fails(settings: Settings, tmp_path: Path) -> None:
    """Its own error, and where it is."""
    (tmp_path / "broken_agents.py").write_text("import json\n\njson.loads('{')\n")
    line = refusal(replace(settings, agents=("broken_agents",)))
    assert "broken_agents" in line and "JSONDecodeError" in line


def test_no_agents_at_all(settings: Settings) -> None:
    """A worker that serves nobody hands every step back."""
    assert "AGENTQ_AGENTS is empty" in refusal(replace(settings, agents=()))


def test_a_redis_that_is_not_there(settings: Settings) -> None:
    """Its address is in the line."""
    assert "127.0.0.1:1" in refusal(replace(settings, broker_url=NOBODY_LISTENS))


def test_a_worker_of_all_roles_ends_as_its_parts_do(settings: Settings) -> None:
    """Whatever supervises it must learn that starting again won't help."""
    change_deployment(settings, version=VERSION - 1)
    ended = subprocess.run(
        (sys.executable, "-m", "agentq.cli.main", "worker"),
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == REFUSED, ended.stderr
    assert "run `agentq db upgrade`" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("change", [{"version": VERSION - 1}, {"oldest_code_version": VERSION + 1}])
def test_a_keeper_is_as_careful(settings: Settings, change: dict[str, int]) -> None:
    """It writes to the same rows."""
    change_deployment(settings, **change)
    assert "the database's schema" in refusal(settings, ("-m", "agentq.keeper"))
    assert "the database's schema" in refusal(settings, ("-m", "agentq.cli.main", "keeper"))
