"""The compose file's services as processes of this machine: their commands, environments and health checks.

What a container would bring is stood in for: names of services become ports here, folders of volumes become folders of
the test, and the images' programs are those of the test's own environment. The rest is run as it is written.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import LoggedProcess
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"

_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\})")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_numbers = itertools.count(1)


class UnsetVariableError(Exception):
    """The compose file asks for a variable that isn't there: `docker compose` would refuse."""


def compose_file() -> dict[str, Any]:
    """As it is written, with its variables."""
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
    return loaded


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """The value with the variables put in, as `docker compose` does it. Raises UnsetVariableError."""
    match value:
        case str():
            return _VARIABLE.sub(lambda found: _replacement(found, variables), value)
        case dict():
            return {key: interpolated(inner, variables) for key, inner in value.items()}
        case list():
            return [interpolated(inner, variables) for inner in value]
        case _:
            return value


def _replacement(found: re.Match[str], variables: Mapping[str, str]) -> str:
    if found["dollar"]:
        return "$"
    value = variables.get(found["name"], "")
    if value or found["kind"] is None:
        return value
    if found["kind"] == "?":
        raise UnsetVariableError(f"{found['name']}: {found['text']}")
    return found["text"]


def seconds(duration: str) -> float:
    """Of a duration as compose writes it, such as `1m30s`."""
    found = _DURATION.fullmatch(duration)
    assert found and duration, f"not a duration: {duration!r}"
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + rest


def image_environment() -> dict[str, str]:
    """What the image sets for every service, but for where its own programs are."""
    last_stage = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    settings = [line.removeprefix("ENV ") for line in last_stage.splitlines() if line.startswith("ENV ")]
    pairs = [pair.partition("=") for line in settings for pair in line.split()]
    return {name: value for name, _, value in pairs if name != "PATH"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where this machine has what the containers have: texts of the file with what stands for them, and programs."""

    replaced: Mapping[str, str]
    folder: Path
    programs: tuple[Path, ...] = ()

    def text(self, value: str) -> str:
        for written, found in self.replaced.items():
            value = value.replace(written, found)
        return value

    @property
    def path(self) -> str:
        """The environment that the tests run in has `agentq`, `celery` and `python`, whether or not it is activated."""
        own = Path(sys.executable).parent
        return os.pathsep.join([*map(str, self.programs), str(own), os.environ["PATH"]])


class Service:
    """One service of the file, as a process."""

    def __init__(self, name: str, definition: Mapping[str, Any], here: Here) -> None:
        """`definition` has its variables put in."""
        self.name = name
        self._here = here
        self.command = tuple(here.text(word) for word in definition.get("command", ()))
        self.health_check: list[str] = [here.text(word) for word in definition.get("healthcheck", {}).get("test", ())]
        self.health_seconds_max = seconds(definition.get("healthcheck", {}).get("timeout", "1s"))
        self.start_seconds_max = seconds(definition.get("healthcheck", {}).get("start_period", "1s"))
        self.grace_seconds = seconds(definition.get("stop_grace_period", "10s"))
        own = {variable: here.text(str(value)) for variable, value in (definition.get("environment") or {}).items()}
        image = {variable: here.text(value) for variable, value in image_environment().items()}
        base = image if definition["image"] == "agentq" else {}
        self.environ = {"PATH": here.path, "HOME": str(here.folder), "LANG": "C.UTF-8", **base, **own}
        self.stop_signal = signal.Signals[definition.get("stop_signal", "SIGTERM")]
        self.process: LoggedProcess | None = None

    def start(self, *arguments: str) -> None:
        """`arguments` are added to the command: for a server's port and folder, which a container has to itself."""
        self.process = LoggedProcess(
            (*self.command, *arguments),
            log_path=self._here.folder / f"{self.name}-{next(_numbers)}.log",
            environ=self.environ,
            folder=self._here.folder,
        )
        self.process.start()

    def is_healthy(self) -> bool:
        """What the health check says, within its time."""
        kind, *rest = self.health_check
        argv = rest if kind == "CMD" else ["/bin/sh", "-c", rest[0]]
        try:
            answer = subprocess.run(
                argv,
                env=self.environ,
                cwd=self._here.folder,
                capture_output=True,
                check=False,
                timeout=self.health_seconds_max,
            )
        except subprocess.TimeoutExpired:
            return False
        return answer.returncode == 0

    def wait_healthy(self) -> None:
        """Until it is, within the time that the file gives it to start."""
        assert self.process is not None
        eventually(
            lambda: self.is_healthy() or not self._is_running(),
            seconds=self.start_seconds_max,
            what=f"{self.name} is healthy; its log: {self.process.log()}",
        )
        assert self._is_running(), f"{self.name} ended: {self.process.log()}"

    def stop(self) -> tuple[int, float]:
        """Ask it to end, as `docker compose stop` does; its exit code and how many seconds it took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.kill(self.stop_signal)
        code = self.process.wait(seconds=self.grace_seconds)
        return code, time.monotonic() - began

    def end(self) -> None:
        """By force, with all that it started."""
        if self.process is not None:
            self.process.stop(seconds=5)

    def _is_running(self) -> bool:
        return self.process is not None and self.process.is_running
