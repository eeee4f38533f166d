"""Flower with agentq's configuration: closed by default, read-only, persistent and bounded."""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from agentq import AgentQ, RunStatus
from agentq.adapters.embedded.valkey import READY_TEXT, embedded_valkey
from agentq.adapters.sql.migration import upgrade
from agentq.config import flower as flower_configuration
from agentq.config.celery import celery_config
from agentq.config.flower import flower_options
from agentq.config.settings import Settings
from agentq.domain.errors import ConfigurationError
from tests.support import smoke_agents
from tests.support.processes import LoggedProcess
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess, environment

FLOWER_READY_TEXT = "Visit me at"
OK, UNAUTHORIZED, FORBIDDEN = 200, 401, 403


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.17", "flower.example.com", ""])
def test_flower_refuses_an_address_that_others_can_reach_without_credentials(address: str) -> None:
    """Its pages show every input of every tool, and can end tasks."""
    with pytest.raises(ConfigurationError) as caught:
        flower_options(Settings(flower_address=address))
    assert "AGENTQ_FLOWER_BASIC_AUTH" in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_flower_needs_no_credentials_on_this_machine_alone(address: str) -> None:
    """A first try must not begin with passwords."""
    assert flower_options(Settings(flower_address=address))["basic_auth"] == []


def test_a_comma_in_a_password_is_a_part_of_it() -> None:
    """Flower would take a text with a comma for two users, one of them with a part of the password."""
    options = flower_options(Settings(flower_address="0.0.0.0", flower_basic_auth="eve:one,two"))
    assert options["basic_auth"] == ["eve:one,two"]


@pytest.mark.parametrize("credentials", ["eve", "eve:", ":secret"])
def test_half_of_the_credentials_is_refused_and_not_shown(credentials: str) -> None:
    """An empty password is none, and a log is no place for the other half."""
    with pytest.raises(ConfigurationError) as caught:
        flower_options(Settings(flower_address="0.0.0.0", flower_basic_auth=credentials))
    assert "user:password" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_address_of_the_command_line_is_held_to_the_same_rule() -> None:
    """`celery flower --conf=... --address=0.0.0.0` must not open what the settings close."""
    given: Mapping[str, Any] = {"address": "0.0.0.0", "basic_auth": [], "auth": ""}
    with pytest.raises(ConfigurationError):
        flower_options(Settings(), given=given)
    assert flower_options(Settings(), given={**given, "basic_auth": ["eve:secret"]})["address"] == "0.0.0.0"


# --- The real one ---------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """Of a home with a server that runs, and a port that is free."""
    home = tmp_path / "home"
    server = embedded_valkey(home)
    process = LoggedProcess(server.argv, log_path=tmp_path / "valkey.log", environ=os.environ, ready_text=READY_TEXT)
    process.start()
    process.wait_ready()
    yield Settings(home=home, flower_port=_free_port())
    process.stop()


