"""Processes in tests: whether one lives, what it started, and one that writes its output to a file."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from agentq.adapters.embedded import launch
from tests.support.waiting import eventually


def is_alive(pid: int) -> bool:
    """A process that ended and waits to be collected by its parent is not alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[int]:
    """Everything that this process started, directly or not, and that lives."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)]
    except psutil.NoSuchProcess:
        return []


class LoggedProcess:
    """A program whose output goes to a file. It never outlives the test run."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path,
        environ: Mapping[str, str],
        folder: Path | None = None,
        ready_text: str | None = None,
    ) -> None:
        self._argv = tuple(argv)
        self.log_path = log_path
        self._environ = dict(environ)
        self._folder = folder
        self._ready_text = ready_text
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0

    @property
    def pid(self) -> int:
        """Of the last start, also when it has ended."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; `wait_ready` tells when it can be used."""
        assert not self.is_running, "it runs already"
        self._log_offset = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command(self._argv),
                env=self._environ,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        """What it wrote since it was started last."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")

    def wait_for_log(self, text: str, *, seconds: float = 30.0) -> None:
        eventually(
            lambda: text in self.log() or not self.is_running, seconds=seconds, what=f"{text!r} in {self.log_path}"
        )
        assert text in self.log(), f"it ended without {text!r}:\n{self.log()}"

    @property
    def is_ready(self) -> bool:
        """It runs, and has said since its start that it can be used."""
        return self.is_running and (self._ready_text is None or self._ready_text in self.log())

    def wait_ready(self, *, seconds: float = 30.0) -> None:
        if self._ready_text is not None:
            self.wait_for_log(self._ready_text, seconds=seconds)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal to the process itself, not to what it started."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, *, seconds: float = 30.0) -> int:
        """The exit code, once it has ended."""
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self, *, seconds: float = 20.0) -> int | None:
        """End it, by force after that time, with all that it started; the exit code, None if it never ran."""
        if self._process is None:
            return None
        started = descendants(self.pid)
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
        for pid in started:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        return self._process.returncode

    def restart(self) -> None:
        self.stop()
        self.start()
        self.wait_ready()
