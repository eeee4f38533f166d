"""Keeps a set of programs running on this machine: starts them in order, restarts what dies, ends them in order."""

import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from agentq.adapters.embedded import launch
from agentq.adapters.embedded.launch import die_with_parent

__all__ = ["Companion", "Program", "Supervisor", "die_with_parent", "start_keeper_beside_worker"]

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2  # A program that ends with it was set up wrongly: starting it again can't help.
BACKOFF_SECONDS_MAX = 30.0
LONG_LIFE_SECONDS = 60.0  # Who lived that long starts at the shortest wait again.
HASTENED_GRACE_SECONDS = 2.0
LINE_BYTES_MAX = 65_536  # A longer line is shown in pieces, so that no program can fill the memory.
POLL_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to be kept running. It inherits nothing but its environment, its output and `descriptors`.

    Programs of a lower `stage` start first and end last. `ready_text` is what its output says once others may rely on
    it; None: at once.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    stage: int = 0
    ready_text: str | None = None
    ready_seconds: float = 30.0
    grace_seconds: float = 10.0
    hasten_signal: signal.Signals = signal.SIGKILL
    descriptors: tuple[int, ...] = ()


class Supervisor:
    """Runs programs until it is told to stop. Use it from the main thread: signals and death signals are its means.

    `write` takes whole lines. One Supervisor runs once.
    """

    def __init__(self, programs: Sequence[Program], *, write: Callable[[str], None]) -> None:
        width = max((len(program.name) for program in programs), default=0)
        self._children = [_Child(program, prefix=f"{program.name:<{width}} | ") for program in programs]
        self._write = write
        self._stops_asked = 0
        self._exit_code = 0
        self._poll = select.poll()
        self._streams: dict[int, _Stream] = {}

    def run(self, *, when_ready: Callable[[], None] = lambda: None) -> int:
        """Start all, call `when_ready` once, keep all running; after SIGINT, SIGTERM or SIGHUP end all and return 0.

        When a program ends with exit code 2 all are ended, and 2 is returned; when one can't get ready, 1. A second
        signal hastens the end. Nothing that was started is left when this returns.
        """
        with self._signals():
            try:
                if self._start_in_order():
                    when_ready()
                while not self._is_stopping:
                    self._attend()
            finally:
                self._end_in_order()
        return self._exit_code

    @property
    def _is_stopping(self) -> bool:
        return self._stops_asked > 0

    @contextmanager
    def _signals(self) -> Iterator[None]:
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._asked_to_stop,
            signal.SIGTERM: self._asked_to_stop,
            signal.SIGHUP: self._asked_to_stop,
            signal.SIGCHLD: lambda number, frame: None,  # Only to wake the loop.
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._wakeups = reader
        self._poll.register(reader, select.POLLIN)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_before)
            for number, handler_before in before.items():
                signal.signal(number, handler_before)
            for descriptor in (reader, writer, *self._streams):
                os.close(descriptor)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stops_asked += 1

    def _start_in_order(self) -> bool:
        """False: one didn't get ready, or all were told to stop."""
        for stage in sorted({child.program.stage for child in self._children}):
            children = [child for child in self._children if child.program.stage == stage]
            for child in children:
                self._start(child)
            given_up_at = time.monotonic() + max(child.program.ready_seconds for child in children)
            while not all(child.is_ready for child in children):
                if time.monotonic() > given_up_at:
                    late = ", ".join(child.program.name for child in children if not child.is_ready)
                    self._give_up(1, f"{late} did not get ready in time")
                if self._is_stopping:
                    return False
                self._attend()
        return not self._is_stopping

    def _start(self, child: "_Child") -> None:
        output = child.start()
        os.set_blocking(output, False)
        self._streams[output] = _Stream(child)
        self._poll.register(output, select.POLLIN)

    def _attend(self) -> None:
        """Wait for the next thing to happen and deal with it: output, an end, a restart that is due, a signal."""
        for descriptor, _ in self._poll.poll(self._wait_seconds() * 1000):
            if descriptor == self._wakeups:
                os.read(descriptor, 4096)
            else:
                self._read(descriptor)
        for child in self._children:
            if child.has_ended():
                self._see_off(child)
            elif child.is_due() and not self._is_stopping:
                self._start(child)

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        due = [child.due_at - now for child in self._children if child.process is None and child.due_at is not None]
        return max(0.0, min([POLL_SECONDS_MAX, *due]))

    def _read(self, descriptor: int) -> None:
        stream = self._streams[descriptor]
        try:
            data = os.read(descriptor, LINE_BYTES_MAX)
        except BlockingIOError:
            return
        for line in stream.take(data):
            self._show(stream.child, line)
        if not data:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._streams[descriptor]

    def _show(self, child: "_Child", line: str) -> None:
        if child.program.ready_text is not None and child.program.ready_text in line:
            child.is_ready = True
        self._say(child.prefix + line)

    def _see_off(self, child: "_Child") -> None:
        """The program ended: show its last words, and decide whether it is started again."""
        for descriptor, stream in list(self._streams.items()):
            if stream.child is child:
                self._read(descriptor)
        exit_code = child.forget()
        if self._is_stopping:
            return
        if exit_code == EXIT_REFUSED:
            self._give_up(EXIT_REFUSED, f"{child.program.name} refused to start, see above")
            return
        wait_seconds = child.plan_restart()
        self._say(f"{child.prefix}ended with {_how(exit_code)}; starting it again in {wait_seconds:.0f} s")

    def _say(self, line: str) -> None:
        """Where nobody reads any more (a closed terminal or pipe) all is ended in order, in silence."""
        try:
            self._write(line)
        except OSError:
            self._write = lambda line: None
            self._stops_asked = max(1, self._stops_asked)

    def _give_up(self, exit_code: int, why: str) -> None:
        self._say(f"{why}: ending everything")
        self._exit_code = exit_code
        self._stops_asked = max(1, self._stops_asked)

    def _end_in_order(self) -> None:
        self._stops_asked = max(1, self._stops_asked)
        self._say("ending all; what is under way is finished first, Ctrl-C again hastens it")
        for stage in sorted({child.program.stage for child in self._children}, reverse=True):
            children = [child for child in self._children if child.program.stage == stage and child.process is not None]
            for child in children:
                child.send(signal.SIGTERM)
            self._wait_for_end(children)
        while events := self._poll.poll(0):
            for descriptor, _ in events:
                if descriptor == self._wakeups:
                    os.read(descriptor, 4096)
                else:
                    self._read(descriptor)

    def _wait_for_end(self, children: list["_Child"]) -> None:
        began = time.monotonic()
        hastened_at: float | None = None
        while any(child.process is not None for child in children):
            now = time.monotonic()
            if self._stops_asked > 1 and hastened_at is None:
                hastened_at = now
                for child in children:
                    child.send(child.program.hasten_signal)
            for child in children:
                is_over = now > began + child.program.grace_seconds
                is_over_in_haste = hastened_at is not None and now > hastened_at + HASTENED_GRACE_SECONDS
                if is_over or is_over_in_haste:
                    child.kill_all()
            self._attend()


