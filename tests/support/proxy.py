"""A proxy in front of PostgreSQL that loses a connection at the very statement that a test names, or goes away."""

import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.waiting import eventually

SOCKET_NAME = ".s.PGSQL.5432"  # How PostgreSQL's clients name it.
CHUNK_BYTES = 1 << 20
HELD_SECONDS_MAX = 60.0


class Loss(StrEnum):
    """What a trap does to the connection whose statement falls into it."""

    OF_STATEMENT = "cut before the statement is sent"
    OF_REPLY = "cut once the server has answered the statement; the client never sees the answer"
    OF_THE_REST = "cut once the client has the statement's answer"
    OF_NOTHING = "the statement waits until it is released, or is dropped with its connection"


@dataclass(slots=True, kw_only=True, eq=False)
class Trap:
    """Catches one statement: the first whose bytes hold all of `texts`, or a later one of the same connection that
    holds `then`."""

    texts: tuple[bytes, ...]
    then: bytes | None
    loss: Loss
    goes_away: bool
    sprung: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait(self, *, seconds: float = 20.0) -> None:
        assert self.sprung.wait(seconds), f"no statement with {self.texts} came within {seconds:g} s"

    def release(self) -> None:
        """Let the held statement go on."""
        self.released.set()


class PostgresProxy:
    """Listens on a socket in a folder of its own, and passes everything on until a trap springs or it goes away."""

    def __init__(self, url: str) -> None:
        """`url` is that of a database of a server that listens on a socket: host=FOLDER in it."""
        host = re.search(r"host=([^&]+)", url)
        assert host is not None
        self.server_url = url
        self.folder = Path(tempfile.mkdtemp(prefix="agentq-proxy-"))
        self.url = url.replace(host[0], f"host={self.folder}")
        self._server = str(Path(host[1]) / SOCKET_NAME)
        self._lock = threading.Lock()
        self._traps: list[Trap] = []
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._is_away = False
        self._refused = 0
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        self._listener.bind(str(self.folder / SOCKET_NAME))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.go_away()
        shutil.rmtree(self.folder)

    # --- what tests do

    def trap(self, *texts: str, loss: Loss, then: str | None = None, goes_away: bool = False) -> Trap:
        """Set a trap for one statement; with `goes_away` no connection works after it until `come_back`."""
        trap = Trap(
            texts=tuple(text.encode() for text in texts),
            then=then.encode() if then else None,
            loss=loss,
            goes_away=goes_away,
        )
        with self._lock:
            self._traps.append(trap)
        return trap

    def go_away(self) -> None:
        """Cut every connection and refuse new ones."""
        with self._lock:
            self._is_away = True
            self._refused = 0
            pairs = list(self._pairs)
        for pair in pairs:
            _close(*pair)

    def come_back(self) -> None:
        with self._lock:
            self._is_away = False
            self._traps.clear()

    @contextmanager
    def away(self) -> Iterator[None]:
        self.go_away()
        try:
            yield
        finally:
            self.come_back()

    def wait_for_refusals(self, count: int = 1, *, seconds: float = 20.0) -> None:
        """So many tried to connect since it went away."""
        eventually(lambda: self._refused >= count, seconds=seconds, what=f"{count} connections are refused")

    # --- connections, each with two threads

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses():
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            with self._lock:
                self._pairs.add((client, server))
            threading.Thread(target=_Connection(self, client, server).serve, daemon=True).start()

    def _refuses(self) -> bool:
        with self._lock:
            self._refused += self._is_away
            return self._is_away

    def armed_for(self, message: bytes) -> Trap | None:
        """The trap that this message is the first to meet; it is off the list then."""
        with self._lock:
            found = next((trap for trap in self._traps if all(text in message for text in trap.texts)), None)
            if found is not None:
                self._traps.remove(found)
            return found

    def forget(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._pairs.discard((client, server))
        _close(client, server)


class _Connection:
    """One client's connection. A statement is one message here: clients send it, and its commit, in one piece."""

    def __init__(self, proxy: PostgresProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._losing: Trap | None = None  # Springs at the server's next answer.
        self._is_answered = threading.Event()

    def serve(self) -> None:
        threading.Thread(target=self._pass_answers, daemon=True).start()
        waiting: Trap | None = None
        with suppress(OSError):
            while message := self._client.recv(CHUNK_BYTES):
                waiting = waiting or self._proxy.armed_for(message)
                if waiting is None or (waiting.then is not None and waiting.then not in message):
                    self._server.sendall(message)
                    continue
                trap, waiting = waiting, None
                if not self._spring(trap, message):
                    break
        self._proxy.forget(self._client, self._server)

    def _spring(self, trap: Trap, message: bytes) -> bool:
        """False: the connection ends."""
        match trap.loss:
            case Loss.OF_STATEMENT:
                self._end(trap)
                return False
            case Loss.OF_NOTHING:
                trap.sprung.set()
                if not trap.released.wait(HELD_SECONDS_MAX):
                    return False
                self._server.sendall(message)
                return True
            case Loss.OF_REPLY | Loss.OF_THE_REST:
                self._losing = trap
                self._server.sendall(message)
                self._is_answered.wait(HELD_SECONDS_MAX)
                return False

    def _pass_answers(self) -> None:
        with suppress(OSError):
            while answer := self._server.recv(CHUNK_BYTES):
                trap = self._losing
                if trap is None or trap.loss is Loss.OF_THE_REST:
                    self._client.sendall(answer)
                if trap is not None:
                    break
        if self._losing is not None:
            self._end(self._losing)
        self._is_answered.set()
        self._proxy.forget(self._client, self._server)

    def _end(self, trap: Trap) -> None:
        """Nobody sees the trap sprung before the connection is cut."""
        if trap.goes_away:
            self._proxy.go_away()
        self._proxy.forget(self._client, self._server)
        trap.sprung.set()


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
