"""Messages that the broker loses, repeats or delivers late: a step's message is a wake-up call, no more."""

import os
import signal
from collections.abc import Mapping

import pytest

from agentq.domain.model import StepState
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

KINDS = ("turn", "look", "put", "pay")
EFFECTS = {"turn": 0, "look": 0, "put": 1, "pay": 1}
TRIES = 6  # A worker that is stopped just between two waits pops nothing.

on_sqlite = pytest.mark.parametrize("deployment", ["sqlite"], indirect=True, scope="module")
on_any_database = pytest.mark.parametrize("deployment", ["sqlite", "postgresql"], indirect=True, scope="module")


def enqueue(system: System, kind: str, name: str) -> str:
    """A run with a step of that kind, which asks the receiver under that name."""
    return system.enqueue(asks=[name]) if kind == "turn" else system.enqueue([call(kind, name)])


def nothing_went_wrong(system: System, run_id: str, kind: str) -> None:
    run = system.completes(run_id)
    assert {(step.state, step.is_error) for step in run.steps} == {(StepState.COMPLETED, False)}
    assert {(step.attempt, step.crashes, step.tries) for step in run.steps} == {(1, 0, 0)}
    assert len(system.events(run_id, "step.settled")) == len(run.steps)
    assert system.receiver.effects_of(run_id) == EFFECTS[kind]


@on_sqlite
@pytest.mark.usefixtures("workers")
class TestRepeated:
    """The second delivery leaves quietly."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_message_that_is_delivered_again_while_its_step_runs_starts_nothing(
        self, system: System, kind: str
    ) -> None:
        """What every visibility timeout that is shorter than a step does."""
        name = f"again {kind}"
        run_id = enqueue(system, kind, name)
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            message = dict(system.broker.in_hand())
            for _ in range(3):
                system.broker.deliver_in_vain(message)
            assert len(system.receiver.requests(name)) == 1
        nothing_went_wrong(system, run_id, kind)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_connection_that_breaks_in_the_middle_of_a_step_starts_nothing(self, system: System, kind: str) -> None:
        """A worker whose connection broke goes on with what it does, and others take nothing of it."""
        name = f"reset {kind}"
        run_id = enqueue(system, kind, name)
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            system.broker.break_connections()
            # A run from begin to end: by then everybody is connected again, and has given back what they would.
            other = enqueue(system, kind, f"other {kind}")
            nothing_went_wrong(system, other, kind)
            assert len(system.receiver.requests(name)) == 1
        nothing_went_wrong(system, run_id, kind)

    def test_a_message_that_comes_when_its_step_is_over_starts_nothing(self, system: System) -> None:
        """A message can lie somewhere for an hour."""
        name = "over"
        run_id = enqueue(system, "pay", name)
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            message = dict(system.broker.in_hand())
        system.completes(run_id)
        system.eventually_drained()
        system.broker.deliver_in_vain(message)
        nothing_went_wrong(system, run_id, "pay")
        assert len(system.receiver.requests(name)) == 1


@on_any_database
@pytest.mark.usefixtures("workers")
class TestTwoHolders:
    """Redis gave one attempt to both: what stops the second is the fence in SQL."""

    @pytest.mark.parametrize("kind", ["turn", "look"])
    def test_two_holders_of_one_read_make_one_result(self, system: System, kind: str) -> None:
        """A lease store that fails over to a replica that lags forgets who holds what; asking twice is harmless."""
        name = f"two {kind}"
        run_id = enqueue(system, kind, name)
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            message = dict(system.broker.in_hand())
            for _ in range(TRIES):
                if self.is_held_twice(system, name, message):
                    break
            else:
                pytest.fail("the first holder took its lease again each time, before the second came")
        system.eventually_drained()
        nothing_went_wrong(system, run_id, kind)
        assert len(system.receiver.requests(name)) == 2

    def is_held_twice(self, system: System, name: str, message: Mapping[str, str]) -> bool:
        """Deliver it again to somebody who finds no lease; False: the holder's heartbeat was quicker."""
        before = system.broker.turned_away()
        assert system.broker.forget_leases() > 0
        system.broker.deliver_again(message)
        eventually(
            lambda: system.broker.turned_away() > before or len(system.receiver.requests(name)) == 2,
            what="the second holder calls, or is turned away",
        )
        return len(system.receiver.requests(name)) == 2

    @pytest.mark.parametrize("kind", ["put", "pay"])
    def test_two_holders_of_one_write_make_one_effect(self, system: System, kind: str) -> None:
        """The first stands still, so that its heartbeat can't take the lease again before the second comes."""
        name = f"two {kind}"
        run_id = enqueue(system, kind, name)
        with system.receiver.holding(name):
            first = system.receiver.wait_for(name)
            message = dict(system.broker.in_hand())
            os.kill(first.pid, signal.SIGSTOP)
            assert system.broker.forget_leases() == 1
            system.broker.deliver_in_vain(message)
            assert system.broker.leases() == 0, "the second was turned away at the lease"
            os.kill(first.pid, signal.SIGCONT)
            assert len(system.receiver.requests(name)) == 1
        nothing_went_wrong(system, run_id, kind)
        assert len(system.receiver.requests(name)) == 1


