"""A purge that dies, and one beside living workers: whole runs are left, and nothing is lost that was to stay."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from agentq.adapters.sql.engine import Database
from agentq.ports.runs import RunFilter
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.invariants import check_invariants
from tests.support.purged import OLD, age, old, orphans
from tests.support.stage import FIRST_CALL, READ, Stage
from tests.support.system import System, call
from tests.support.workers import WorkerProcess

ALL = RunFilter(limit=100)
RUNS = 8  # Three batches of three, the last one short.


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql() as url:
        yield url


@pytest.mark.parametrize(
    ("words", "nth", "left"),
    [
        ("DELETE FROM dead_letters", 1, 8),
        ("DELETE FROM events", 1, 8),
        ("DELETE FROM runs", 2, 5),
        ("DELETE FROM purging", 2, 5),
        ("INSERT INTO events", 3, 2),
        ("COMMIT", 1, 8),
        ("COMMITTED", 2, 2),
    ],
)
def test_a_purge_that_is_killed_leaves_whole_runs_only(url: str, words: str, nth: int, left: int) -> None:
    """At any statement: a run without its events couldn't be proved, events without a run would stay for ever."""
    database = Database(url)
    stage = Stage(database=database)
    run_ids = [stage.asked(READ) for _ in range(RUNS)]
    for number, run_id in enumerate(run_ids):
        stage.stop(run_id, FIRST_CALL)
        stage.decisions.discard(run_id, actor="ann", reason="")
        age(stage, run_id, timedelta(days=100 - number))

    ended = subprocess.run([sys.executable, "-m", "tests.support.dying_purge", url, words, str(nth)], check=False)

    assert ended.returncode == -signal.SIGKILL
    assert {run.id for run in stage.runs.runs(ALL)} == set(run_ids[RUNS - left :])
    assert orphans(database) == {}
    check_invariants(database)

    subprocess.run([sys.executable, "-m", "tests.support.dying_purge", url, "never", "1"], check=True)
    assert stage.runs.runs(ALL) == [] and orphans(database) == {}
    database.dispose()


@pytest.mark.parametrize("deployment", ["sqlite", "postgresql"], indirect=True, scope="module")
def test_runs_go_on_beside_a_purge(system: System, workers: list[WorkerProcess]) -> None:
    """It takes what is old from among what is being worked on, and slows down nobody for longer than a batch."""
    stage = Stage(database=system.database)
    gone = [old(stage) for _ in range(60)]
    stays = age(stage, stage.failed(READ), OLD)
    going = [system.enqueue([call("look", f"{number}"), call("put", f"{number}")]) for number in range(10)]
    for batch in system.client.purge("30d", batch_runs=5):
        assert set(batch.run_ids) <= set(gone)
        going.append(system.enqueue([call("look", "beside")]))
    for run_id in going:
        system.completes(run_id)
    assert {run.id for run in system.client.runs(limit=1000)} == {*going, stays}
    assert orphans(system.database) == {}
    system.client.discard(stays)
    age(stage, stays)
    assert [batch.run_ids for batch in system.client.purge("30d")] == [(stays,)]
