"""Becomes another program that dies with the process that started it, even when that is killed.

Run as a file and with the standard library alone, so that it costs milliseconds:
`launch.py PARENT_PID PROGRAM ARGUMENT...`. Between the fork and the program no other place is safe for this:
code that runs right after a fork may meet locks that nobody holds any more.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time

PARENT_LOST = 125  # The exit code when the parent was gone before the program began.
_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.2
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def command(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs `argv` so that it dies with the calling process.

    On Linux it dies with the *thread* that starts it: start it from one that lasts.
    """
    return (sys.executable, "-IS", __file__, str(os.getpid()), *argv)


def die_with_parent(parent_pid: int) -> None:
    """From here on this process is killed when its parent ends; ends at once when that has happened already.

    For processes that were forked rather than launched, such as the children of a prefork pool: called in the child,
    with the parent's pid as the parent knew it.
    """
    if _has_death_signal():
        _set_death_signal()
    else:
        threading.Thread(target=_die_when_parent_changes, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _has_death_signal() -> bool:
    return sys.platform == "linux"


def _set_death_signal() -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process can't be tied to its parent")


def _die_when_parent_changes(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def guard(parent_pid: int, argv: list[str]) -> int:
    """Run the program as a child and kill it when the parent is gone: where the kernel has no death signal (macOS).

    Signals are passed on; returns the program's exit code, or ends by the signal that ended the program.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (*_FORWARDED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _become(argv)
    for number in _FORWARDED:
        signal.signal(number, lambda received, frame: os.kill(child, received))
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return _as_own_end(os.waitstatus_to_exitcode(status))
        if os.getppid() != parent_pid:
            os.kill(child, signal.SIGKILL)
        if select.select([reader], [], [], _WATCH_SECONDS)[0]:
            os.read(reader, 1024)


def _as_own_end(exit_code: int) -> int:
    if exit_code < 0:
        if -exit_code != signal.SIGKILL:  # Whose action nobody can set.
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    return exit_code


def _become(argv: list[str]) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]!r} can't be started: {error.strerror}\n")
        os._exit(127)


def main() -> int:
    """Only returns where the program runs as a guarded child."""
    parent_pid, argv = int(sys.argv[1]), sys.argv[2:]
    if not _has_death_signal():
        return guard(parent_pid, argv)
    _set_death_signal()
    if os.getppid() != parent_pid:
        return PARENT_LOST
    _become(argv)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
