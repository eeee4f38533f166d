"""A hundred thousand queued runs in front of one slow worker: they wait as rows, and what runs is looked after."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from sqlalchemy import text, update

from agentq.adapters.sql.engine import now_plus
from agentq.adapters.sql.schema import runs, steps
from agentq.domain.model import RunStatus, StepState
from tests.support.databases import fresh_postgresql
from tests.support.fault_agents import question
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess

QUEUED = 100_000
PREFIX = "queued-"  # Of their ids.
COMPLETED = 100  # Of them, in the test.
BACKLOG_MAX = 20
SLACK_SECONDS = 4.0  # For a busy machine that has just written so many rows.
GROWTH_BYTES_MAX = 30_000_000  # A tenth of what the rows would take.


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A probe may take longer than the test."""
    changes = {
        "agents": ("tests.support.probed_agents",),
        "backlog_max": BACKLOG_MAX,
        "probe_deadline_seconds": 60.0,
        "model_concurrency": 1,
    }
    with fresh_postgresql() as url, System(tmp_path_factory.mktemp("deployment"), url, **changes) as system:
        yield system


@contextmanager
def queued(system: System, like: str) -> Iterator[None]:
    """Inside there are so many more runs like that one, as a producer leaves them that finds the broker's queue full.
    Those that didn't end are gone afterwards."""
    statements = []
    for table, key in ((runs, "id"), (steps, "run_id")):
        names = [column.name for column in table.columns if column.name not in (key, "dispatched_at")]
        values = ", ".join("0" if name == "events_count" else name for name in names)
        statements.append(
            f"INSERT INTO {table.name} ({key}, {', '.join(names)}) SELECT '{PREFIX}' || n, {values} "
            f"FROM {table.name}, generate_series(1, {QUEUED}) AS n WHERE {key} = '{like}'"
        )
    change(system, *statements)
    try:
        yield
    finally:
        are_left = f"id LIKE '{PREFIX}%' AND finished_at IS NULL"
        of_steps = f"DELETE FROM steps WHERE run_id IN (SELECT id FROM runs WHERE {are_left})"
        locked = f"SELECT id FROM runs WHERE {are_left} ORDER BY id FOR UPDATE"  # First, as everybody does.
        change(system, locked, of_steps, f"DELETE FROM runs WHERE {are_left}")


def test_nobody_is_harmed_by_waiting_and_the_stale_are_reaped_in_time(system: System) -> None:
    """A long queue is no failure, whatever hangs beside it: the broker holds a bounded part of it, nobody's memory
    grows, no run spends anything by waiting, and the keeper is as quick as ever."""
    keeper, (first_worker, *_) = system.keeper(), system.workers("model", "tools", "isolated")
    names = ("a hung tool", question("a hung probe"), "stale", "slow")
    with system.receiver.holding(*names):
        system.enqueue([call("pay", "a hung probe")])
        with system.receiver.holding("a hung probe"):
            os.kill(system.receiver.wait_for("a hung probe").pid, signal.SIGKILL)
            system.receiver.wait_for(question("a hung probe"))
        system.enqueue([call("look", "a hung tool")])
        system.receiver.wait_for("a hung tool")
        stale = system.enqueue(asks=["stale"])
        system.receiver.wait_for("stale")
        slow, like = system.enqueue(asks=["slow"]), system.enqueue()
        memory_bytes = memory_of(keeper)
        with queued(system, like):
            system.end(first_worker)
            ends_at = time.monotonic() + system.settings.lease_seconds + system.settings.keeper_interval_seconds
            system.receiver.wait_for("stale", 2, seconds=ends_at - time.monotonic() + SLACK_SECONDS)
            system.receiver.release("stale")
            worker = system.worker("model")
            system.receiver.wait_for("slow")
            eventually(lambda: system.broker.queued("model") == BACKLOG_MAX, what="the keeper fills the queue")
            waited_for_days(system)
            eventually(lambda: system.broker.queued("model") > BACKLOG_MAX, what="they are taken for lost, once")
            system.receiver.release("slow")
            eventually(lambda: len(ended(system)) >= COMPLETED, what="some of them have their turn")
            assert system.broker.queued("model") <= BACKLOG_MAX * 2
            assert memory_of(keeper) - memory_bytes < GROWTH_BYTES_MAX
            system.end(worker)
            spent = "attempt > 1 OR tries > 0 OR crashes > 0"
            assert system.execute(f"SELECT 1 FROM steps WHERE run_id LIKE '{PREFIX}%' AND ({spent})") == []
            assert {status for (status,) in ended(system)} == {RunStatus.COMPLETED}
    system.worker("model")
    assert system.completes(slow).steps[0].attempt == 1
    assert system.completes(stale).steps[0].attempt == 2


def change(system: System, *statements: str) -> None:
    """In one transaction: a run without its step would be taken for one that lost it. It may take its time."""
    with system.database.writing() as connection:
        for statement in ("SET LOCAL statement_timeout = 0", *statements):
            connection.execute(text(statement))


def memory_of(keeper: KeeperProcess) -> int:
    return int(psutil.Process(keeper.pid).memory_info().rss)


def ended(system: System) -> list[tuple[Any, ...]]:
    return system.execute(f"SELECT status FROM runs WHERE id LIKE '{PREFIX}%' AND finished_at IS NOT NULL")


def waited_for_days(system: System) -> None:
    """As if what is in the queue had been there for many times the grace that a message has."""
    is_queued = (steps.c.dispatched_at.is_not(None), steps.c.state == StepState.AVAILABLE.value)
    with system.database.writing() as connection:
        of_many = steps.c.run_id.like(f"{PREFIX}%")
        connection.execute(update(steps).where(of_many, *is_queued).values(dispatched_at=now_plus(-2 * 86_400)))
