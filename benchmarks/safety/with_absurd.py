"""Absurd: a task of three steps, on two workers with the default claim timeout of its Python SDK.

Both a worker (`python -m benchmarks.safety.with_absurd NAME`) and the system. A run whose worker died is claimed by
another when its claim is over.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from benchmarks.safety.systems import CONCURRENCY, End, Place, Unavailable
from benchmarks.safety.world import LOOK, LOOK_AGAIN, PAY, URL_VARIABLE, Request, ask
from tests.support.databases import postgresql_server
from tests.support.processes import LoggedProcess
from tests.support.workers import PROJECT

DATABASE_VARIABLE = "BENCH_DATABASE_URL"
QUEUE, TASK = "runs", "pay_between_two_looks"
READY = "ready for work"
ENDS = """
SELECT params ->> 'run_id', extract(epoch FROM coalesce(completed_at, failed_at))::float8, tasks.state <> 'completed'
FROM absurd.t_runs tasks JOIN absurd.r_runs ON r_runs.run_id = last_attempt_run
WHERE tasks.state IN ('completed', 'failed', 'cancelled')
"""


@contextmanager
def running(place: Place) -> Iterator["AbsurdQueue"]:
    if not all(importlib.util.find_spec(name) for name in ("absurd_sdk", "absurdctl")):
        raise Unavailable("absurd-sdk and absurdctl aren't installed: pip install -e '.[dev,benchmarks]'")
    database_url = place.database()
    _absurdctl("init", "-d", database_url)
    _absurdctl("create-queue", "-d", database_url, QUEUE)
    environ = {
        **os.environ,
        URL_VARIABLE: place.world_url,
        DATABASE_VARIABLE: database_url,
        "PYTHONPATH": str(PROJECT),
    }
    workers = [_worker(place, environ, number) for number in (1, 2)]
    for worker in workers:
        place.start(worker)
    yield AbsurdQueue(place, workers, database_url)


def _absurdctl(*arguments: str) -> None:
    """Its command finds `psql` beside the benchmark's own server."""
    path = os.pathsep.join([str(postgresql_server().binaries), os.environ["PATH"]])
    command = [sys.executable, "-c", "import absurdctl; absurdctl.main()", *arguments]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, capture_output=True)


def _worker(place: Place, environ: dict[str, str], number: int) -> LoggedProcess:
    argv = (sys.executable, "-m", "benchmarks.safety.with_absurd", f"worker-{number}")
    path = place.folder / f"worker-{number}.log"
    return LoggedProcess(argv, log_path=path, environ=environ, folder=place.folder, ready_text=READY)


class AbsurdQueue:
    def __init__(self, place: Place, workers: Sequence[LoggedProcess], database_url: str) -> None:
        from absurd_sdk import Absurd

        self.workers = workers
        self._database_url = database_url
        self._client = Absurd(database_url, queue_name=QUEUE)
        place.stack.callback(self._client.close)

    def enqueue(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            self._client.spawn(TASK, {"run_id": run_id}, queue=QUEUE)

    def ends(self) -> dict[str, End]:
        with psycopg.connect(self._database_url) as sql:
            rows = sql.execute(ENDS).fetchall()
        return {run_id: End(at=at, is_dead_letter=is_dead_letter) for run_id, at, is_dead_letter in rows}

    def audited(self, writes: Iterable[Request]) -> set[int]:
        """The receipt is the state of the step's checkpoint."""
        with psycopg.connect(self._database_url) as sql:
            rows = sql.execute("SELECT state FROM absurd.c_runs WHERE checkpoint_name = %s", (PAY,)).fetchall()
        return {int(state) for (state,) in rows}


def work(name: str) -> int:
    from absurd_sdk import Absurd

    app = Absurd(os.environ[DATABASE_VARIABLE], queue_name=QUEUE)

    @app.register_task(name=TASK)
    def pay_between_two_looks(params: Any, context: Any) -> str:
        run_id = params["run_id"]
        context.step(LOOK, lambda: ask(run_id, LOOK))
        context.step(PAY, lambda: ask(run_id, PAY))
        context.step(LOOK_AGAIN, lambda: ask(run_id, LOOK_AGAIN))
        return "done"

    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    app.start_worker(worker_id=name, concurrency=CONCURRENCY)
    return 0


if __name__ == "__main__":
    raise SystemExit(work(sys.argv[1]))