def start_keeper_beside_worker(argv: Sequence[str], *, environ: Mapping[str, str] | None = None) -> "Companion":
    """Start the keeper as a process of its own that ends with this one, whatever ends it; started again if it dies.

    For the main process of a worker. The keeper shares no state with it: no fork of open connections.
    """
    companion = Companion("keeper", tuple(argv), environ=dict(os.environ if environ is None else environ))
    companion.start()
    return companion


class Companion:
    """One program that runs as long as this process does, in a thread of its own that lasts as long as the program:
    on Linux the death signal comes when the starting thread ends."""

    def __init__(self, name: str, argv: tuple[str, ...], *, environ: Mapping[str, str]) -> None:
        self.name = name
        self._argv = argv
        self._environ = environ
        self._stopping = threading.Event()
        self._changes = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name=f"{name} companion", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None while it waits to be started again."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_seconds: float = 10.0) -> None:
        """End the program, by force after the grace time. May be called again."""
        self._stopping.set()
        with self._changes:
            if self._process is not None:
                self._process.terminate()
        self._thread.join(grace_seconds)
        with self._changes:
            if self._process is not None:
                _signal_group(self._process.pid, signal.SIGKILL)
        self._thread.join()

    def _keep_running(self) -> None:
        backoff = _Backoff()
        while not self._stopping.is_set():
            began = time.monotonic()
            how = self._run_once()
            wait_seconds = backoff.after_life_of(time.monotonic() - began)
            if not self._stopping.is_set():
                logger.warning("%s ended with %s; starting it again in %.0f s", self.name, how, wait_seconds)
                self._stopping.wait(wait_seconds)

    def _run_once(self) -> str:
        """How it ended."""
        with self._changes:
            if self._stopping.is_set():
                return "nothing"
            try:
                process = subprocess.Popen(
                    launch.command(self._argv),
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # A Ctrl-C of the terminal ends the worker first, and its keeper after it.
                )
            except OSError as error:
                return str(error)
            self._process = process
        exit_code = process.wait()
        with self._changes:
            self._process = None
        return _how(exit_code)


