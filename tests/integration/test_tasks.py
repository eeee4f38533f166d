"""What a worker answers: the tasks for other services, and how a step's end and a child's death are told."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import states
from celery.exceptions import Reject, TimeLimitExceeded, WorkerLostError

from agentq.adapters.process import new_owner
from agentq.bootstrap import Wiring
from agentq.config.settings import Settings
from agentq.domain.errors import DecisionRequiredError, NotFoundError, StoreUnavailableError
from agentq.domain.model import DeadLetterReason, RunStatus, StepRef
from agentq.ports.leases import DeathNote
from agentq.tasks import control, wiring
from agentq.tasks.app import app
from agentq.tasks.steps import RunStoppedError, StepRequest, step
from tests.support.databases import fresh_sqlite
from tests.support.stage import FIRST_CALL, READ, Stage
from tests.support.valkey import ValkeyServer

NOTED_SECONDS = 0.1
QUEUES = ("agentq.model", "agentq.tools", "agentq.control", "agentq.isolated")


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def work(tmp_path: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiring]:
    """What the tasks of this process work with."""
    valkey.flush()
    with fresh_sqlite(tmp_path) as url:
        settings = Settings(
            home=tmp_path, database_url=url, broker_url=valkey.url, agents=("tests.support.smoke_agents",)
        )
        with Wiring(settings) as work:
            monkeypatch.setattr(wiring._process, "wiring", work)
            monkeypatch.setattr(wiring._process, "pid", os.getpid())
            work.keeping.see_agents({"sulker": 1000, "clerk": 1000, "support": 1000})
            yield work


@pytest.fixture
def stage(work: Wiring) -> Stage:
    return Stage(database=work.database)


def ask(task: Any, task_id: str | None = None, **arguments: Any) -> Any:
    """The task's answer to such a message; raises what it raises."""
    return task.apply(kwargs=arguments, task_id=task_id or str(uuid.uuid4()), throw=True).result


class TestEnqueue:
    def test_the_run_is_stored_and_its_first_step_published(self, work: Wiring, valkey: ValkeyServer) -> None:
        """By name alone: the answer is the run's id."""
        run_id = ask(control.enqueue_run, agent="clerk", input="Refund order 17", metadata={"team": "b"})
        run = work.runs.run(run_id)
        assert (run.status, run.agent, run.metadata) == (RunStatus.QUEUED, "clerk", {"team": "b"})
        with valkey.client() as client:
            assert client.llen("agentq.model") == 1

    def test_a_redelivered_message_is_the_same_run(self, work: Wiring) -> None:
        """The task's id is the key when none is given."""
        first = ask(control.enqueue_run, "message-1", agent="clerk", input="Refund order 17")
        again = ask(control.enqueue_run, "message-1", agent="clerk", input="Refund order 17")
        other = ask(control.enqueue_run, "message-2", agent="clerk", input="Refund order 17")
        assert first == again != other
        assert work.runs.run_by_key("message-1").id == first

    def test_a_refused_request_is_a_row_with_its_reason(self, work: Wiring) -> None:
        """There is nobody to raise to."""
        run_id = ask(control.enqueue_run, agent="stranger", input="hi", idempotency_key="k")
        run = work.runs.run(run_id)
        assert run.status is RunStatus.FAILED
        assert run.error is not None and "unknown agent 'stranger'" in run.error
        assert work.runs.run_by_key("k").id == run_id


class TestChanges:
    def test_cancel_says_who_and_why(self, work: Wiring, stage: Stage) -> None:
        """It is in the audit log."""
        run_id = stage.queued()
        assert ask(control.cancel, run_id=run_id, reason="wrong customer", actor="ann") == RunStatus.CANCELLED
        (event,) = [event for event in work.runs.events(run_id) if event.kind.startswith("run.cancel")]
        assert (event.actor, event.data["reason"]) == ("ann", "wrong customer")

    def test_replay_runs_a_dead_letter_again(self, work: Wiring, stage: Stage, valkey: ValkeyServer) -> None:
        """From the step that stopped it, at once."""
        run_id = stage.failed(READ)
        ask(control.replay, run_id=run_id, reason="fixed")
        assert work.runs.status(run_id) is RunStatus.RUNNING
        with valkey.client() as client:
            assert sum(client.llen(queue) for queue in QUEUES) == 1

    def test_replay_needs_a_decision_on_an_unknown_write(self, work: Wiring, stage: Stage) -> None:
        """A message can't give one."""
        run_id = stage.unknown()
        with pytest.raises(DecisionRequiredError):
            ask(control.replay, run_id=run_id)
        assert work.runs.status(run_id) is RunStatus.FAILED

    @pytest.mark.parametrize("task", [control.cancel, control.replay])
    def test_an_unknown_run_is_said_to_be_unknown(self, work: Wiring, task: Any) -> None:
        """In Flower: the task fails with that line."""
        with pytest.raises(NotFoundError):
            ask(task, run_id="nobody")

    def test_a_nudge_wakes_the_keeper(self, work: Wiring) -> None:
        """It looks now instead of at its interval's end."""
        ask(control.reap)
        assert work.nudges.wait(30) == []