@on_sqlite
class TestOfTheDead:
    @pytest.mark.usefixtures("workers")
    @pytest.mark.parametrize("kind", ["look", "put", "pay"])
    def test_a_dead_workers_message_that_comes_again_and_again_starts_nothing(
        self, system: System, workers: list[WorkerProcess], kind: str
    ) -> None:
        """Otherwise a step that kills its worker would kill one after the other, and no crash would be counted."""
        name = f"dead {kind}"
        worker = workers[1]
        run_id = enqueue(system, kind, name)
        with system.receiver.holding(name), system.keepers_paused():
            system.receiver.wait_for(name)
            message = dict(system.broker.in_hand())
            worker.kill()
            worker.wait()
            worker.start()
            worker.wait_ready()
            eventually(lambda: not system.is_held(run_id, 2), what="its lease is over")
            for _ in range(3):
                system.broker.deliver_in_vain(message)
            assert len(system.receiver.requests(name)) == 1
            assert (system.step(run_id, 2).attempt, system.step(run_id, 2).crashes) == (1, 0)
        if kind == "pay":
            system.stops_as_unknown(run_id)
        else:
            system.completes(run_id)
            assert (system.step(run_id, 2).attempt, system.step(run_id, 2).crashes) == (2, 1)
            assert len(system.receiver.requests(name)) == 2


@on_sqlite
class TestLost:
    @pytest.mark.parametrize("role", ["model", "tools"])
    def test_a_message_that_dies_with_a_stopped_worker_is_replaced(
        self, system: System, workers: list[WorkerProcess], role: str
    ) -> None:
        """Between the server's pop and the worker's note of it a message is nowhere: it is lost for ever."""
        worker = workers[("model", "tools").index(role)]
        system.broker.forget_in_hand()  # Of workers that died in other tests: it would be waited for.
        for number in range(TRIES):
            run_id, is_lost = self.publish_to_a_stopped_worker(system, worker, role, f"{role} {number}")
            worker.kill()
            worker.wait()
            worker.start()
            run = system.completes(run_id)
            assert all((step.attempt, step.crashes) == (1, 0) for step in run.steps)
            if is_lost:
                return
            worker.wait_ready()
        pytest.fail("no message was popped by a stopped worker")

    def publish_to_a_stopped_worker(
        self, system: System, worker: WorkerProcess, role: str, name: str
    ) -> tuple[str, bool]:
        """The run, and whether its message is nowhere: the worker waited for it when it was stopped."""
        if role == "model":
            self.stop_waiting(system, worker)
            run_id = enqueue(system, "turn", name)
        else:
            with system.receiver.holding(name):
                run_id = system.enqueue([call("look", "looked")], asks=[name])
                system.receiver.wait_for(name)
                self.stop_waiting(system, worker)
            eventually(lambda: len(system.client.get(run_id).steps) == 2, what="the turn asks for its call")
        return run_id, system.wiring.dispatcher.is_drained()

    def stop_waiting(self, system: System, worker: WorkerProcess) -> None:
        eventually(lambda: system.broker.waiting_workers() >= 2, what="both workers wait for a message")
        worker.kill(signal.SIGSTOP)


@on_sqlite
@pytest.mark.usefixtures("workers")
class TestTwins:
    @pytest.mark.parametrize("tool", ["look", "put", "pay"])
    def test_the_same_call_made_twice_is_two_steps_with_two_results(self, system: System, tool: str) -> None:
        """A model that wants to pay two friends the same has two payments, not one that was repeated."""
        name = f"twin {tool}"
        twin = call(tool, name)
        run_id = system.enqueue([twin, twin], [twin])
        run = system.completes(run_id)
        requests = system.receiver.requests(name)
        assert sorted(request.step for request in requests if request.step) == [2, 3, 5]
        results = [step.result for step in run.steps if step.tool]
        assert run.output == " | ".join(map(str, results))
        if EFFECTS[tool]:
            assert len(set(results)) == 3
            assert system.receiver.effects_of(run_id) == 3
        if tool == "put":
            assert len({request.key for request in requests}) == 3
