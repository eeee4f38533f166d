"""Processes that die, or must, in the middle of a step: what runs again, what doesn't, and how soon."""

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from agentq.domain.model import DeadLetterReason, StepState
from tests.support.processes import is_alive
from tests.support.receiver import Hold
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

SEEN_SECONDS = 3.0  # A death that the parent saw.
SLACK_SECONDS = 2.0  # For a busy machine.


@pytest.fixture(scope="module")
def model_worker(deployment: System) -> WorkerProcess:
    return deployment.worker("model")


@pytest.fixture(scope="class")
def tools_worker(deployment: System, model_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    worker = deployment.worker("tools")
    yield worker
    deployment.end(worker)


@pytest.fixture(scope="class")
def patient_tools_worker(deployment: System, model_worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """Its leases are long, so that nothing is found by their end."""
    worker = deployment.worker("tools", lease_seconds=20.0)
    yield worker
    deployment.end(worker)


@pytest.mark.usefixtures("patient_tools_worker")
class TestPoolChild:
    """Its parent sees it die, and says so."""

    def test_a_read_runs_again_at_once(self, system: System) -> None:
        """Nobody waits for a lease to run out when the death was seen."""
        run_id = system.enqueue([call("look", "read")])
        with system.receiver.holding("read"):
            os.kill(system.receiver.wait_for("read").pid, signal.SIGKILL)
            system.receiver.wait_for("read", 2, seconds=SEEN_SECONDS)
        system.completes(run_id)
        assert system.step(run_id, 2).crashes == 1

    def test_a_keyed_write_runs_again_with_the_same_key_after_its_deadline(self, system: System) -> None:
        """The receiver may still work on the first request until then; the key makes the second harmless."""
        run_id = system.enqueue([call("put", "keyed")])
        with system.receiver.holding("keyed"):
            first = system.receiver.wait_for("keyed")
            fence = system.client.get(run_id).pending_effect
            os.kill(first.pid, signal.SIGKILL)
            second = system.receiver.wait_for("keyed", 2)
        system.completes(run_id)
        assert fence is not None and system.time_of(run_id, "step.requeued") > fence.deadline_at
        assert (second.key, second.attempt) == (first.key, 2)
        assert system.receiver.effects_of(run_id) == 1

    def test_a_plain_write_is_shown_as_unknown_at_once_and_not_repeated(self, system: System) -> None:
        """The one thing that must never happen is a second payment; the next best is that a person knows soon."""
        run_id = system.enqueue([call("pay", "plain"), call("look", "after")])
        with system.receiver.holding("plain"):
            os.kill(system.receiver.wait_for("plain").pid, signal.SIGKILL)
            run = system.stops_as_unknown(run_id, seconds=SEEN_SECONDS)
        assert run.dead_letter is not None and run.dead_letter.reason is DeadLetterReason.NOT_RETRYABLE
        assert system.receiver.effects_of(run_id) == 1
        system.client.replay(run_id, happened="paid", reason="the receiver has it")
        system.completes(run_id)
        assert (len(system.receiver.requests("plain")), len(system.receiver.requests("after"))) == (1, 1)

    def test_a_step_that_kills_its_process_every_time_ends_as_a_dead_letter(self, system: System) -> None:
        """Without a budget it would take one process after the other, for ever."""
        run_id = system.enqueue([call("die", "poison")])
        run = system.wait(run_id)
        assert run.dead_letter is not None and run.dead_letter.reason is DeadLetterReason.RETRIES_EXHAUSTED
        assert not run.dead_letter.outcome_unknown
        assert len(system.receiver.requests("poison")) == system.settings.crashes_max
        system.eventually_drained()

    def test_a_call_that_outlives_its_deadline_is_ended_with_its_process(self, system: System) -> None:
        """What the receiver does afterwards can only be found by asking it, so the process must make no more of it."""
        run_id = system.enqueue([call("pay", "endless")])
        with system.receiver.holding("endless", when=Hold.BEFORE):
            request = system.receiver.wait_for("endless")
            run = system.stops_as_unknown(run_id)
            assert not is_alive(request.pid)
            assert run.pending_effect is not None and run.dead_letter is not None
            late = run.dead_letter.created_at - run.pending_effect.deadline_at
            assert abs(late.total_seconds()) < SEEN_SECONDS
        eventually(lambda: system.receiver.effects_of(run_id) == 1, what="the receiver acts all the same")
        system.client.replay(run_id, happened="paid", reason="the receiver did it after all")
        system.completes(run_id)
        assert len(system.receiver.requests("endless")) == 1


class TestWholeWorker:
    """Nobody sees it die: its leases and its operations' deadlines tell."""

    @pytest.mark.parametrize("deployment", ["sqlite", "postgresql"], indirect=True, scope="module")
    @pytest.mark.usefixtures("model_worker")
    def test_recovery_takes_lease_or_deadline_and_an_interval(self, system: System) -> None:
        """The formula that operators plan with: max(lease, operation deadline + settles within) + interval."""
        settings = system.settings
        lease = timedelta(seconds=settings.lease_seconds)
        interval = timedelta(seconds=settings.keeper_interval_seconds + SLACK_SECONDS)
        worker = system.worker("tools", tools_concurrency=3)
        read, keyed, plain = (system.enqueue([call(tool, f"{tool} 2")]) for tool in ("look", "put", "pay"))
        with system.receiver.holding("look 2", "put 2", "pay 2"):
            calls = [system.receiver.wait_for(f"{tool} 2") for tool in ("look", "put", "pay")]
            keyed_fence, plain_fence = (system.client.get(run_id).pending_effect for run_id in (keyed, plain))
            killed_at = datetime.now(UTC)
            worker.kill()
            eventually(lambda: not any(is_alive(call.pid) for call in calls), what="its children die with it")
            system.worker("tools")
            assert keyed_fence is not None and plain_fence is not None
            system.receiver.wait_for("look 2", 2)
            second = system.receiver.wait_for("put 2", 2)
            unknown = system.stops_as_unknown(plain)
        for run_id in (read, keyed):
            system.completes(run_id)

        assert killed_at < system.time_of(read, "step.requeued") < killed_at + lease + interval
        assert (
            keyed_fence.deadline_at
            < system.time_of(keyed, "step.requeued")
            < max(killed_at + lease, keyed_fence.deadline_at) + interval
        )
        assert unknown.dead_letter is not None
        assert (
            plain_fence.deadline_at
            < unknown.dead_letter.created_at
            < max(killed_at + lease, plain_fence.deadline_at) + interval
        )
        assert second.key == calls[1].key
        assert [system.receiver.effects_of(run_id) for run_id in (read, keyed, plain)] == [0, 1, 1]

    def test_a_model_turn_runs_again_alone_at_no_charge(self, system: System, model_worker: WorkerProcess) -> None:
        """A turn only reads; what it cost is lost with it, the run isn't. It may have been another one's fault."""
        system.worker("isolated")
        run_id = system.enqueue(asks=["turn"])
        with system.receiver.holding("turn"):
            system.receiver.wait_for("turn")
            model_worker.kill()
            model_worker.wait()
            model_worker.start()
            system.receiver.wait_for("turn", 2)
        system.completes(run_id)
        assert system.step(run_id, 1).crashes == 0

    @pytest.mark.usefixtures("model_worker")
    def test_one_that_is_told_to_stop_ends_what_runs_and_gives_the_rest_back(self, system: System) -> None:
        """A deploy must neither cut a write short nor lose what waits."""
        runs = 40  # Of five steps.
        worker = system.worker("tools")
        names = [f"{tool} before {number}" for number in range(runs) for tool in ("look", "put", "pay")]
        run_ids = [
            system.enqueue([call(tool, f"{tool} before {number}") for tool in ("look", "put", "pay")])
            for number in range(runs)
        ]
        in_hand = f"pay before {runs // 4}"
        with system.receiver.holding(in_hand):
            system.receiver.wait_for(in_hand)
            worker.kill(signal.SIGTERM)
            worker.wait_for_log("Warm shutdown")
        assert worker.wait(seconds=system.settings.operation_deadline_seconds + SLACK_SECONDS) == 0
        assert system.events(run_ids[runs // 4], "fence.stamped")[-1].number == 4
        assert system.step(run_ids[runs // 4], 4).state is StepState.COMPLETED, "the open write didn't end"
        done = sum(map(len, map(system.receiver.requests, names)))
        assert done < len(names), "there was nothing left to give back"

        system.worker("tools")
        for run_id in run_ids:
            run = system.completes(run_id, seconds=60)
            assert {step.state for step in run.steps} == {StepState.COMPLETED}
            assert {(step.attempt, step.crashes) for step in run.steps} == {(1, 0)}
        assert [len(system.receiver.requests(name)) for name in names] == [1] * len(names)


@pytest.mark.usefixtures("tools_worker")
class TestLongCalls:
    """A process that is only slow is not dead."""

    def test_a_call_that_outlives_its_lease_is_made_once(self, system: System) -> None:
        """The heartbeat renews it, and a write's is as long as its deadline from the start."""
        run_ids = [system.enqueue([call(tool, tool)]) for tool in ("look", "pay")]
        with system.receiver.holding("look", "pay"):
            for tool in ("look", "pay"):
                system.receiver.wait_for(tool)
            began = datetime.now(UTC)
            lease = timedelta(seconds=system.settings.lease_seconds * 1.3)
            eventually(lambda: datetime.now(UTC) > began + lease, what="the first lease is over")
        for run_id in run_ids:
            system.completes(run_id)
            assert (system.step(run_id, 2).attempt, system.step(run_id, 2).crashes) == (1, 0)

    def test_a_write_that_stops_its_heartbeat_is_made_once(self, system: System) -> None:
        """C code that holds the interpreter lets no thread renew anything; the lease reaches to the deadline anyway."""
        run_id = system.enqueue([call("pay_stubbornly", "deaf", seconds=system.settings.lease_seconds * 1.5)])
        system.completes(run_id)
        assert (len(system.receiver.requests("deaf")), system.step(run_id, 2).attempt) == (1, 1)

    def test_a_read_that_stops_its_heartbeat_loses_its_lease_but_not_its_run(self, system: System) -> None:
        """It is taken for dead and runs again, which is harmless; one of both results counts."""
        run_id = system.enqueue([call("look_stubbornly", "deaf read", seconds=system.settings.lease_seconds * 1.5)])
        system.completes(run_id)
        assert system.step(run_id, 2).attempt == 2


class TestGivenUp:
    @pytest.mark.usefixtures("model_worker")
    def test_an_outcome_that_comes_after_its_attempt_was_given_up_is_the_result(self, system: System) -> None:
        """The write is made and known, so the attempt that waits in its place has nothing left to do."""
        system.worker("tools", tools_concurrency=1)
        run_id = system.enqueue([call("put", "given up")])
        with system.receiver.holding("given up"):
            process = system.receiver.wait_for("given up").pid
            with system.database.locked(run_id):
                system.receiver.release("given up")
                eventually(lambda: waiting_for_a_lock(system), what="it knows the outcome, and can't record it")
                os.kill(process, signal.SIGSTOP)
                for connection in waiting_for_a_lock(system):
                    system.execute(f"SELECT pg_terminate_backend({connection})")
                eventually(lambda: not waiting_for_a_lock(system), what="its connection is cut")
            eventually(lambda: system.step(run_id, 2).attempt == 2, what="it is given up")
            assert system.client.get(run_id).pending_effect is None
            os.kill(process, signal.SIGCONT)
        system.completes(run_id)
        assert len(system.events(run_id, "outcome.late")) == 1
        assert len(system.events(run_id, "fence.stamped")) == 1
        assert len(system.receiver.requests("given up")) == 1
        system.eventually_drained()


def waiting_for_a_lock(system: System) -> list[int]:
    """The server's processes whose statements wait for a row."""
    rows = system.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    return [pid for (pid,) in rows]
