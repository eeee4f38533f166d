"""Plain writes whose processes were stopped before they could settle: what their late outcomes come to."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from agentq.domain.model import Fence, RunStatus, StepState
from agentq.services.enqueue import new_run_id
from tests.support.invariants import World, check_invariants
from tests.support.proxy import Loss, PostgresProxy, Trap
from tests.support.system import System, call
from tests.support.waiting import eventually

NAMES = ("undecided", "agreed", "given another result", "denied")
WRONG_WORDS = 2  # Of the people in these tests.


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWrite:
    """A write that took effect, and is listed as unknown; its settle is held, and its process stands still."""

    run_id: str
    pid: int
    fence: Fence
    settle: Trap

    def wake(self) -> None:
        """The settle arrives, and its process goes on."""
        self.settle.release()
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def deployment(proxy: PostgresProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("deployment"), proxy.server_url, operation_deadline_seconds=3.0) as it:
        it.keeper()
        it.worker("model")
        # Patient, or a process that stood still would give up instead of settling.
        it.worker("tools", tools_concurrency=len(NAMES) + 1, settle_patience_seconds=60.0, database_url=proxy.url)
        yield it


@pytest.fixture(scope="module")
def open_writes(deployment: System, proxy: PostgresProxy) -> Iterator[dict[str, OpenWrite]]:
    """One of each name."""
    ids = {name: new_run_id() for name in NAMES}
    traps = {name: proxy.trap(ids[name], f"{name} paid", loss=Loss.OF_NOTHING) for name in NAMES}
    for name, run_id in ids.items():
        deployment.enqueue([call("pay", name), call("look", f"after {name}")], run_id=run_id)
    found = {}
    for name, run_id in ids.items():
        traps[name].wait()
        pid = deployment.receiver.wait_for(name).pid
        os.kill(pid, signal.SIGSTOP)
        fence = deployment.client.get(run_id).pending_effect
        assert fence is not None
        found[name] = OpenWrite(run_id=run_id, pid=pid, fence=fence, settle=traps[name])
    for write in found.values():
        deployment.stops_as_unknown(write.run_id)
    yield found
    for write in found.values():
        write.wake()


@pytest.fixture
def system(deployment: System) -> Iterator[System]:
    """Here people say what isn't so: that is told apart from what the system does wrong."""
    yield deployment
    check_invariants(deployment.database, world=World(effects=deployment.receiver.effects, lies=WRONG_WORDS))


def test_a_late_outcome_ends_the_doubt_and_the_run_goes_on(system: System, open_writes: dict[str, OpenWrite]) -> None:
    """Nobody has to decide what the process itself can tell."""
    write = open_writes["undecided"]
    write.wake()
    eventually(lambda: system.events(write.run_id, "dead_letter.healed"), what="the late outcome is recorded")
    run = system.completes(write.run_id)
    assert (run.dead_letter, run.has_contradiction) == (None, False)
    assert str(run.steps[1].result).startswith("undecided paid")
    assert len(system.receiver.requests("undecided")) == len(system.receiver.requests("after undecided")) == 1


def test_a_late_outcome_that_agrees_is_noted(system: System, open_writes: dict[str, OpenWrite]) -> None:
    """The person who said that it happened needn't have known its result."""
    write = open_writes["agreed"]
    system.client.resolve(write.run_id, happened=None, reason="the receiver has it")
    write.wake()
    eventually(lambda: system.events(write.run_id, "outcome.agreed"), what="the late outcome is noted")
    run = system.client.get(write.run_id)
    assert (run.status, run.has_contradiction) == (RunStatus.FAILED, False)
    system.client.replay(write.run_id)
    assert system.completes(write.run_id).steps[1].result is None  # The first decision stands.
    assert len(system.receiver.requests("agreed")) == 1


def test_a_late_outcome_that_contradicts_a_result_is_raised(system: System, open_writes: dict[str, OpenWrite]) -> None:
    """The first decision stands, and the doubt about it is the first thing that an operator sees."""
    write = open_writes["given another result"]
    system.client.resolve(write.run_id, happened="paid by hand", reason="so I was told")
    write.wake()
    eventually(lambda: system.events(write.run_id, "outcome.contradicted"), what="the late outcome is raised")
    run = system.client.get(write.run_id)
    assert run.has_contradiction and run.steps[1].result == "paid by hand"
    first = system.client.dead_letters()[0]
    assert (first.run_id, first.has_contradiction) == (write.run_id, True)
    system.client.replay(write.run_id)
    assert system.completes(write.run_id).steps[1].result == "paid by hand"
    assert len(system.receiver.requests("given another result")) == 1


def test_a_late_outcome_of_a_denied_write_is_raised_and_used(system: System, open_writes: dict[str, OpenWrite]) -> None:
    """Somebody looked and found nothing. If that word stood, the replay would pay a second time."""
    write = open_writes["denied"]
    looked_at = write.fence.deadline_at + timedelta(milliseconds=1)
    eventually(lambda: datetime.now(UTC) > looked_at)
    system.client.resolve(write.run_id, did_not_happen=True, looked_at=looked_at, reason="not in the list")
    write.wake()
    eventually(lambda: system.events(write.run_id, "outcome.contradicted"), what="the late outcome is raised")
    run = system.client.get(write.run_id)
    assert run.has_contradiction and run.steps[1].state is StepState.COMPLETED
    system.client.replay(write.run_id, reason="it is there after all")
    assert str(system.completes(write.run_id).steps[1].result).startswith("denied paid")
    assert len(system.receiver.requests("denied")) == system.receiver.effects_of(write.run_id) == 1
