"""DBOS: a workflow of three steps, on two executors that keep their ids when they are started again.

Both a worker (`python -m benchmarks.safety.with_dbos EXECUTOR_ID`) and the system. Recovery as its documentation
describes it without a control plane: an executor that restarts with its id recovers the workflows it had in hand.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

import psycopg

from benchmarks.safety.systems import CONCURRENCY, End, Place, Unavailable
from benchmarks.safety.world import LOOK, LOOK_AGAIN, PAY, URL_VARIABLE, Request, ask
from tests.support.processes import LoggedProcess
from tests.support.workers import PROJECT

DATABASE_VARIABLE = "BENCH_DATABASE_URL"
QUEUE, WORKFLOW = "runs", "pay_between_two_looks"
POLLING_SECONDS = 0.1  # Its default of a second would start four runs a second a worker: the kills would meet nothing.
READY = "ready for work"
ENDS = """
SELECT workflow_uuid, coalesce(completed_at, updated_at) / 1000.0, status <> 'SUCCESS'
FROM dbos.workflow_status WHERE status NOT IN ('ENQUEUED', 'PENDING', 'DELAYED')
"""


@contextmanager
def running(place: Place) -> Iterator["Dbos"]:
    if importlib.util.find_spec("dbos") is None:
        raise Unavailable("dbos isn't installed: pip install -e '.[dev,benchmarks]'")
    database_url = place.database()
    environ = {
        **os.environ,
        URL_VARIABLE: place.world_url,
        DATABASE_VARIABLE: database_url,
        "PYTHONPATH": str(PROJECT),
    }
    workers = [_worker(place, environ, number) for number in (1, 2)]
    for worker in workers:  # One after the other: the first makes the tables.
        place.start(worker)
        worker.wait_ready(seconds=60)
    yield Dbos(place, workers, database_url)


def _worker(place: Place, environ: dict[str, str], number: int) -> LoggedProcess:
    argv = (sys.executable, "-m", "benchmarks.safety.with_dbos", f"executor-{number}")
    path = place.folder / f"worker-{number}.log"
    return LoggedProcess(argv, log_path=path, environ=environ, folder=place.folder, ready_text=READY)


class Dbos:
    def __init__(self, place: Place, workers: Sequence[LoggedProcess], database_url: str) -> None:
        from dbos import DBOSClient

        self.workers = workers
        self._database_url = database_url
        self._client = DBOSClient(system_database_url=database_url)
        place.stack.callback(self._client.destroy)

    def enqueue(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            self._client.enqueue(
                {"queue_name": QUEUE, "workflow_name": WORKFLOW, "workflow_id": run_id},
                run_id,
            )

    def ends(self) -> dict[str, End]:
        with psycopg.connect(self._database_url) as sql:
            rows = sql.execute(ENDS).fetchall()
        return {run_id: End(at=float(at), is_dead_letter=is_dead_letter) for run_id, at, is_dead_letter in rows}

    def audited(self, writes: Iterable[Request]) -> set[int]:
        """The receipt is the recorded output of the step."""
        return {
            step["output"]
            for run_id in {write.run_id for write in writes}
            for step in self._client.list_workflow_steps(run_id)
            if step["function_name"] == PAY
        }


def work(executor_id: str) -> int:
    from dbos import DBOS

    DBOS(
        config={
            "name": "safety",
            "system_database_url": os.environ[DATABASE_VARIABLE],
            "executor_id": executor_id,
            "application_version": "1",
            "log_level": "WARNING",
        }
    )

    @DBOS.step(name=LOOK)
    def look(run_id: str) -> int:
        return ask(run_id, LOOK)

    @DBOS.step(name=PAY)
    def pay(run_id: str) -> int:
        return ask(run_id, PAY)

    @DBOS.step(name=LOOK_AGAIN)
    def look_again(run_id: str) -> int:
        return ask(run_id, LOOK_AGAIN)

    @DBOS.workflow(name=WORKFLOW)
    def pay_between_two_looks(run_id: str) -> str:
        look(run_id)
        pay(run_id)
        look_again(run_id)
        return "done"

    DBOS.launch()
    DBOS.register_queue(QUEUE, worker_concurrency=CONCURRENCY, polling_interval_sec=POLLING_SECONDS)
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(work(sys.argv[1]))
