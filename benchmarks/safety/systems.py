"""What the benchmark asks of a system: two workers to kill, runs to take, and in the end its own account of them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from benchmarks.safety.kills import kill_whole
from benchmarks.safety.world import Request
from tests.support.databases import postgresql_server
from tests.support.processes import LoggedProcess

CONCURRENCY = 4  # Runs, or calls, that one worker has in hand at a time.


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A run that goes no further by itself; a dead letter waits for a person. `at`: seconds since the epoch."""

    at: float
    is_dead_letter: bool


class System(Protocol):
    """A system at work on the runs. `workers`: the two that are killed and started again; each says when it is ready.

    The run's id is the name of the run in the world too.
    """

    @property
    def workers(self) -> Sequence[LoggedProcess]: ...

    def enqueue(self, run_ids: Sequence[str]) -> None: ...

    def ends(self) -> dict[str, End]:
        """The runs that have ended, by id."""
        ...

    def audited(self, writes: Iterable[Request]) -> set[int]:
        """The receipts of those writes that the system's own records hold: with their outcome, or as unknown."""
        ...


class Unavailable(Exception):
    """This system can't be measured here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a system runs: an empty folder, the world's URL, and what must be undone at the end."""

    folder: Path
    world_url: str
    stack: ExitStack

    def start(self, process: LoggedProcess) -> None:
        """It is ended, with all that it started, when the measurement is over."""
        self.stack.callback(kill_whole, process)
        process.start()

    def database(self) -> str:
        """The URL of an empty database on the benchmark's own PostgreSQL server."""
        return self.stack.enter_context(_empty_database())


@contextmanager
def _empty_database() -> Iterator[str]:
    server = postgresql_server()
    name = f"safety_{uuid4().hex[:12]}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    try:
        yield server.url(name)
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")
