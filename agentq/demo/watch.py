"""What is to be seen of the demo's runs: their steps, who works on which, and what happened since the last look."""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentq.adapters.process import process_prefix
from agentq.bootstrap import Wiring
from agentq.client import AgentQ
from agentq.demo.parts import WORKER_NAMES, PartFailedError
from agentq.demo.tickets import Ticket
from agentq.domain.model import Event, Run, Step, StepRef, StepState

STATS_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One look. `workers` names who holds or did a step, by run and step number; `held` who
    executes an attempt now. `killed`
    is the worker that was killed; what it held is still held in its name until its leases run out."""

    runs: Mapping[Ticket, Run]
    events: Sequence[tuple[Ticket, Event]]
    workers: Mapping[tuple[str, int], str]
    held: Mapping[StepRef, str]
    killed: str | None

    def steps_held_by(self, worker: str) -> list[Step]:
        """Those that the worker is executing now."""
        return [
            step
            for run in self.runs.values()
            for step in run.steps
            if self.held.get(step.ref) == worker and step.state is StepState.AVAILABLE
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Processes:
    """A worker's main process and the children that execute its steps."""

    pid: int
    children: tuple[int, ...]


class Watcher:
    """Looks at the runs of the tickets, over the same database and Redis as the workers."""

    def __init__(self, wiring: Wiring, run_ids: Mapping[Ticket, str]) -> None:
        self._wiring = wiring
        self._client = AgentQ(wiring=wiring)
        self._run_ids = run_ids
        asked = _asked_workers(wiring)
        self.pids = {worker: processes.pid for worker, processes in sorted(asked.items())}
        self._prefixes = {
            process_prefix(pid): worker for worker, processes in asked.items() for pid in processes.children
        }
        self._killed: str | None = None
        self._seen: dict[str, int] = {}
        self._workers: dict[tuple[str, int], str] = {}

    def look(self) -> Sight:
        """Everything as it is now, with the events since the last look."""
        events = [(ticket, event) for ticket, run_id in self._run_ids.items() for event in self._news_of(run_id)]
        runs = {ticket: self._client.get(run_id) for ticket, run_id in self._run_ids.items()}
        for _, event in events:
            worker = self.worker_of(event.actor)
            if worker is not None and event.number is not None:
                self._workers[event.run_id, event.number] = worker
        held = self._held(step for run in runs.values() for step in run.steps if not run.status.is_terminal)
        self._workers.update({(ref.run_id, ref.number): worker for ref, worker in held.items()})
        return Sight(runs=runs, events=events, workers=dict(self._workers), held=held, killed=self._killed)

    def kill(self, worker: str) -> None:
        """SIGKILL to the worker's main process; its children die with it."""
        os.kill(self.pids[worker], signal.SIGKILL)
        self._killed = worker

    def worker_of(self, owner: str) -> str | None:
        """The worker whose process that owner of a lease, a fence or an event is."""
        return next((worker for prefix, worker in self._prefixes.items() if owner.startswith(prefix)), None)

    def _news_of(self, run_id: str) -> list[Event]:
        news = self._wiring.runs.events(run_id, self._seen.get(run_id, 0))
        if news:
            self._seen[run_id] = news[-1].sequence
        return news

    def _held(self, steps: Iterable[Step]) -> dict[StepRef, str]:
        refs = [step.ref for step in steps if step.state is StepState.AVAILABLE]
        if not refs:
            return {}
        owners = ((ref, view.owner) for ref, view in zip(refs, self._wiring.leases.survey(refs).views, strict=True))
        named = ((ref, self.worker_of(owner)) for ref, owner in owners if owner is not None)
        return {ref: worker for ref, worker in named if worker is not None}


def _asked_workers(wiring: Wiring) -> dict[str, _Processes]:
    """The processes of each worker, as they tell by Celery's own remote control."""
    given_up_at = time.monotonic() + STATS_SECONDS_MAX
    while True:
        answers = wiring.app.control.inspect(timeout=2.0, limit=len(WORKER_NAMES)).stats() or {}
        if len(answers) == len(WORKER_NAMES):
            return {
                hostname.partition("@")[0]: _Processes(pid=stats["pid"], children=tuple(stats["pool"]["processes"]))
                for hostname, stats in answers.items()
            }
        if time.monotonic() > given_up_at:
            raise PartFailedError(f"of the workers only {', '.join(answers) or 'none'} answered")
