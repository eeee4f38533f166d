"""The delivery ledger tells what really became of a step's deliveries, and never a number that is too small."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from agentq.domain.ledger import AttemptEnd, StepLedger, Suppressed
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

pytestmark = [pytest.mark.parametrize("deployment", ["sqlite"], indirect=True, scope="module")]

PAYMENT = 2


def of_step(system: System, run_id: str, number: int = PAYMENT) -> StepLedger:
    return system.client.ledger(run_id).steps[number - 1]


def mark_lives_ms(system: System, run_id: str) -> int:
    """Each renewal lets the mark live a whole day again."""
    with system.valkey.client() as client:
        key = f"{system.settings.key_prefix}:{system.wiring.deployment}:lease:{run_id}:{PAYMENT}"
        lives_ms: int = client.pttl(key)
    return lives_ms


def shown(system: System, run_id: str, *options: str) -> str:
    """What a person sees who asks for the run."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AGENTQ_")},
        "AGENTQ_DATABASE_URL": system.settings.effective_database_url,
        "AGENTQ_BROKER_URL": system.settings.broker_url or "",
        "AGENTQ_HOME": str(system.folder),
    }
    command = [sys.executable, "-m", "agentq.cli.main", "runs", "show", run_id, *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def step_shown(system: System, run_id: str) -> dict[str, Any]:
    step: dict[str, Any] = json.loads(shown(system, run_id, "--json"))["steps"][PAYMENT - 1]
    return step


@pytest.mark.usefixtures("workers")
class TestSuppressedDeliveries:
    def test_a_duplicate_during_a_write_is_counted_at_once_and_for_good(self, system: System) -> None:
        """Who wonders about a second message sees that it started nothing, while it matters and a year later."""
        run_id = system.enqueue([call("pay", "counted")])
        with system.receiver.holding("counted"):
            system.receiver.wait_for("counted")
            system.broker.deliver_in_vain(dict(system.broker.in_hand()))
            assert of_step(system, run_id).suppressed == Suppressed(count=1, is_exact=True)
            before = mark_lives_ms(system, run_id)
            eventually(lambda: mark_lives_ms(system, run_id) > before, what="a heartbeat tells the worker")
        system.completes(run_id)
        assert system.step(run_id, PAYMENT).suppressed == 1
        assert "1 delivery came to nothing" in shown(system, run_id)
        system.valkey.flush()
        assert of_step(system, run_id).suppressed == Suppressed(count=1, is_exact=False)
        assert "at least 1 delivery came to nothing" in shown(system, run_id)

    def test_a_flush_during_a_write_leaves_the_count_unknown(self, system: System) -> None:
        """A zero that could be a one would be a lie."""
        run_id = system.enqueue([call("pay", "flushed")])
        with system.receiver.holding("flushed"):
            system.receiver.wait_for("flushed")
            system.broker.deliver_in_vain(dict(system.broker.in_hand()))
            assert of_step(system, run_id).suppressed == Suppressed(count=1, is_exact=True)
            system.valkey.flush()
            assert of_step(system, run_id).suppressed is None
            eventually(lambda: system.is_held(run_id, PAYMENT), what="the holder takes its lease again")
        system.completes(run_id)
        assert system.step(run_id, PAYMENT).suppressed is None
        assert of_step(system, run_id).suppressed is None
        assert "not known" in shown(system, run_id)
        assert (step_shown(system, run_id)["suppressed"], step_shown(system, run_id)["suppressed_is_exact"]) == (
            None,
            False,
        )


class TestAttempts:
    def test_a_reader_that_died_is_in_the_ledger_with_its_name_and_its_time(
        self, system: System, workers: list[WorkerProcess]
    ) -> None:
        """At 3 a.m. the question is which machine kills its workers."""
        run_id = system.enqueue([call("look", "killed")])
        with system.receiver.holding("killed"):
            system.receiver.wait_for("killed")
            message = dict(system.broker.in_hand())
            [request] = system.receiver.requests("killed")
            os.kill(request.pid, signal.SIGKILL)
            eventually(lambda: system.step(run_id, PAYMENT).attempt == 2, what="the step is requeued")
        system.completes(run_id)
        system.broker.deliver_in_vain(message)
        step = of_step(system, run_id)
        first, second = step.attempts
        assert (first.end, second.end) == (AttemptEnd.DIED, AttemptEnd.SETTLED)
        assert first.worker is not None and f"/{request.pid}-" in first.worker
        assert first.started_at is not None and first.seconds is not None and first.seconds >= 0
        assert first.told["charge"] == "crash"
        assert second.worker is not None and second.worker != first.worker
        assert first.ended_at is not None and second.started_at is not None and first.ended_at <= second.started_at
        assert step.suppressed is not None and step.suppressed.is_exact and step.suppressed.count >= 1

    def test_a_payment_that_nobody_knows_of_is_told_to_its_end(
        self, system: System, workers: list[WorkerProcess]
    ) -> None:
        """Stamped, died over, shown to a person, decided, run again: each with its time and name, in 80 columns."""
        run_id = system.enqueue([call("pay", "lost")])
        with system.receiver.holding("lost"):
            system.receiver.wait_for("lost")
            [request] = system.receiver.requests("lost")
            os.kill(request.pid, signal.SIGKILL)
            system.stops_as_unknown(run_id)
        [attempt] = of_step(system, run_id).attempts
        assert attempt.end is AttemptEnd.DEAD_LETTERED and attempt.told["outcome_unknown"] is True
        assert attempt.worker is not None and f"/{request.pid}-" in attempt.worker
        system.client.resolve(run_id, happened="paid", actor="ann", reason="seen at the bank")
        system.client.replay(run_id, actor="ann")
        system.completes(run_id)
        [attempt] = of_step(system, run_id).attempts
        assert (attempt.end, attempt.ended_by) == (AttemptEnd.RESOLVED, "ann")
        assert max(map(len, shown(system, run_id).splitlines())) <= 80

    def test_without_redis_the_rest_is_shown_all_the_same(self, system: System) -> None:
        """Redis is a hint: who asks while it is away gets what SQL knows, soon."""
        run_id = system.enqueue([call("look", "shown")])
        system.completes(run_id)
        system.valkey.pause()
        try:
            ledger = system.client.ledger(run_id)
        finally:
            system.valkey.resume()
        assert [attempt.end for step in ledger.steps for attempt in step.attempts] == [AttemptEnd.SETTLED] * 3
        assert [step.suppressed for step in ledger.steps] == [Suppressed(count=0, is_exact=False)] * 3