@dataclass(slots=True)
class _Backoff:
    next_seconds: float = 1.0

    def after_life_of(self, seconds: float) -> float:
        """How long to wait before the next start of a program that lived that long."""
        wait_seconds = 1.0 if seconds >= LONG_LIFE_SECONDS else self.next_seconds
        self.next_seconds = min(BACKOFF_SECONDS_MAX, wait_seconds * 2)
        return wait_seconds


class _Child:
    """A program and the process that runs it at the moment, if one does."""

    def __init__(self, program: Program, *, prefix: str) -> None:
        self.program = program
        self.prefix = prefix
        self.process: subprocess.Popen[bytes] | None = None
        self.due_at: float | None = None
        self.is_ready = program.ready_text is None
        self._began = 0.0
        self._backoff = _Backoff()

    def start(self) -> int:
        """The descriptor of its output; the caller closes it."""
        reader, writer = os.pipe()
        try:
            self.process = subprocess.Popen(
                launch.command(self.program.argv),
                env=dict(self.program.environ),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=self.program.descriptors,
                start_new_session=True,  # A Ctrl-C of the terminal reaches the supervisor alone: it ends all in order.
            )
        finally:
            os.close(writer)
        self._began = time.monotonic()
        self.due_at = None
        return reader

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def forget(self) -> int:
        """The exit code of the process that ended; what it started and left behind is killed."""
        assert self.process is not None and self.process.returncode is not None
        exit_code = self.process.returncode
        _signal_group(self.process.pid, signal.SIGKILL)
        self.process = None
        return exit_code

    def plan_restart(self) -> float:
        wait_seconds = self._backoff.after_life_of(time.monotonic() - self._began)
        self.due_at = time.monotonic() + wait_seconds
        return wait_seconds

    def is_due(self) -> bool:
        return self.process is None and self.due_at is not None and time.monotonic() >= self.due_at

    def send(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill_all(self) -> None:
        """The process with all that it started and that is still in its group."""
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGKILL)


@dataclass(slots=True)
class _Stream:
    """The output of one process, cut into lines."""

    child: _Child
    rest: bytes = field(default=b"")

    def take(self, data: bytes) -> list[str]:
        """The lines that are complete now; with empty data (the end) what is left of the last one."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) >= LINE_BYTES_MAX):
            whole.append(self.rest)
            self.rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]


def _how(exit_code: int) -> str:
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Every process here leads a group of its own. One that is gone already is no error."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