class TestWhileTheDatabaseIsAway:
    """The message waits in the worker, unacknowledged."""

    @pytest.fixture
    def pauses(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        pauses: list[float] = []
        monkeypatch.setattr(control.time, "sleep", pauses.append)  # type: ignore[attr-defined]
        return pauses

    def test_the_change_is_made_when_it_is_back(self, pauses: list[float]) -> None:
        """It waits longer each time, and not for ever longer."""
        assert control._when_store_answers(Away(times=6)) == "stored"
        assert pauses == [0.5, 1, 2, 4, 5, 5]

    def test_it_does_not_wait_here_for_ever(self, pauses: list[float]) -> None:
        """The message goes back to its queue: a worker that is told to stop ends, and another one stores the run."""
        with pytest.raises(Reject) as caught:
            control._when_store_answers(Away(times=99))
        assert caught.value.requeue
        assert control.HOLD_SECONDS <= sum(pauses) < control.HOLD_SECONDS + control.WAIT_SECONDS_MAX


class Away:
    """A change that finds the database away so many times."""

    def __init__(self, *, times: int) -> None:
        self._left = times

    def __call__(self) -> str:
        self._left -= 1
        if self._left >= 0:
            raise StoreUnavailableError("away")
        return "stored"


class TestStep:
    def test_a_step_that_goes_well_says_nothing(self, work: Wiring, stage: Stage, valkey: ValkeyServer) -> None:
        """The next steps are published."""
        run_id = stage.queued(agent="clerk")
        assert step.apply(args=(run_id, 1, 1), throw=True).state == states.SUCCESS
        assert len(work.runs.run(run_id).steps) == 3
        with valkey.client() as client:
            assert (client.llen("agentq.tools"), client.llen("agentq.unacked")) == (1, 0)

    def test_the_step_that_ends_its_run_is_red(self, work: Wiring, stage: Stage) -> None:
        """In Flower, with the run's id and the reason; everything is stored by then."""
        run_id = stage.queued(agent="sulker")
        outcome = step.apply(args=(run_id, 1, 1))
        assert outcome.state == states.FAILURE
        assert isinstance(outcome.result, RunStoppedError)
        assert str(outcome.result) == (
            f"run {run_id} stopped at step 1: NOT_RETRYABLE: PermissionError: this model answers nobody"
        )
        dead_letter = work.runs.run(run_id).dead_letter
        assert dead_letter is not None and dead_letter.reason is DeadLetterReason.NOT_RETRYABLE

    def test_a_second_delivery_leaves_quietly(self, work: Wiring, stage: Stage) -> None:
        """Redelivery is normal: it isn't red."""
        run_id = stage.queued(agent="sulker")
        step.apply(args=(run_id, 1, 1))
        assert step.apply(args=(run_id, 1, 1), throw=True).state == states.SUCCESS
        assert step.apply(args=("nobody", 1, 1), throw=True).state == states.SUCCESS


class TestDeathNote:
    """The parent sees its child die, and tells the keeper which attempt that was, and which process."""

    def test_a_lost_child_is_told_to_the_keeper(self, work: Wiring, stage: Stage) -> None:
        """At once: nobody waits for a lease to run out."""
        ref = stage.ref(stage.asked(READ), FIRST_CALL)
        fail(ref, WorkerLostError("signal 9 (SIGKILL)"))
        (note,) = work.nudges.wait(NOTED_SECONDS)
        assert note == DeathNote(ref=ref, process=note.process)
        assert new_owner().startswith(note.process)

    @pytest.mark.parametrize("error", [RunStoppedError("run r stopped"), ValueError("x"), TimeLimitExceeded(3)])
    def test_no_other_failure_is_a_death(self, work: Wiring, error: Exception) -> None:
        """The process lives, or is about to be ended: then its lease and fence tell."""
        fail(StepRef(run_id="r", number=2, attempt=1), error)
        assert work.nudges.wait(NOTED_SECONDS) == []

    def test_a_redis_that_is_away_costs_the_note_alone(self, work: Wiring, valkey: ValkeyServer) -> None:
        """The worker goes on; the keeper finds the step by its lease."""
        assert work.deployment
        valkey.stop()
        try:
            fail(StepRef(run_id="r", number=2, attempt=1), WorkerLostError("signal 9 (SIGKILL)"))
        finally:
            valkey.start()


def fail(ref: StepRef, error: Exception) -> None:
    """The main process of a worker hears that this attempt, executed by a process with our pid, failed so."""
    arguments = (ref.run_id, ref.number, ref.attempt)
    sent = app.amqp.create_task_message(str(uuid.uuid4()), "agentq.step", arguments, {})
    message = SimpleNamespace(
        body=sent.body, headers=sent.headers, properties=sent.properties, delivery_info={}, acknowledged=False
    )
    request = StepRequest(
        message,
        on_ack=lambda *_: None,
        on_reject=lambda *_: None,
        app=app,
        task=step,
        headers=sent.headers,
        body=sent.body,
        decoded=True,
    )
    request.worker_pid = os.getpid()
    try:
        raise error
    except Exception:
        request.on_failure(ExceptionInfo())
