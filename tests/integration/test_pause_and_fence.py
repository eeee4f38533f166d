"""A pause and a fence on PostgreSQL at the same moment: one held before its COMMIT while the other begins."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.pausing import SqlPauseStore
from agentq.adapters.sql.steps import SqlStepStore
from agentq.ports.steps import FenceRequest, FenceVerdict
from tests.support.databases import fresh_postgresql
from tests.support.held_database import WAIT_SECONDS, HeldDatabase
from tests.support.locks import wait_for_waiters
from tests.support.stage import FIRST_CALL, PLAIN, Stage
from tests.support.waiting import eventually

PATHS = pytest.mark.parametrize("always_general", [True, False], ids=["general path", "functions"])


@pytest.fixture
def url() -> Iterator[str]:
    with fresh_postgresql() as url:
        yield url


def fence_request(stage: Stage, run_id: str) -> FenceRequest:
    return FenceRequest(
        ref=stage.ref(run_id, FIRST_CALL),
        id=run_id,
        owner="host/boot/1-1/x",
        tool="pay",
        effect=PLAIN,
        deadline_seconds=30,
        settles_within_seconds=0,
    )


@PATHS
def test_a_fence_waits_for_a_pause_that_is_about_to_be_committed(url: str, always_general: bool) -> None:
    """A fence that read the past would let a write begin after the person was told that none will."""
    stage, held = Stage(database=Database(url)), HeldDatabase(url, holds_functions=False)
    run_id = stage.asked(PLAIN)
    request = fence_request(stage, run_id)
    steps = SqlStepStore(stage.database, always_general=always_general)
    with ThreadPoolExecutor(2) as pool:
        try:
            pausing = pool.submit(SqlPauseStore(held).pause, "pay", None, reads=False, actor="ann", reason="outage")
            eventually(held.has_arrived.is_set, what="the pause is before its COMMIT")
            fencing = pool.submit(steps.fence, request)
            wait_for_waiters(stage.database)
            assert not fencing.done()
        finally:
            held.may_commit.set()
        pausing.result(WAIT_SECONDS)
        assert fencing.result(WAIT_SECONDS) is FenceVerdict.PAUSED
    assert stage.runs.run(run_id).pending_effect is None
    held.dispose()
    stage.database.dispose()


@PATHS
def test_a_pause_waits_for_a_fence_that_is_about_to_be_committed(url: str, always_general: bool) -> None:
    """Once the pause is told to a person, every write that goes on is one that they can see."""
    stage = Stage(database=Database(url))
    run_id = stage.asked(PLAIN)
    request = fence_request(stage, run_id)
    held = HeldDatabase(url, holds_functions=not always_general)
    with ThreadPoolExecutor(2) as pool:
        try:
            fencing = pool.submit(SqlStepStore(held, always_general=always_general).fence, request)
            eventually(held.has_arrived.is_set, what="the fence is before its COMMIT")
            pausing = pool.submit(stage.pausing.pause, "pay", None, reads=False, actor="ann", reason="outage")
            wait_for_waiters(stage.database)
            assert not pausing.done()
        finally:
            held.may_commit.set()
        assert fencing.result(WAIT_SECONDS) is FenceVerdict.STAMPED
        pausing.result(WAIT_SECONDS)
    assert stage.pausing.writes_in_flight("pay", None) == 1
    held.dispose()
    stage.database.dispose()
