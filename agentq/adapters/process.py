"""This process: its name, its clock, and the limit that the kernel puts on a call."""

import os
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

# CLOCK_BOOTTIME goes on while the machine sleeps; on macOS CLOCK_MONOTONIC does.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """Durations that go on while the machine sleeps, and chance."""

    def elapsed_seconds(self) -> float:
        return time.clock_gettime(_CLOCK)

    def random(self) -> float:
        return random.random()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def new_owner() -> str:
    """Names one delivery in this process: `host/boot/pid-start/delivery`."""
    return f"{process_prefix(os.getpid())}{_start_time(os.getpid())}/{uuid.uuid4().hex[:12]}"


def process_prefix(pid: int) -> str:
    """What every owner of that process of this machine begins with, whether or not the process still lives."""
    return f"{_machine()}/{pid}-"


@lru_cache(maxsize=1)
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip()[:8] if boot.exists() else 'boot'}"


@lru_cache(maxsize=4)
def _start_time(pid: int) -> str:
    """Tells a process from a later one of the same id: clock ticks since boot."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return str(int(time.time()))
    return stat.read_text().rpartition(")")[2].split()[19]


class KernelCallLimit:
    """Ends this process with SIGALRM when a call outlives its deadline.

    The kernel does it, so it works while the call holds the GIL, and a process that was stopped meanwhile dies before
    it runs another instruction. A tool must leave SIGALRM and ITIMER_REAL alone.
    """

    def __init__(self, *, can_end_calls: bool) -> None:
        self._can_end_calls = can_end_calls
        self._lock = threading.Lock()
        self._ends: list[float] = []

    @property
    def can_end_calls(self) -> bool:
        return self._can_end_calls and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        end = time.clock_gettime(_CLOCK) + seconds
        self._change(self._ends.append, end)
        try:
            yield
        finally:
            self._change(self._ends.remove, end)

    def _change(self, change: Callable[[float], None], end: float) -> None:
        """The process has one timer: it goes off at the earliest end of the calls under way."""
        with self._lock:
            change(end)
            left = min(self._ends) - time.clock_gettime(_CLOCK) if self._ends else 0
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001) if self._ends else 0)
