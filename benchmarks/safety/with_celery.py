"""Plain Celery with late ack: a chain of three tasks, each of which notes in SQL what it did before it is acked.

Both a worker and the system. Celery's documented settings for tasks that should survive their worker, with one
exception in its favour: the broker delivers an interrupted task again after two minutes instead of an hour.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import psycopg
from celery import Celery, chain

from benchmarks.safety.systems import CONCURRENCY, End, Place
from benchmarks.safety.world import LOOK, LOOK_AGAIN, PAY, URL_VARIABLE, Request, ask
from tests.support.processes import LoggedProcess
from tests.support.valkey import ValkeyServer
from tests.support.workers import PROJECT

BROKER_VARIABLE, DATABASE_VARIABLE = "BENCH_BROKER_URL", "BENCH_DATABASE_URL"
VISIBILITY_TIMEOUT_SECONDS = 120
TABLE = "CREATE TABLE done (run_id text, kind text, receipt integer, at float8)"
ENDS = "SELECT run_id, min(at) FROM done WHERE kind = %s GROUP BY run_id"

app = Celery("plain", broker=os.environ.get(BROKER_VARIABLE), set_as_current=False)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT_SECONDS},
)


@app.task(name="safety.do")
def do(run_id: str, kind: str) -> None:
    """Ask the world, then note that it was done."""
    receipt = ask(run_id, kind)
    with psycopg.connect(os.environ[DATABASE_VARIABLE], autocommit=True) as sql:
        sql.execute("INSERT INTO done VALUES (%s, %s, %s, %s)", (run_id, kind, receipt, time.time()))


@contextmanager
def running(place: Place) -> Iterator["PlainCelery"]:
    valkey = place.stack.enter_context(ValkeyServer(is_durable=True))
    database_url = place.database()
    with psycopg.connect(database_url, autocommit=True) as sql:
        sql.execute(TABLE)
    environ = {
        **os.environ,
        URL_VARIABLE: place.world_url,
        BROKER_VARIABLE: valkey.url,
        DATABASE_VARIABLE: database_url,
        "PYTHONPATH": str(PROJECT),
    }
    workers = [_worker(place, environ, number) for number in (1, 2)]
    for worker in workers:
        place.start(worker)
    app.conf.broker_url = valkey.url
    yield PlainCelery(workers, database_url)


def _worker(place: Place, environ: dict[str, str], number: int) -> LoggedProcess:
    argv = (
        *(sys.executable, "-m", "celery", "-A", "benchmarks.safety.with_celery", "worker", "--loglevel=INFO"),
        *(f"--concurrency={CONCURRENCY}", f"--hostname=worker-{number}@benchmark"),
    )
    path = place.folder / f"worker-{number}.log"
    return LoggedProcess(argv, log_path=path, environ=environ, folder=place.folder, ready_text=" ready.")


class PlainCelery:
    def __init__(self, workers: Sequence[LoggedProcess], database_url: str) -> None:
        self.workers = workers
        self._database_url = database_url

    def enqueue(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            chain(*(do.si(run_id, kind) for kind in (LOOK, PAY, LOOK_AGAIN))).apply_async()

    def ends(self) -> dict[str, End]:
        """It knows no dead letters: what it can't do is logged and gone."""
        with psycopg.connect(self._database_url) as sql:
            return {run_id: End(at=at, is_dead_letter=False) for run_id, at in sql.execute(ENDS, (LOOK_AGAIN,))}

    def audited(self, writes: Iterable[Request]) -> set[int]:
        """Noted with its receipt."""
        with psycopg.connect(self._database_url) as sql:
            return {receipt for (receipt,) in sql.execute("SELECT receipt FROM done WHERE kind = %s", (PAY,))}
