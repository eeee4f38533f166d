"""Receivers that act on a request late, even after its deadline: no early word is believed, no key used twice."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from agentq.domain.errors import TooEarlyError
from agentq.domain.model import Fence, RunStatus
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.fault_agents import question
from tests.support.receiver import Hold, KeyInUseError, Request
from tests.support.system import System, call
from tests.support.waiting import eventually


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two seconds for a call, three more for its receiver; a probe may take longer than both."""
    folder = tmp_path_factory.mktemp("deployment")
    database = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
    changes = {"agents": ("tests.support.slow_receiver_agents",), "probe_deadline_seconds": 20.0}
    with database as url, System(folder, url, operation_deadline_seconds=2.0, **changes) as system:
        system.keeper()
        system.workers("model", "tools")
        yield system


def fence_of(system: System, request: Request) -> Fence:
    """The one over the call that made this request."""
    assert request.run_id is not None
    fence = system.client.get(request.run_id).pending_effect
    assert fence is not None
    return fence


def wait_until(moment: datetime | None) -> None:
    assert moment is not None
    eventually(lambda: datetime.now(UTC) > moment, what=f"{moment} is over")


class TestProbe:
    """It finds nothing, and says so."""

    def test_nothing_is_not_believed_between_deadline_and_settling(self, system: System) -> None:
        """The process was ended at its deadline, its request wasn't: the receiver acts on it all the same."""
        run_id = system.enqueue([call("pay", "behind time")])
        with system.receiver.holding("behind time", when=Hold.BEFORE):
            fence = fence_of(system, system.receiver.wait_for("behind time"))
            system.receiver.wait_for(question("behind time"))
            wait_until(fence.deadline_at)
            eventually(lambda: words(system, run_id), what="the look is noted")
            assert fence.settled_at is not None and datetime.now(UTC) < fence.settled_at, "the machine was too slow"
            assert words(system, run_id) == ["did_not_happen"]
            assert system.client.status(run_id) is RunStatus.RUNNING
        run = system.completes(run_id)
        assert words(system, run_id)[-1] == "happened"
        assert str(run.steps[1].result).startswith("behind time paid: ")
        assert (len(system.receiver.requests("behind time")), system.receiver.effects_of(run_id)) == (1, 1)

    def test_an_early_look_that_is_answered_late_is_not_believed(self, system: System) -> None:
        """The request landed between the look and the answer: believed, it would be made a second time."""
        run_id = system.enqueue([call("pay", "in between")])
        with system.receiver.holding(question("in between"), when=Hold.AFTER):
            with system.receiver.holding("in between", when=Hold.BEFORE):
                request = system.receiver.wait_for("in between")
                fence = fence_of(system, request)
                os.kill(request.pid, signal.SIGKILL)
                system.receiver.wait_for(question("in between"))
                assert datetime.now(UTC) < fence.deadline_at, "the machine was too slow"
            wait_until(fence.settled_at)
            assert (words(system, run_id), system.receiver.effects_of(run_id)) == ([], 1)
        run = system.completes(run_id)
        assert words(system, run_id) == ["did_not_happen", "happened"]
        assert str(run.steps[1].result).startswith("in between paid: ")
        assert (len(system.receiver.requests("in between")), system.receiver.effects_of(run_id)) == (1, 1)


def words(system: System, run_id: str) -> list[str]:
    """What the probe said, in order."""
    return [event.data["answer"] for event in system.events(run_id, "probe.answered")]


class TestPerson:
    def test_an_early_look_that_is_answered_late_is_refused(self, system: System) -> None:
        """The letter was under way when they looked; whoever believes them sends a second one."""
        run_id = system.enqueue([call("pay_by_letter", "letter")])
        with system.receiver.holding("letter", when=Hold.BEFORE):
            request = system.receiver.wait_for("letter")
            os.kill(request.pid, signal.SIGKILL)
            system.stops_as_unknown(run_id)
            fence = fence_of(system, request)
            assert system.receiver.effects_of(run_id) == 0
            looked_at = datetime.now(UTC)
            wait_until(fence.deadline_at)
        eventually(lambda: system.receiver.effects_of(run_id) == 1, what="the letter arrives")
        wait_until(fence.settled_at)
        for decide in (system.client.resolve, system.client.replay):
            with pytest.raises(TooEarlyError):
                decide(run_id, did_not_happen=True, looked_at=looked_at, reason="it isn't in the list")
        assert system.client.get(run_id).pending_effect == fence
        assert len(system.events(run_id, "decision.refused")) == 2
        system.client.replay(run_id, happened="it is there", reason="looked again")
        assert system.completes(run_id).output == "it is there"
        assert (len(system.receiver.requests("letter")), system.receiver.effects_of(run_id)) == (1, 1)


class TestKeyInUse:
    """The receiver refuses a key as long as it works on the first request with it, as payment services do."""

    @pytest.mark.parametrize("first", ["killed", "impatient"])
    def test_a_keyed_write_waits_for_its_receiver(self, system: System, first: str) -> None:
        """The refusal isn't one of the write; taken for one it would dead-letter a run that did nothing wrong."""
        tool = "put" if first == "killed" else "put_impatiently"
        run_id = system.enqueue([call(tool, first)])
        with system.receiver.holding(first, when=Hold.AT_WORK):
            request = system.receiver.wait_for(first)
            fence = fence_of(system, request)
            if first == "killed":
                os.kill(request.pid, signal.SIGKILL)
            with pytest.raises(KeyInUseError):
                system.receiver.take(replace(request, name="another with its key"))
            wait_until(fence.deadline_at)
            assert len(system.receiver.requests(first)) == 1, "it was made again under the receiver's hands"
        run = system.completes(run_id)
        stamps = [event.at for event in system.events(run_id, "fence.stamped")]
        assert fence.settled_at is not None and len(stamps) == 2 and stamps[1] > fence.settled_at
        assert system.events(run_id, "run.dead_lettered") == []
        assert (run.steps[1].attempt, run.steps[1].is_error) == (2, False)
        assert [each.key for each in system.receiver.requests(first)] == [request.key] * 2
        assert system.receiver.effects_of(run_id) == 1
