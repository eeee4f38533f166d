"""`agentq up`, as a person meets it: everything starts, is there the next time, and nothing outlives it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentq import AgentQ, RunStatus
from agentq.config.settings import Settings
from tests.support import smoke_agents
from tests.support.processes import LoggedProcess, descendants, is_alive
from tests.support.valkey import free_port
from tests.support.waiting import eventually
from tests.support.workers import environment

UP = (sys.executable, "-m", "agentq.cli.main", "up")
UP_TEXT = "agentq is up"
REFUSED = 2
PROCESSES = 9  # Valkey, Flower, three workers, two of them with a keeper, and two pool children.
POOL_AND_KEEPER = 2


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a project with one agent, and a port that is free for Flower."""
    shutil.copy(smoke_agents.__file__, tmp_path / "agents_here.py")
    return Settings(
        home=tmp_path / ".agentq",
        agents=("agents_here",),
        flower_port=free_port(),
        tools_concurrency=1,
        model_concurrency=2,
    )


@contextmanager
def running_up(settings: Settings) -> Iterator[LoggedProcess]:
    folder = settings.home.parent
    process = LoggedProcess(
        UP, log_path=folder / "up.log", environ=environment(settings, folder), folder=folder, ready_text=UP_TEXT
    )
    process.start()
    try:
        process.wait_ready(seconds=60)
        yield process
    finally:
        process.stop(seconds=60)


def at_least(count: int, pid: int) -> list[int] | None:
    """What the process started, once that is so many."""
    found = descendants(pid)
    return found if len(found) >= count else None


def refusal(settings: Settings) -> str:
    """What an `agentq up` says that refuses to start."""
    folder = settings.home.parent
    answer = subprocess.run(
        UP, env=environment(settings, folder), cwd=folder, capture_output=True, text=True, check=False, timeout=90
    )
    assert answer.returncode == REFUSED, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def test_a_run_finishes_and_is_there_the_next_time(settings: Settings) -> None:
    """State stays in the folder: the evening's runs are there in the morning, whatever ended the evening."""
    with running_up(settings) as up, AgentQ(settings) as client:
        run_id = client.enqueue("clerk", "Refund order 17")
        assert client.wait(run_id, timeout=30).status is RunStatus.COMPLETED
        everything = descendants(up.pid)
        up.kill(signal.SIGINT)
        assert up.wait(seconds=60) == 0
    assert [pid for pid in everything if is_alive(pid)] == []
    with running_up(settings), AgentQ(settings) as client:
        assert client.status(run_id) is RunStatus.COMPLETED
        assert client.wait(client.enqueue("clerk", "Refund order 17"), timeout=30).status is RunStatus.COMPLETED


def test_nothing_outlives_it_when_it_is_killed(settings: Settings) -> None:
    """A worker that goes on unseen goes on calling tools."""
    with running_up(settings) as up:
        everything = eventually(lambda: at_least(PROCESSES, up.pid), what="all processes")
        assert f"http://127.0.0.1:{settings.flower_port}" in up.log()
        up.kill(signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in everything), what="the end of all")


def test_a_killed_worker_takes_its_pool_and_its_keeper_with_it_and_is_started_again(settings: Settings) -> None:
    """A pool child that outlives its worker is at a tool that is about to be called again."""
    with running_up(settings) as up:
        worker = next(pid for pid in descendants(up.pid) if _is_tools_worker(pid))
        its_own = eventually(lambda: at_least(POOL_AND_KEEPER, worker), what="pool and keeper")
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in its_own), what="the end of what it started")
        up.wait_for_log("tools worker    | ended with signal 9; starting it again in 1 s")
        eventually(lambda: any(_is_tools_worker(pid) for pid in descendants(up.pid)))


def test_a_second_one_in_the_same_folder_names_the_first(settings: Settings) -> None:
    """Two servers on one data folder destroy it."""
    with running_up(settings) as up:
        said = refusal(replace(settings, flower_port=free_port()))
        assert f"pid {up.pid}" in said
        assert str(settings.home) in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"agents": ()}, "AGENTQ_AGENTS is empty"),
        ({"flower_address": "0.0.0.0"}, "AGENTQ_FLOWER_BASIC_AUTH"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    settings: Settings, change: dict[str, object], named: str
) -> None:
    """One clear line, not a screen of restarts."""
    said = refusal(replace(settings, **change))  # type: ignore[arg-type]
    assert named in said
    assert said.count("\n") == 1
    assert not settings.home.exists()


def test_a_flower_port_that_is_taken_is_refused_by_name(settings: Settings) -> None:
    """Another project's Flower is the usual reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.flower_port))
        taken.listen()
        assert "AGENTQ_FLOWER_PORT" in refusal(settings)


def test_agents_that_cannot_be_imported_end_it_with_their_name(settings: Settings) -> None:
    """Started again and again they would only repeat their error."""
    said = refusal(replace(settings, agents=("no_such_module",)))
    assert "no_such_module" in said
    assert "starting it again" not in said


def _is_tools_worker(pid: int) -> bool:
    """The worker's main process: its pool children have the same command, and another parent."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        return process.cmdline()[-2:] == ["worker", "tools"] and parent is not None and parent.cmdline()[-1:] == ["up"]
    except psutil.NoSuchProcess:
        return False
