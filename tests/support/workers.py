"""Workers and keepers as they really run: processes of their own, with their output in a file."""

import itertools
import os
import sys
from pathlib import Path

import psutil

from agentq.config.settings import PREFIX, Settings, environment_of
from tests.support.processes import LoggedProcess, is_alive
from tests.support.waiting import eventually

READY_TEXT = " ready."  # How a Celery worker says it.
_numbers = itertools.count(1)
PROJECT = Path(__file__).parents[2]
AGENTQ = "agentq.cli.main"


class WorkerProcess(LoggedProcess):
    """`agentq worker ROLE`. Its `pid` is the worker's main process; kill a pool child by one of `pool_pids`."""

    def __init__(
        self, role: str, settings: Settings, folder: Path, *, arguments: tuple[str, ...] = (), module: str = AGENTQ
    ) -> None:
        """Agents named in the settings are found in `folder` and in the project; its output goes to a file there.
        `module` is what runs as the command."""
        super().__init__(
            (sys.executable, "-m", module, "worker", role, *arguments),
            log_path=folder / f"{role}-{next(_numbers)}.log",
            environ=environment(settings, folder),
            folder=folder,
            ready_text=READY_TEXT,
        )

    @property
    def pool_pids(self) -> list[int]:
        """The children of a prefork pool."""
        return [pid for pid in _children(self.pid) if not _is_keeper(pid)]

    @property
    def keeper_pid(self) -> int:
        """Of the keeper beside it, once that runs."""
        return eventually(
            lambda: next((pid for pid in _children(self.pid) if _is_keeper(pid)), 0), what="a keeper beside the worker"
        )


class KeeperProcess(LoggedProcess):
    """`agentq keeper`, alone."""

    def __init__(self, settings: Settings, folder: Path, *, module: str = AGENTQ) -> None:
        super().__init__(
            (sys.executable, "-m", module, "keeper"),
            log_path=folder / f"keeper-{next(_numbers)}.log",
            environ=environment(settings, folder),
            folder=folder,
        )


def environment(settings: Settings, *python_folders: Path) -> dict[str, str]:
    """The environment that gives a process these settings, and modules in these folders to import."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    folders = [str(folder) for folder in (*python_folders, PROJECT)]
    return {
        **inherited,
        **environment_of(settings),
        "PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
    }


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children() if is_alive(child.pid)]
    except psutil.NoSuchProcess:
        return []


def _is_keeper(pid: int) -> bool:
    """By its command; while its launcher is still becoming it, that holds the command too."""
    try:
        return "agentq.keeper" in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False