@contextmanager
def running_flower(settings: Settings, tmp_path: Path, *arguments: str, **variables: str) -> Iterator[LoggedProcess]:
    process = LoggedProcess(
        (sys.executable, "-m", "agentq.cli.main", "flower", *arguments),
        log_path=tmp_path / "flower.log",
        environ={**environment(settings), **variables},
        folder=tmp_path,
        ready_text=FLOWER_READY_TEXT,
    )
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def status(settings: Settings, path: str, *, method: str = "GET", credentials: str = "") -> int:
    """The HTTP status that Flower answers with."""
    request = urllib.request.Request(f"http://127.0.0.1:{settings.flower_port}{path}", method=method)
    if credentials:
        request.add_header("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_flower_shows_and_changes_nothing(settings: Settings, tmp_path: Path) -> None:
    """To end a task from a browser makes an unknown write of it; the API would let every program do it."""
    with running_flower(settings, tmp_path, FLOWER_UNAUTHENTICATED_API="true") as flower:
        assert status(settings, "/healthcheck") == OK
        assert status(settings, "/tasks") == OK
        assert status(settings, "/broker") == OK
        assert status(settings, "/api/tasks") == UNAUTHORIZED
        assert status(settings, "/api/task/revoke/some-id", method="POST") == UNAUTHORIZED
        assert "127.0.0.1" in flower.log()
    assert list(settings.home.glob("flower*")), "what it saw is there the next time"


def test_flower_remembers_tasks_over_a_restart(settings: Settings, tmp_path: Path) -> None:
    """An operator looks at what happened before the deploy."""
    task = "/task/11111111-2222-3333-4444-555555555555"
    with running_flower(settings, tmp_path):
        eventually(lambda: _sends_event(settings) and status(settings, task) == OK)
    with running_flower(settings, tmp_path):
        assert status(settings, task) == OK


def test_a_step_has_a_readable_name_and_the_one_that_ended_its_run_is_red(settings: Settings, tmp_path: Path) -> None:
    """Who sees a red task in Flower finds the run and the reason there, not in a log."""
    shutil.copy(smoke_agents.__file__, tmp_path / "agents_here.py")
    credentials = "eve:secret"
    settings = replace(
        settings, agents=("agents_here",), tools_concurrency=1, model_concurrency=2, flower_basic_auth=credentials
    )
    upgrade(settings.effective_database_url)
    workers = [WorkerProcess(role, settings, tmp_path) for role in ("model", "tools")]
    try:
        with running_flower(settings, tmp_path), AgentQ(settings) as client:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.wait_ready()
            good = client.wait(client.enqueue("clerk", "Refund order 17"), timeout=30)
            bad = client.wait(client.enqueue("sulker", "Refund order 17"), timeout=30)
            assert (good.status, bad.status) == (RunStatus.COMPLETED, RunStatus.FAILED)

            def shown() -> dict[str, Any]:
                return {task["kwargs"] + task["args"]: task for task in _tasks(settings, credentials).values()}

            tool = f"agent=clerk tool=refundrun={good.id} step=3 attempt=1"
            model = f"agent=sulker modelrun={bad.id} step=1 attempt=1"
            eventually(
                lambda: {tool, model} <= {name for name, task in shown().items() if task["runtime"] or task["failed"]}
            )
            assert shown()[tool]["state"] == "SUCCESS"
            assert shown()[tool]["name"] == "agentq.step clerk/refund"
            assert shown()[model]["state"] == "FAILURE"
            for part in (bad.id, "NOT_RETRYABLE", "this model answers nobody"):
                assert part in shown()[model]["exception"]
    finally:
        for worker in workers:
            worker.stop()


def _tasks(settings: Settings, credentials: str) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{settings.flower_port}/api/tasks")
    request.add_header("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _sends_event(settings: Settings) -> bool:
    """Tells of a task as a worker does; Flower may not have begun to listen."""
    app = Celery()
    app.conf.update(celery_config(settings))
    with app.connection() as connection, app.events.Dispatcher(connection) as dispatcher:
        dispatcher.send(
            "task-received", uuid="11111111-2222-3333-4444-555555555555", name="agentq.step", args="", kwargs=""
        )
    return True


def test_flower_asks_for_credentials_and_is_read_only_with_them(settings: Settings, tmp_path: Path) -> None:
    """Who may watch may not therefore end tasks."""
    closed = Settings(
        home=settings.home, flower_port=settings.flower_port, flower_address="0.0.0.0", flower_basic_auth="eve:secret"
    )
    with running_flower(closed, tmp_path):
        assert status(closed, "/tasks") == UNAUTHORIZED
        assert status(closed, "/tasks", credentials="eve:wrong") == UNAUTHORIZED
        assert status(closed, "/tasks", credentials="eve:secret") == OK
        assert status(closed, "/api/task/revoke/some-id", method="POST", credentials="eve:secret") == FORBIDDEN


def test_an_open_flower_is_refused_with_one_line(tmp_path: Path) -> None:
    """Both ways to start it refuse it, before a port is open."""
    settings = Settings(home=tmp_path / "home", flower_address="0.0.0.0", flower_port=_free_port())
    configuration = f"--conf={flower_configuration.__file__}"
    for command in (
        ("-m", "agentq.cli.main", "flower"),
        ("-m", "celery", "-A", "agentq.tasks.app", "flower", configuration),
        ("-m", "celery", "-A", "agentq.tasks.app", "flower", configuration, "--address=0.0.0.0"),
    ):
        answer = subprocess.run(
            [sys.executable, *command],
            env=environment(settings),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert answer.returncode == 2, answer.stderr
        assert answer.stderr.count("\n") == 1
        assert "AGENTQ_FLOWER_BASIC_AUTH" in answer.stderr


def test_a_port_that_is_taken_is_named(settings: Settings, tmp_path: Path) -> None:
    """A second project on the same machine needs another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.flower_port))
        taken.listen()
        answer = subprocess.run(
            [sys.executable, "-m", "agentq.cli.main", "flower"],
            env=environment(settings),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert answer.returncode == 2, answer.stderr
    assert f"port {settings.flower_port}" in answer.stderr.splitlines()[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
