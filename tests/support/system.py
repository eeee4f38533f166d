"""A whole deployment for a fault test: database, Valkey, receiver, and workers and keepers as processes."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from sqlalchemy import text

from agentq import AgentQ
from agentq.adapters.sql.engine import Database
from agentq.bootstrap import Wiring
from agentq.config.settings import Settings
from agentq.domain.model import Event, Json, Run, RunStatus, Step, StepRef
from tests.support.broker import Broker
from tests.support.fault_agents import RECEIVER_FILE
from tests.support.invariants import World, check_invariants
from tests.support.processes import descendants
from tests.support.receiver import Receiver
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess, WorkerProcess

AGENT = "support"
END_SECONDS = 30.0

Call: TypeAlias = list[Json]  # A tool's name and its arguments.

# Short, so that a recovery takes seconds: it is measured against them, not against a constant.
SHORT = Settings(
    agents=("tests.support.fault_agents",),
    lease_seconds=2.0,
    operation_deadline_seconds=4.0,
    keeper_interval_seconds=0.5,
    settle_patience_seconds=10.0,
    hand_back_seconds=2.0,
    backoff_seconds=0.2,
    model_concurrency=4,
    tools_concurrency=2,
)


class System:
    """Use it as a context manager: at its end all processes are ended. Workers have no keeper beside them."""

    def __init__(self, folder: Path, database_url: str, **changes: Any) -> None:
        """`changes` to the short settings."""
        self.folder = folder
        self.valkey = ValkeyServer()
        self.receiver = Receiver()
        values = {"home": folder, "keeper_beside_worker": False, **changes}
        self.settings = replace(SHORT, database_url=database_url, broker_url=self.valkey.url, **values)
        self.broker = Broker(self.settings, self.valkey)
        self.wiring = Wiring(self.settings)
        self.client = AgentQ(wiring=self.wiring)
        self.processes: list[WorkerProcess | KeeperProcess] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._resources.enter_context(self.valkey)
        self._resources.enter_context(self.receiver)
        (self.folder / RECEIVER_FILE).write_text(self.receiver.url)
        # As the first worker does; a client may come before it.
        self.wiring.keeping.see_agents({AGENT: self.settings.input_bytes_max})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.receiver.release_all()
        self.stop_all_but([])
        self.client.close()
        self._resources.close()

    @property
    def database(self) -> Database:
        return self.wiring.database

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of one statement, which sees and changes what it likes."""
        with self.database.reading() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    # --- processes

    def worker(self, role: str, **changes: Any) -> WorkerProcess:
        """One more worker in that role, ready; `changes` to its settings."""
        [worker] = self.workers(role, **changes)
        return worker

    def workers(self, *roles: str, **changes: Any) -> list[WorkerProcess]:
        """One more worker of each role, all ready."""
        settings = replace(self.settings, **changes)
        started = [WorkerProcess(role, settings, self.folder) for role in roles]
        self.processes += started
        for worker in started:
            worker.start()
        for worker in started:
            worker.wait_ready(seconds=60)
        return started

    def keeper(self) -> KeeperProcess:
        keeper = KeeperProcess(self.settings, self.folder)
        self.processes.append(keeper)
        keeper.start()
        return keeper

    def stop_all_but(self, kept: Sequence[WorkerProcess | KeeperProcess]) -> None:
        for process in [process for process in self.processes if process not in kept]:
            self.end(process)

    def end(self, process: WorkerProcess | KeeperProcess) -> None:
        """By force, at once: what it holds goes to nobody, as after a death."""
        for pid in (*descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self.processes.remove(process)

    @contextmanager
    def keepers_paused(self) -> Iterator[None]:
        """No reaper comes in between."""
        keepers = [process for process in self.processes if isinstance(process, KeeperProcess)]
        for keeper in keepers:
            keeper.kill(signal.SIGSTOP)
        try:
            yield
        finally:
            for keeper in keepers:
                keeper.kill(signal.SIGCONT)

    # --- runs

    def enqueue(self, *turns: Sequence[Call], asks: Sequence[str | None] = (), **options: Any) -> str:
        """Start a run whose turns ask for these calls; `asks`: see `follow_script`."""
        return self.client.enqueue(AGENT, {"turns": [[*turn] for turn in turns], "asks": [*asks]}, **options)

    def step(self, run_id: str, number: int) -> Step:
        return self.client.get(run_id).steps[number - 1]

    def is_held(self, run_id: str, number: int) -> bool:
        """Whether somebody has a lease on that step."""
        [view] = self.wiring.leases.survey([StepRef(run_id=run_id, number=number, attempt=1)]).views
        return view.owner is not None

    def events(self, run_id: str, kind: str) -> list[Event]:
        """The run's events of that kind."""
        return [event for event in self.client.events(run_id) if event.kind == kind]

    def time_of(self, run_id: str, kind: str) -> datetime:
        """When the one event of that kind was."""
        [event] = self.events(run_id, kind)
        return event.at

    def wait(self, run_id: str, *, seconds: float = END_SECONDS) -> Run:
        """The run once it has ended. Fails the test when it doesn't."""
        eventually(lambda: self.client.status(run_id).is_terminal, seconds=seconds, what=f"run {run_id} ends")
        return self.client.get(run_id)

    def completes(self, run_id: str, *, seconds: float = END_SECONDS) -> Run:
        run = self.wait(run_id, seconds=seconds)
        assert run.status is RunStatus.COMPLETED, (run.status, run.error, run.dead_letter)
        return run

    def eventually_completes(self, run_id: str, *, seconds: float = END_SECONDS) -> Run:
        """It may stop in between, and be healed."""
        is_completed = lambda: self.client.status(run_id) is RunStatus.COMPLETED  # noqa: E731 - as short as it gets
        eventually(is_completed, seconds=seconds, what=f"run {run_id} completes")
        return self.client.get(run_id)

    def stops_as_unknown(self, run_id: str, *, seconds: float = END_SECONDS) -> Run:
        """It ends as a dead letter over a write whose outcome isn't known."""
        run = self.wait(run_id, seconds=seconds)
        assert run.dead_letter is not None and run.dead_letter.outcome_unknown, run
        assert run.pending_effect is not None
        return run

    # --- the end of a test

    def check(self, *, attempts_max: int | None = None, ends_in_seconds: float = END_SECONDS) -> None:
        """What every test ends with: no run is lost, and the invariants hold, the receiver's effects included."""
        eventually(self._has_none_active, seconds=ends_in_seconds, what="every run ends")
        check_invariants(self.database, attempts_max=attempts_max, world=World(effects=self.receiver.effects))

    def eventually_drained(self, *, seconds: float = 15.0) -> None:
        """Nothing is queued, delivered or unacknowledged."""
        eventually(self.is_drained, seconds=seconds, what="the queues and what isn't acknowledged are empty")

    def is_drained(self) -> bool:
        return self.wiring.dispatcher.is_drained()

    def _has_none_active(self) -> bool:
        active = (RunStatus.QUEUED, RunStatus.RUNNING)
        return not self.client.runs(status=active, limit=1)


def call(tool: str, name: str, **arguments: Json) -> Call:
    """One call of a script."""
    return [tool, {"name": name, **arguments}]
