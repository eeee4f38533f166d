"""Look at everything at once, servers, workers and what waits, and return all findings. Changes nothing."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agentq.adapters.redis.client import redis_client
from agentq.adapters.redis.examine import queue_lengths
from agentq.adapters.worker_facts import WorkerFacts, ask_workers
from agentq.bootstrap import Wiring
from agentq.checks.deployment import Waiting, judge_agents, judge_dead_letters, judge_keeper, judge_queues
from agentq.checks.finding import Finding, error, note, ok
from agentq.checks.notifications import judge_notifications
from agentq.checks.servers import look_at_database, look_at_mark, look_at_outcomes, look_at_redis
from agentq.checks.settings import judge_agents_module, judge_flower, judge_settings, tool_deadlines
from agentq.checks.worker import judge_worker
from agentq.config.celery import QUEUES
from agentq.config.settings import PREFIX
from agentq.domain.errors import AgentqError, ConfigurationError, SchemaError
from agentq.domain.model import RunStatus
from agentq.ports.runs import RunFilter
from agentq.services.enqueue import SILENT_SECONDS

LOOK_SECONDS_MAX = 8.0  # A server that hangs is one that is away.
DEAD_LETTERS_MAX = 1000
WITHOUT_DATABASE = "nothing runs, and nothing can be enqueued; writes under way are recorded when it is back in time"
DATABASE_FIX = f"start it, or correct {PREFIX}DATABASE_URL"
WITHOUT_BROKER = "queued runs wait in the database"
BROKER_FIX = f"start it, correct {PREFIX}BROKER_URL, or run agentq up"
ACTIVE = (RunStatus.QUEUED, RunStatus.RUNNING)

Findings = Iterator[Finding]


def look_at_everything(wiring: Wiring, environ: Mapping[str, str]) -> list[Finding]:
    """All findings, in the order in which they are best read. Takes as long as the slowest server, and never long."""
    sight = _Sight()
    gives_up_at = time.monotonic() + LOOK_SECONDS_MAX
    agents = _Look("agents", lambda: _look_at_agents(wiring, sight))
    database = _Look("database", lambda: look_at_database(wiring), why=WITHOUT_DATABASE, fix=DATABASE_FIX)
    redis = _Look("broker", lambda: _look_at_redis_and_workers(wiring), why=WITHOUT_BROKER, fix=BROKER_FIX)
    of_agents = agents.findings(gives_up_at)
    findings = [
        _which_are_set(wiring, environ),
        *judge_settings(wiring.settings, sight.tool_deadlines),
        judge_flower(wiring.settings, environ),
        *judge_notifications(wiring.settings),
        *of_agents,
        *database.findings(gives_up_at),
        *redis.findings(gives_up_at),
    ]
    if not database.is_complete:
        return findings
    of_runs = _Look("runs", lambda: _look_at_what_waits(wiring, sight)).findings(gives_up_at)
    if redis.is_complete:
        findings += _Look("keeper", lambda: _look_at_marks_and_keeper(wiring, sight)).findings(gives_up_at)
    outcomes = _Look("outcome files", lambda: look_at_outcomes(wiring))
    return findings + of_runs + outcomes.findings(gives_up_at)


@dataclass(slots=True)
class _Sight:
    """What one look found out that another one needs."""

    tool_deadlines: Mapping[str, float] = field(default_factory=dict)
    has_active_runs: bool = False


class _Look:
    """Looks in a thread of its own, which nobody waits for longer than told: a name server may hang, too."""

    def __init__(self, subject: str, look: Callable[[], Findings], *, why: str = "", fix: str = "") -> None:
        """`why` and `fix`: of what it looks at being away."""
        self._subject = subject
        self._look = look
        self._why = why
        self._fix = fix
        self._found: list[Finding] = []
        self.is_complete = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"doctor: {subject}")
        self._thread.start()

    def findings(self, gives_up_at: float) -> list[Finding]:
        """What was found until then; an error that was met is a finding."""
        self._thread.join(max(0.0, gives_up_at - time.monotonic()))
        found = list(self._found)
        if self._thread.is_alive():
            found.append(error(self._subject, f"no answer within {LOOK_SECONDS_MAX:g} s", why=self._why, fix=self._fix))
        return found

    def _run(self) -> None:
        try:
            for finding in self._look():
                self._found.append(finding)
            self.is_complete = True
        except SchemaError as met:
            self._found.append(error(self._subject, str(met)))  # It says what to run.
        except AgentqError as met:
            self._found.append(error(self._subject, str(met), why=self._why, fix=self._fix))


def _which_are_set(wiring: Wiring, environ: Mapping[str, str]) -> Finding:
    names = sorted(name for name in environ if name.startswith(PREFIX))
    return ok("settings", ", ".join(names) or f"none set: everything lives in {wiring.settings.home.absolute()}")


def _look_at_agents(wiring: Wiring, sight: _Sight) -> Findings:
    if not wiring.settings.agents:
        yield note("agents", f"{PREFIX}AGENTS isn't set here", why="deadlines that tools declare aren't looked at")
        return
    try:
        sight.tool_deadlines = tool_deadlines(wiring.registry)
    except ConfigurationError as problem:
        yield judge_agents_module(str(problem))
        return
    writers = [tool.name for tool in wiring.registry.tools() if tool.effect.is_write]
    yield ok("agents", f"{', '.join(wiring.registry.names())}; tools that write: {', '.join(writers) or 'none'}")


def _look_at_redis_and_workers(wiring: Wiring) -> Findings:
    yield from look_at_redis(wiring)
    settings = wiring.settings
    workers: list[WorkerFacts] = ask_workers(wiring.app)
    for worker in workers:
        yield from judge_worker(worker, settings)
    client = redis_client(settings.effective_broker_url)
    try:
        lengths = queue_lengths(client, [settings.queue(name) for name in QUEUES])
    finally:
        client.close()
    yield from judge_queues(workers, lengths, settings)


def _look_at_what_waits(wiring: Wiring, sight: _Sight) -> Findings:
    agents = wiring.runs.agents()
    silent = [agent.name for agent in agents.values() if agent.seen_seconds > SILENT_SECONDS]
    waiting = Waiting(
        agents=agents,
        agents_with_runs=frozenset(name for name in silent if _has_active_runs(wiring, name)),
        dead_letters=wiring.decisions.dead_letters(RunFilter(limit=DEAD_LETTERS_MAX)),
        dead_letters_max=DEAD_LETTERS_MAX,
    )
    sight.has_active_runs = _has_active_runs(wiring, None)
    yield from judge_agents(waiting)
    yield judge_dead_letters(waiting)


def _has_active_runs(wiring: Wiring, agent: str | None) -> bool:
    return bool(wiring.runs.runs(RunFilter(statuses=ACTIVE, agent=agent, limit=1)))


def _look_at_marks_and_keeper(wiring: Wiring, sight: _Sight) -> Findings:
    yield from look_at_mark(wiring)
    yield judge_keeper(wiring.nudges.leader(), has_active_runs=sight.has_active_runs)
