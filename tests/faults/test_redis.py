"""Redis that forgets, restarts or is away: only time is lost."""

import time

import pytest

from agentq.domain.model import RunStatus
from tests.support.receiver import Hold
from tests.support.system import System, call
from tests.support.waiting import eventually

ENQUEUE_SECONDS = 5.0
CONNECTED_SECONDS = 10.0  # Of the server's return: workers take up messages again.
BACK_SECONDS = 15.0  # Then a run takes its time.


@pytest.mark.usefixtures("workers")
class TestFlushed:
    @pytest.mark.parametrize("kind", ["turn", "look", "put", "pay"])
    def test_a_holder_takes_its_lease_again_and_goes_on(self, system: System, kind: str) -> None:
        """A step that lives must not be taken for dead because somebody emptied Redis."""
        name = f"flushed {kind}"
        run_id = system.enqueue(asks=[name]) if kind == "turn" else system.enqueue([call(kind, name)])
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            system.valkey.flush()
            eventually(lambda: system.broker.leases() == 1, what="the holder takes its lease again")
        run = system.completes(run_id)
        assert len(system.receiver.requests(name)) == 1
        assert all((step.attempt, step.crashes) == (1, 0) for step in run.steps)

    def test_what_was_queued_is_published_again(self, system: System) -> None:
        """A wake-up call that is gone costs seconds, never a run."""
        names = [f"busy {number}" for number in range(system.settings.model_concurrency)]
        with system.receiver.holding(*names):
            run_ids = [system.enqueue(asks=[name]) for name in names]
            for name in names:
                system.receiver.wait_for(name)
            run_ids += [system.enqueue([call("look", "queued")]) for _ in range(5)]
            assert system.broker.queued("model") == 5
            system.valkey.flush()
        for run_id in run_ids:
            run = system.completes(run_id)
            assert all((step.attempt, step.crashes) == (1, 0) for step in run.steps)


@pytest.mark.usefixtures("workers")
class TestRestarted:
    def test_all_runs_finish_when_it_forgets_everything(self, system: System) -> None:
        """What was queued, what was running, the leases: SQL knows all of it."""
        system.worker("model")  # Slots for eight turns and two calls.
        tools = ("look", "pay")
        turns = [f"running turn {number}" for number in range(system.settings.model_concurrency * 2)]
        names = [*tools, *turns]
        with system.receiver.holding(*names):
            running = [system.enqueue([call(tool, tool)]) for tool in tools]
            for tool in tools:
                system.receiver.wait_for(tool)
            running += [system.enqueue(asks=[turn]) for turn in turns]
            for turn in turns:
                system.receiver.wait_for(turn)
            queued = [system.enqueue([call("look", "q"), call("pay", f"queued {number}")]) for number in range(100)]
            assert (len(running), system.broker.queued("model")) == (10, len(queued))
            system.valkey.restart()
        system.receiver.wait_for("q", seconds=CONNECTED_SECONDS)
        for run_id in (*running, *queued):
            run = system.completes(run_id, seconds=60)
            assert all((step.attempt, step.crashes) == (1, 0) for step in run.steps)
        assert {system.receiver.effects_of(run_id) for run_id in queued} == {1}
        assert [len(system.receiver.requests(name)) for name in names] == [1] * len(names)


class TestAway:
    @pytest.mark.usefixtures("workers")
    def test_a_run_is_enqueued_while_it_is_away_and_starts_when_it_is_back(self, system: System) -> None:
        """Who enqueues needs the database only, and isn't kept waiting."""
        system.valkey.stop()
        began = time.monotonic()
        run_ids = [system.enqueue([call("look", "away")]) for _ in range(2)]
        assert time.monotonic() - began < ENQUEUE_SECONDS
        assert {system.client.status(run_id) for run_id in run_ids} == {RunStatus.QUEUED}
        system.valkey.start()
        for run_id in run_ids:
            system.completes(run_id, seconds=BACK_SECONDS)

    @pytest.mark.usefixtures("workers")
    def test_a_write_that_ends_while_it_is_away_is_recorded_and_the_run_goes_on_later(self, system: System) -> None:
        """Recording needs the database only; waking the next step can wait."""
        run_id = system.enqueue([call("pay", "during")], [call("pay", "afterwards")])
        with system.receiver.holding("during", when=Hold.AFTER):
            system.receiver.wait_for("during")
            system.valkey.stop()
        eventually(lambda: len(system.client.get(run_id).steps) == 3, what="the write is recorded")
        system.valkey.start()
        system.completes(run_id, seconds=BACK_SECONDS)
        assert system.receiver.effects_of(run_id) == 2
