"""Judge what runs and what waits: queues without consumers, agents that nobody serves, a keeper, dead letters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentq.adapters.redis.nudges import Leader
from agentq.adapters.worker_facts import WorkerFacts
from agentq.checks.finding import Finding, error, note, ok, warning
from agentq.config.celery import QUEUES
from agentq.config.settings import Settings
from agentq.domain.model import DeadLetter
from agentq.ports.runs import ServedAgent
from agentq.services.enqueue import SILENT_SECONDS

COMMANDS = {"model": "agentq worker model", "isolated": "agentq worker isolated"}
WHY = {
    "model": "no run goes on without model turns",
    "tools": "no tool call is made",
    "isolated": "a step whose process died beside others waits there for ever",
    "control": "what other services ask for waits there: agentq.enqueue, agentq.cancel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What waits in the database. `agents_with_runs`: the silent agents that have a run which hasn't ended."""

    agents: Mapping[str, ServedAgent]
    agents_with_runs: frozenset[str]
    dead_letters: Sequence[DeadLetter]
    dead_letters_max: int


def judge_queues(workers: Sequence[WorkerFacts], lengths: Mapping[str, int], settings: Settings) -> Iterator[Finding]:
    """`lengths`: of all our queues. Workers that don't say what they serve may serve anything."""
    if not workers:
        waiting = sum(lengths.values())
        yield warning(
            "workers",
            f"none answers, {waiting} messages wait",
            why="nothing runs, and every run waits",
            fix="agentq worker, with AGENTQ_AGENTS set; on one machine, agentq up",
        )
        return
    if not all(worker.is_told for worker in workers):
        return
    consumed = {queue for worker in workers for queue in worker.queues}
    for name in QUEUES:
        queue = settings.queue(name)
        if queue not in consumed:
            yield warning(
                f"queue {queue}",
                f"no worker that answers consumes it, {lengths.get(queue, 0)} messages wait",
                why=WHY[name],
                fix=COMMANDS.get(name, "agentq worker tools"),
            )


def judge_keeper(leader: Leader | None, *, has_active_runs: bool) -> Finding:
    if leader is not None:
        host, _, process = leader.owner.partition("/")
        pid = process.partition("/")[2].partition("-")[0]
        since = "" if leader.seconds is None else f", for {leader.seconds:.0f} s"
        return ok("keeper", f"process {pid} on {host} leads{since}")
    why = "nothing is recovered, retried or taken up again"
    fix = "agentq keeper, or a worker with one beside it"
    if has_active_runs:
        return error("keeper", "none leads, and runs are under way", why=why, fix=fix)
    return warning("keeper", "none leads", why=why, fix=fix)


def judge_agents(waiting: Waiting) -> Iterator[Finding]:
    if not waiting.agents:
        yield warning(
            "served agents",
            "no worker has ever registered one",
            why="an enqueue for an agent that nobody knows is refused",
            fix="agentq worker, with AGENTQ_AGENTS set",
        )
    for agent in waiting.agents.values():
        subject, seen = f"agent {agent.name}", f"a worker was seen {_ago(agent.seen_seconds)} ago"
        if agent.seen_seconds <= SILENT_SECONDS:
            yield ok(subject, seen)
        elif agent.name in waiting.agents_with_runs:
            yield warning(
                subject, seen, why="its runs wait until a worker serves it again", fix="start one, with its module"
            )
        else:
            yield note(subject, seen, why="nobody waits for it")


def judge_dead_letters(waiting: Waiting) -> Finding:
    letters = waiting.dead_letters
    if not letters:
        return ok("dead letters", "none")
    unknown = sum(letter.outcome_unknown for letter in letters)
    contradicted = sum(letter.has_contradiction for letter in letters)
    count = f"{len(letters)}{' or more' if len(letters) >= waiting.dead_letters_max else ''}"
    found = f"{count} wait for a person, {unknown} with an unknown write"
    why = "their runs don't go on before somebody decided"
    if contradicted:
        found += f", {contradicted} with a contradiction"
        why = "two answers about one write don't agree: it may have run twice"
    return warning("dead letters", found, why=why, fix="agentq dead-letters list")


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
