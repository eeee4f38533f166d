"""Processes that die in the middle of a step: what runs again, what doesn't, and how soon."""

import os
import signal

import pytest

from agentq.domain.model import DeadLetterReason
from tests.support.system import System, call

SEEN_SECONDS = 3.0  # A death that the parent saw.
SLACK_SECONDS = 2.0  # For a busy machine.

on_both_databases = pytest.mark.parametrize("deployment", ["sqlite", "postgresql"], indirect=True, scope="module")


@on_both_databases
@pytest.mark.usefixtures("workers")
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
        assert fence is not None
        system.completes(run_id)
        [stamped] = [event for event in system.client.events(run_id) if event.kind == "step.requeued"]
        assert stamped.at > fence.deadline_at
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
