"""This process's name, and the limit that the kernel puts on a call: tried on processes that are really ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from agentq.adapters.process import KernelCallLimit, SystemClock, new_owner, process_prefix
from tests.support.waiting import eventually

LIMIT_SECONDS = 0.5
PROGRAM = """
import ctypes, sys, time
from agentq.adapters.process import KernelCallLimit

limit = KernelCallLimit(can_end_calls=True)
with limit.within({limit_seconds}):
    print("calling", flush=True)
    {call}
print("returned", flush=True)
time.sleep({after_seconds})
print("lived on", flush=True)
"""
SLEEP = "time.sleep(60)"
SLEEP_WITH_THE_GIL = "ctypes.PyDLL(None).sleep(60)"
SPIN = "while True: pass"
IGNORE_EVERYTHING = """
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for program in started:
        program.kill()
        program.communicate()


def start(
    programs: list[subprocess.Popen[str]], call: str, *, limit_seconds: float = LIMIT_SECONDS, after_seconds: float = 0
) -> subprocess.Popen[str]:
    """A process that makes this call under that limit, once it has begun."""
    text = PROGRAM.format(call=call, limit_seconds=limit_seconds, after_seconds=after_seconds)
    program = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    programs.append(program)
    assert program.stdout is not None and program.stdout.readline() == "calling\n"
    return program


def end_of(program: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it wrote after it had begun its call."""
    assert program.stdout is not None
    return program.wait(20), program.stdout.read()


@pytest.fixture
def own_alarm() -> Iterator[None]:
    """SIGALRM as it is in a worker: the test runner's own timer waits so long."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    left_seconds, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left_seconds)


@pytest.mark.parametrize("call", [SLEEP, SLEEP_WITH_THE_GIL, SPIN, IGNORE_EVERYTHING])
def test_a_call_that_outlives_its_deadline_is_ended_with_its_process(
    programs: list[subprocess.Popen[str]], call: str
) -> None:
    """Whatever it does: a Python signal handler would never run while the call holds the GIL."""
    program = start(programs, call)
    assert end_of(program) == (-signal.SIGALRM, "")


def test_a_process_that_was_stopped_past_its_deadline_does_nothing_more(programs: list[subprocess.Popen[str]]) -> None:
    """It would make its call, or go on with it, when the fence has been judged already."""
    program = start(programs, "time.sleep(0.2)")
    program.send_signal(signal.SIGSTOP)
    eventually(lambda: is_stopped(program.pid), what="the process stops")
    time.sleep(2 * LIMIT_SECONDS)
    program.send_signal(signal.SIGCONT)
    assert end_of(program) == (-signal.SIGALRM, "")


def test_a_process_whose_call_returned_in_time_lives_on(programs: list[subprocess.Popen[str]]) -> None:
    """Leaving lifts the limit: what follows is a settle, which must not be cut."""
    program = start(programs, "pass", after_seconds=1.5 * LIMIT_SECONDS)
    assert end_of(program) == (0, "returned\nlived on\n")


@pytest.mark.usefixtures("own_alarm")
def test_a_failed_call_lifts_the_limit_too() -> None:
    """Its failure must be settled."""
    limit = KernelCallLimit(can_end_calls=True)
    with pytest.raises(ValueError, match="no"), limit.within(30):
        raise ValueError("no")
    assert remaining() == 0


@pytest.mark.usefixtures("own_alarm")
def test_of_several_calls_the_earliest_deadline_counts() -> None:
    """A process has one timer. (Interactive runs in threads of one process share it.)"""
    limit = KernelCallLimit(can_end_calls=True)
    with limit.within(100):
        with limit.within(20):
            assert 19 < remaining() <= 20
        assert 90 < remaining() <= 100
        with limit.within(500):
            assert 90 < remaining() <= 100
    assert remaining() == 0


@pytest.mark.usefixtures("own_alarm")
def test_a_process_can_only_end_calls_while_the_signal_kills() -> None:
    """A handler of somebody else's would run instead, when it can, and the call would go on."""
    limit = KernelCallLimit(can_end_calls=True)
    assert limit.can_end_calls
    signal.signal(signal.SIGALRM, lambda *_: None)
    assert not limit.can_end_calls
    assert not KernelCallLimit(can_end_calls=False).can_end_calls


def test_an_owner_names_host_boot_process_and_delivery() -> None:
    """A dead process is known by its prefix; a later one with the same pid is not it."""
    first, second = new_owner(), new_owner()
    assert first != second
    assert first.startswith(process_prefix(os.getpid())) and second.startswith(process_prefix(os.getpid()))
    assert first.rpartition("/")[0] == second.rpartition("/")[0]
    host, boot, process, delivery = first.split("/")
    assert host and boot and process.startswith(f"{os.getpid()}-") and delivery
    assert not first.startswith(process_prefix(os.getpid() // 10))


def test_a_process_that_is_gone_has_a_prefix_all_the_same() -> None:
    """The parent that saw it die has nothing but its pid."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_prefix(child.pid).endswith(f"/{child.pid}-")


def test_the_clock_goes_forward() -> None:
    """Whatever happens to the time of day."""
    clock = SystemClock()
    began = clock.elapsed_seconds()
    clock.sleep(0.001)
    assert clock.elapsed_seconds() > began
    assert 0 <= clock.random() < 1


def remaining() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def is_stopped(pid: int) -> bool:

    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
