"""What a worker's processes weigh while they wait: SDKs and other heavy things are loaded when first needed."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentq.adapters.sql.engine import Database
from agentq.config.settings import Settings
from tests.support.databases import fresh_sqlite
from tests.support.stage import Stage
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

MEGABYTES_MAX = 120
CHILDREN = 2


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with fresh_sqlite(tmp_path) as url:
        database = Database(url)
        yield Stage(database=database)
        database.dispose()


@pytest.fixture
def worker(tmp_path: Path, stage: Stage, valkey: ValkeyServer) -> Iterator[WorkerProcess]:
    """A tools worker with a keeper beside it, as they ship."""
    settings = Settings(
        home=tmp_path, broker_url=valkey.url, agents=("tests.support.smoke_agents",), tools_concurrency=CHILDREN
    )
    worker = WorkerProcess("tools", settings, tmp_path)
    worker.start()
    worker.wait_ready()
    yield worker
    worker.stop()


def test_a_child_and_a_keeper_wait_lightly(worker: WorkerProcess, stage: Stage, valkey: ValkeyServer) -> None:
    """A machine runs many of them, and most of them wait most of the time."""
    run_id = stage.queued()
    stage.runs.undispatch([stage.ref(run_id, 1)])
    with valkey.client() as client:
        eventually(lambda: client.llen("agentq.model"), what="the keeper has done all that it ever does")
    eventually(lambda: len(worker.pool_pids) == CHILDREN, what="the pool")
    weights = {"keeper": megabytes(worker.keeper_pid)}
    weights |= {f"child {number}": megabytes(pid) for number, pid in enumerate(worker.pool_pids, 1)}
    assert max(weights.values()) < MEGABYTES_MAX, weights


def megabytes(pid: int) -> float:
    """Resident, what it shares with its parent included."""
    return float(psutil.Process(pid).memory_info().rss) / 1e6
