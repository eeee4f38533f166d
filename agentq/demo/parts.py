"""The processes of the demo: started in order, and all ended whatever happens."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentq.adapters.embedded import launch
from agentq.adapters.embedded.valkey import READY_TEXT, EmbeddedValkey, embedded_valkey
from agentq.adapters.sql.migration import upgrade
from agentq.config.settings import PREFIX, Settings, environment_of
from agentq.demo import agents
from agentq.demo.shop_client import ShopClient
from agentq.domain.errors import AgentqError

WORKER_NAMES = ("A", "B")
CHILDREN_EACH = 2
START_SECONDS_MAX = 30.0
END_SECONDS_MAX = 3.0
POLL_SECONDS = 0.02
LOG_CHARACTERS_SHOWN = 2000


class PartFailedError(AgentqError):
    """A process of the demo did not start, or ended before its time; the text holds its last words."""


class Part:
    """One process of the demo, with its output in a file. Start it from the main thread: on Linux it dies with that."""

    def __init__(self, name: str, argv: tuple[str, ...], environ: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                launch.command(argv),
                env=dict(environ),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # A Ctrl-C of the terminal reaches the demo alone: it ends all in order.
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str) -> str:
        """Its output once the text is in it. Raises PartFailedError when that doesn't come, with what came instead."""
        given_up_at = time.monotonic() + START_SECONDS_MAX
        while text not in (output := self._log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > given_up_at:
                raise PartFailedError(f"{self.name} did not start: {self.last_words()}")
            time.sleep(POLL_SECONDS)
        return output

    def last_words(self) -> str:
        """The end of its output."""
        return self._log.read_text(errors="replace")[-LOG_CHARACTERS_SHOWN:].strip()

    def ask_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def see_off(self) -> None:
        """Returns when it is gone; after a while it is ended by force, with its children."""
        try:
            self._process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that runs."""

    valkey: Part
    shop: ShopClient
    workers: Mapping[str, Part]

    def last_words(self) -> str:
        """Of the workers, for when something went wrong."""
        return "\n".join(f"--- {worker.name}\n{worker.last_words()}" for worker in self.workers.values())


@contextmanager
def started_parts(settings: Settings, *, model: str | None) -> Iterator[Parts]:
    """All parts, ready; ended when the block is left, whichever way. `settings.home` must be a folder that exists.

    Raises PartFailedError.
    """
    environ = _environment(settings, model)
    server = embedded_valkey(settings.home)
    with ExitStack() as ending:
        ending.callback(_remove_socket_folder, server, settings.home)
        servers: list[Part] = []
        workers: dict[str, Part] = {}
        ending.callback(_end_all, servers)
        ending.callback(lambda: _end_all(list(workers.values())))  # They need the servers to end well.

        def start(name: str, *argv: str) -> Part:
            return Part(name, argv, environ, settings.home)

        servers.append(valkey := start("valkey", *server.argv))
        servers.append(shop := start("shop", sys.executable, "-m", "agentq.demo.shop", str(settings.home)))
        upgrade(settings.effective_database_url)
        valkey.wait_for(READY_TEXT)
        url = shop.wait_for("\n").strip()
        environ[agents.SHOP_URL] = url
        for name in WORKER_NAMES:
            workers[name] = start(f"worker {name}", *_worker_command(settings, name))
        for worker in workers.values():
            worker.wait_for(" ready.")
        yield Parts(
            valkey=valkey,
            shop=ShopClient(url),
            workers=workers,
        )


@contextmanager
def temporary_home() -> Iterator[Path]:
    """A folder for everything that the demo keeps; removed at the end."""
    home = Path(tempfile.mkdtemp(prefix="agentq-demo-")).resolve()
    try:
        yield home
    finally:
        given_up_at = time.monotonic() + END_SECONDS_MAX
        while home.exists() and time.monotonic() < given_up_at:
            shutil.rmtree(home, ignore_errors=True)  # A process that is just dying may still write there.


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the demo as Ctrl-C does: by an exception, so that everything is ended with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _worker_command(settings: Settings, name: str) -> tuple[str, ...]:
    """Both serve everything, so that the one that stays goes on with what the other leaves behind. Each child is a
    process, because the call of a writing tool must be possible to end."""
    queues = ",".join(settings.queue(queue) for queue in ("model", "tools", "isolated", "control"))
    worker = ("celery", "-A", "agentq.tasks.app:app", "worker", f"--hostname={name}@demo")
    alone = ("--without-mingle", "--without-gossip")  # They have nothing to tell each other, and it costs a second.
    return (
        *(sys.executable, "-m", *worker),
        *("--pool=prefork", f"--concurrency={CHILDREN_EACH}", f"--queues={queues}", "--loglevel=INFO"),
        *alone,
    )


def _environment(settings: Settings, model: str | None) -> dict[str, str]:
    """The demo's settings, whatever this process's own environment says of agentq.

    Temporary files go into the demo's folder too: a worker that is killed can't remove its own.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    chosen = {agents.MODEL: model} if model else {}
    return {**own, **environment_of(settings), **chosen, "TMPDIR": str(settings.home), "PYTHONUNBUFFERED": "1"}


def _end_all(parts: list[Part]) -> None:
    """A second Ctrl-C can't interrupt this."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for part in parts:
            part.ask_to_end()
        for part in parts:
            part.see_off()
    finally:
        signal.signal(signal.SIGINT, before)


def _remove_socket_folder(server: EmbeddedValkey, home: Path) -> None:
    if server.socket.parent != home:
        shutil.rmtree(server.socket.parent, ignore_errors=True)
