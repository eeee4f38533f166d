"""The wheel holds agentq alone, and is all that a machine needs."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.architecture.tree import copy_project
from tests.support.processes import LoggedProcess
from tests.support.valkey import free_port

pytestmark = pytest.mark.timeout(600)  # Building and installing fetch what they need.

DEMO_SECONDS_MAX = 120

AGENTS = """
import agentq
from agentq import Agent, FunctionModel, ToolEffect, tool
from agentq.domain.model import ToolCall

@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def send(parcel: str) -> str:
    "Send a parcel."
    with open("ledger.txt", "a") as ledger:
        ledger.write(f"{parcel} {agentq.__file__}")
    return f"{parcel} sent"

def reply(messages, tools):
    last = messages[-1]
    return last["content"] if last["role"] == "tool" else ToolCall(id="1", name="send", arguments={"parcel": "17"})

sender = Agent(name="sender", model=FunctionModel(reply), instructions="Send.", tools=[send])
"""


def build(project: Path, *arguments: str) -> Path:
    """What `python -m build` made of it."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(project / "made"), *arguments, str(project)],
        check=True,
        capture_output=True,
        text=True,
        cwd=project,
    )
    [made] = (project / "made").iterdir()
    return made


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: nothing beside it is there, and the build leaves nothing in the real one."""
    return copy_project(tmp_path_factory.mktemp("wheel") / "project")


@pytest.fixture(scope="session")
def wheel(project: Path) -> Path:
    return build(project, "--wheel")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    subprocess.run(
        [programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}[embedded]"],
        check=True,
        capture_output=True,
        cwd=folder,
    )
    return programs


def environ_of(installed: Path, **settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "TMPDIR", "HOME")}
    return {**kept, "PATH": f"{installed}:/usr/bin:/bin", **settings}


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A program of that environment, in an empty folder, on a machine that has never heard of our repository."""
    return subprocess.run(
        [installed / command[0], *command[1:]],
        env=environ_of(installed),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEMO_SECONDS_MAX,
    )


def test_the_wheel_holds_agentq_alone(wheel: Path) -> None:
    """A top-level `tasks` or `config` would hide the one of every Celery user's own project."""
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert tops == {"agentq", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}


def test_the_wheel_holds_every_module(project: Path, wheel: Path) -> None:
    """The links are folders there; what isn't Python comes along as well."""
    inside = {"agentq": Path("agentq"), "tasks": Path("agentq/tasks"), "config": Path("agentq/config")}
    expected = {
        str(home / path.relative_to(project / folder))
        for folder, home in inside.items()
        for pattern in ("*.py", "*.lua", "*.mako", "*.sql", "py.typed")
        for path in (project / folder).rglob(pattern)
    }
    assert {name for name in names(wheel) if name.startswith("agentq/")} == expected


def test_the_wheel_of_the_source_archive_is_the_same(project: Path, wheel: Path, tmp_path: Path) -> None:
    """Who builds from the archive has no links, and gets the same package."""
    archive = build(copy_project(tmp_path / "project"), "--sdist")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert names(build(unpacked, "--wheel")) == names(wheel)


def test_an_empty_environment_has_all_of_it(installed: Path, tmp_path: Path) -> None:
    """Whoever installs it has no repository to look things up in."""
    assert run(installed, tmp_path, "agentq", "--version").stdout.startswith("agentq ")
    answer = run(installed, tmp_path, "agentq", "db", "upgrade")
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / ".agentq" / "agentq.db").exists()
    for bare in ("tasks", "config"):
        assert "ModuleNotFoundError" in run(installed, tmp_path, "python", "-c", f"import {bare}").stderr


def test_the_demo_runs_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    """It is the first thing that a newcomer types, and keeps each promise that it shows."""
    answer = run(installed, tmp_path, "agentq", "demo", "--json")
    assert answer.returncode == 0, answer.stderr
    summary = json.loads(answer.stdout)
    assert summary["runs"] == summary["completed"] == 6
    assert summary["dead_lettered"] == summary["resolved"] == 1
    assert summary["duplicate_refunds"] == 0


def test_workers_run_a_persons_own_agents_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    """That is what it is installed for: a module in a folder, and the commands; nothing of it comes from elsewhere."""
    (tmp_path / "parcels.py").write_text(AGENTS)
    up = LoggedProcess(
        (str(installed / "agentq"), "up"),
        log_path=tmp_path / "up.log",
        environ=environ_of(installed, AGENTQ_AGENTS="parcels", AGENTQ_FLOWER_PORT=str(free_port())),
        folder=tmp_path,
        ready_text="agentq is up",
    )
    up.start()
    try:
        up.wait_ready(seconds=60)
        answer = run(installed, tmp_path, "agentq", "enqueue", "sender", "Send parcel 17", "--wait", "--json")
    finally:
        up.stop()
    assert (answer.returncode, json.loads(answer.stdout)["output"]) == (0, "17 sent"), answer.stderr
    parcel, _, came_from = (tmp_path / "ledger.txt").read_text().partition(" ")
    assert (parcel, Path(came_from).is_relative_to(installed.parent)) == ("17", True)
