"""Cancels while nobody runs, and in the middle of each kind of step: nothing follows, and no outcome is dropped."""

import os
import signal

import pytest

from agentq.domain.errors import RefusedError
from agentq.domain.model import RunStatus, StepState
from tests.support.system import System, call


def test_a_run_that_is_cancelled_while_no_worker_runs_never_starts(system: System) -> None:
    """Its message may still lie in a queue."""
    run_id = system.enqueue(asks=["never"])
    assert system.client.cancel(run_id) is RunStatus.CANCELLED
    system.workers("model", "tools")
    system.completes(system.enqueue())
    system.eventually_drained()
    assert system.client.status(run_id) is RunStatus.CANCELLED
    assert system.receiver.requests("never") == []


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("kind", ["turn", "look"])
def test_a_cancel_in_the_middle_of_what_only_reads_is_at_once(system: System, kind: str) -> None:
    """What it finds out is of no use to anybody."""
    name = f"cancelled {kind}"
    follows = call("pay", f"after {name}")
    run_id = system.enqueue([follows], asks=[name]) if kind == "turn" else system.enqueue([call(kind, name), follows])
    with system.receiver.holding(name):
        system.receiver.wait_for(name)
        assert system.client.cancel(run_id) is RunStatus.CANCELLED
    system.eventually_drained()
    assert system.client.status(run_id) is RunStatus.CANCELLED
    assert system.events(run_id, "fence.stamped") == []
    assert system.receiver.requests(f"after {name}") == []


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("kind", ["put", "pay"])
def test_a_cancel_in_the_middle_of_a_write_waits_for_its_outcome(system: System, kind: str) -> None:
    """What happened is written down; nothing follows it."""
    name = f"cancelled {kind}"
    run_id = system.enqueue([call(kind, name), call("pay", f"after {name}")])
    with system.receiver.holding(name):
        system.receiver.wait_for(name)
        assert system.client.cancel(run_id) is RunStatus.RUNNING
    run = system.wait(run_id)
    assert (run.status, run.steps[1].state) == (RunStatus.CANCELLED, StepState.COMPLETED)
    assert len(system.events(run_id, "fence.stamped")) == 1
    assert system.receiver.effects_of(run_id) == 1


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("kind", ["put", "pay"])
def test_a_write_that_dies_under_a_cancel_is_unknown_and_never_resumed(system: System, kind: str) -> None:
    """A keyed write too: to find its outcome it would have to be made again, which nobody wants any more."""
    name = f"cancelled and dead {kind}"
    run_id = system.enqueue([call(kind, name), call("pay", f"after {name}")])
    with system.receiver.holding(name):
        request = system.receiver.wait_for(name)
        system.client.cancel(run_id)
        os.kill(request.pid, signal.SIGKILL)
        system.stops_as_unknown(run_id)
    assert run_id in [each.run_id for each in system.client.dead_letters(outcome_unknown=True)]
    system.client.resolve(run_id, happened="it did", reason="the receiver has it")
    with pytest.raises(RefusedError):
        system.client.replay(run_id, reason="go on")
    system.eventually_drained()
    assert len(system.receiver.requests(name)) == 1
    assert system.receiver.requests(f"after {name}") == []
