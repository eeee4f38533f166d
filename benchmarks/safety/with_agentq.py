"""agentq with its default settings, each worker as `agentq worker ROLE` starts it: a model worker and a tools worker.

A third, for steps whose process died beside others, stands by with its keeper, as in any deployment: it isn't killed.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import psycopg

from agentq import AgentQ
from agentq.adapters.sql.migration import upgrade
from agentq.bootstrap import Wiring
from agentq.config.settings import Settings
from agentq.services.enqueue import EnqueueRequest
from benchmarks.safety.agentq_agents import AGENT, PROBE_VARIABLE
from benchmarks.safety.systems import End, Place
from benchmarks.safety.world import PAY, URL_VARIABLE, Request
from tests.support.processes import LoggedProcess
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

ENDS = """
SELECT runs.id, extract(epoch FROM finished_at)::float8, dead_letters.id IS NOT NULL
FROM runs LEFT JOIN dead_letters ON dead_letters.run_id = runs.id AND dead_letters.closed_at IS NULL
WHERE finished_at IS NOT NULL
"""
RECORDED = """
SELECT result FROM steps WHERE tool = %s AND result IS NOT NULL AND EXISTS (
    SELECT FROM events WHERE events.run_id = steps.run_id AND events.number = steps.number
    AND events.kind IN ('step.settled', 'outcome.late', 'write.resolved')
)
"""
SHOWN_AS_UNKNOWN = """
SELECT id, pending_effect_number, pending_effect_attempt FROM runs WHERE EXISTS (
    SELECT FROM events WHERE events.run_id = runs.id AND events.number = runs.pending_effect_number
    AND events.kind = 'run.dead_lettered'
)
"""


@contextmanager
def running(place: Place, *, with_probe: bool = False) -> Iterator["Agentq"]:
    valkey = place.stack.enter_context(ValkeyServer(is_durable=True))
    settings = Settings(
        home=place.folder,
        database_url=place.database(),
        broker_url=valkey.url,
        agents=("benchmarks.safety.agentq_agents",),
    )
    upgrade(settings.database_url)
    os.environ[URL_VARIABLE] = place.world_url
    os.environ[PROBE_VARIABLE] = "yes" if with_probe else ""
    workers = [WorkerProcess(role, settings, place.folder) for role in ("model", "tools")]
    isolated = WorkerProcess("isolated", settings, place.folder)
    for worker in (*workers, isolated):
        place.start(worker)
    isolated.wait_ready(seconds=60)
    with Wiring(settings) as wiring:
        eventually(lambda: AGENT in wiring.runs.agents(), seconds=60, what="a worker registers the agent")
        yield Agentq(settings, workers, AgentQ(wiring=wiring))


class Agentq:
    def __init__(self, settings: Settings, workers: Sequence[LoggedProcess], client: AgentQ) -> None:
        self.workers = workers
        self._settings = settings
        self._client = client

    def enqueue(self, run_ids: Sequence[str]) -> None:
        self._client.enqueue_many(EnqueueRequest(agent=AGENT, input="pay", run_id=run_id) for run_id in run_ids)

    def ends(self) -> dict[str, End]:
        with psycopg.connect(self._settings.database_url) as sql:
            return {
                run_id: End(at=at, is_dead_letter=is_dead_letter) for run_id, at, is_dead_letter in sql.execute(ENDS)
            }

    def audited(self, writes: Iterable[Request]) -> set[int]:
        """Recorded with its receipt, or dead-lettered behind the fence of that very attempt; each with its event."""
        with psycopg.connect(self._settings.database_url) as sql:
            recorded = {int(result) for (result,) in sql.execute(RECORDED, (PAY,))}
            unknown = set(sql.execute(SHOWN_AS_UNKNOWN).fetchall())
        return recorded | {write.receipt for write in writes if (write.run_id, write.step, write.attempt) in unknown}
