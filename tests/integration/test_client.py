"""What another program does with `AgentQ`: on a real database, with and without a broker."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentq import AgentQ, RunStatus
from agentq.config.settings import Settings
from agentq.domain.errors import (
    AlreadyDecidedError,
    DecisionRequiredError,
    IdempotencyConflictError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    TooEarlyError,
    UnknownAgentError,
    WaitTimeoutError,
)
from agentq.domain.model import StepKind, StepState
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage
from tests.support.valkey import ValkeyServer

BROKER_PATIENCE_SECONDS = 5.0  # What a producer may wait for a broker that is away.


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """A database with the schema, where nobody answers for the broker."""
    fresh = fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql()
    with fresh as url:
        yield Settings(database_url=url, broker_url=f"redis+socket://{tmp_path / 'nobody.sock'}", home=tmp_path)


@pytest.fixture
def client(settings: Settings) -> Iterator[AgentQ]:
    with AgentQ(settings, actor="ann") as client:
        yield client


@pytest.fixture
def stage(client: AgentQ) -> Stage:
    stage = Stage(database=client._wiring.database)
    stage.keeping.see_agents({"support": 1000})
    return stage


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


class TestEnqueue:
    def test_it_succeeds_while_the_broker_is_down(self, client: AgentQ, stage: Stage) -> None:
        """SQL comes first: a service must be able to hand over its work while Redis restarts."""
        began = time.monotonic()
        run_id = client.enqueue("support", "Refund order 17", metadata={"team": "eu"})
        assert time.monotonic() - began < BROKER_PATIENCE_SECONDS
        run = client.get(run_id)
        assert (run.status, run.input, run.metadata) == (RunStatus.QUEUED, "Refund order 17", {"team": "eu"})
        assert [wakeup.ref.run_id for wakeup in stage.keeping.take_due(10, first_steps=True)] == [run_id]

    def test_it_succeeds_while_the_broker_hangs(self, settings: Settings, valkey: ValkeyServer, stage: Stage) -> None:
        """A broker that accepts and answers nothing is the worse one: it must not take its clients with it."""
        with AgentQ(replace(settings, broker_url=valkey.url)) as client:
            valkey.pause()
            began = time.monotonic()
            run_id = client.enqueue("support", "Refund order 17")
            assert time.monotonic() - began < BROKER_PATIENCE_SECONDS
            valkey.resume()
            assert client.status(run_id) is RunStatus.QUEUED

    def test_the_first_step_is_published_at_once(self, settings: Settings, valkey: ValkeyServer, stage: Stage) -> None:
        """Nobody waits for the keeper's next look when the broker is there."""
        with AgentQ(replace(settings, broker_url=valkey.url)) as client:
            client.enqueue("support", "Refund order 17")
            assert client._wiring.dispatcher.backlog()[StepKind.MODEL] == 1
        assert stage.keeping.take_due(10, first_steps=True) == []

    def test_past_its_limit_the_brokers_queue_stays_as_it_is(
        self, settings: Settings, valkey: ValkeyServer, stage: Stage
    ) -> None:
        """Runs beyond it are rows, which the dispatcher publishes as the queue drains."""
        with AgentQ(replace(settings, broker_url=valkey.url, backlog_max=3)) as client:
            ids = client.enqueue_many({"agent": "support", "input": number} for number in range(5))
            assert client._wiring.dispatcher.backlog()[StepKind.MODEL] == 3
        due = [wakeup.ref.run_id for wakeup in stage.keeping.take_due(10, first_steps=True)]
        assert sorted(due) == sorted(ids[3:])

    def test_the_same_key_is_the_same_run(self, client: AgentQ, stage: Stage) -> None:
        """A service that crashed before it noted the id asks again, and must not start the work twice."""
        first = client.enqueue("support", {"order": 17}, idempotency_key="ticket-991")
        assert client.enqueue("support", {"order": 17}, idempotency_key="ticket-991") == first
        assert client.get_by_key("ticket-991").id == first
        assert len(client.runs()) == 1

    def test_the_same_key_for_something_else_is_a_conflict(self, client: AgentQ, stage: Stage) -> None:
        """Answering with the other run would hide that this work was never started."""
        client.enqueue("support", {"order": 17}, idempotency_key="ticket-991")
        with pytest.raises(IdempotencyConflictError, match="ticket-991"):
            client.enqueue("support", {"order": 18}, idempotency_key="ticket-991")
        assert len(client.runs()) == 1

    def test_many_are_stored_in_order_and_repeats_found(self, client: AgentQ, stage: Stage) -> None:
        """A bulk that failed midway is simply sent again."""
        requests = [{"agent": "support", "input": number, "idempotency_key": f"k-{number}"} for number in range(700)]
        ids = client.enqueue_many(requests[:600])
        assert client.enqueue_many(requests)[:600] == ids
        assert len(client.runs(limit=1000)) == 700
        assert [client.get(run_id).input for run_id in ids[::300]] == [0, 300]

    def test_an_unknown_agent_stores_nothing(self, client: AgentQ, stage: Stage) -> None:
        """A typing error is answered at once, not by a run that waits for ever."""
        with pytest.raises(UnknownAgentError, match="did you mean 'support'"):
            client.enqueue("suport", "x")
        assert client.runs() == []


class TestReading:
    def test_wait_returns_the_run_once_it_has_ended(self, client: AgentQ, stage: Stage) -> None:
        """The caller gets the answer and the steps without a second question."""
        run_id = stage.queued()
        worker = threading.Thread(target=lambda: stage.answer(run_id, 1, "refunded"))
        worker.start()
        run = client.wait(run_id, timeout=10)
        worker.join()
        assert (run.status, run.output, len(run.steps)) == (RunStatus.COMPLETED, "refunded", 1)

    def test_wait_gives_up_after_its_time(self, client: AgentQ, stage: Stage) -> None:
        """The run goes on; the error says so, and where it stands."""
        run_id = stage.queued()
        with pytest.raises(WaitTimeoutError, match=f"run {run_id} is still queued after 0.1 s; it goes on"):
            client.wait(run_id, timeout=0.1)

    def test_following_ends_with_the_runs_last_event(self, client: AgentQ, stage: Stage) -> None:
        """Whoever follows sees the end, each event once, and is then let go."""
        run_id = stage.asked(READ)
        events = client.events(run_id, follow=True, timeout=10)
        seen = [next(events), next(events)]
        stage.stop(run_id, FIRST_CALL)
        seen += events
        assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
        assert seen[-1].kind == "run.dead_lettered"

    @pytest.mark.parametrize("method", ["status", "get", "wait", "get_by_key", "cancel", "replay"])
    def test_an_unknown_run_is_said_to_be_unknown(self, client: AgentQ, stage: Stage, method: str) -> None:
        """Waiting for it would never end."""
        with pytest.raises(NotFoundError, match="nowhere"):
            getattr(client, method)("nowhere")
        with pytest.raises(NotFoundError, match="nowhere"):
            list(client.events("nowhere"))

    def test_runs_are_filtered(self, client: AgentQ, stage: Stage) -> None:
        """One grammar, whether typed, sent or written in Python."""
        queued, failed = stage.queued(), stage.failed(READ)
        assert {run.id for run in client.runs()} == {queued, failed}
        assert [run.id for run in client.runs(status="failed", since="1h")] == [failed]
        with pytest.raises(InvalidInputError, match="unknown filter 'state'"):
            client.runs(state="failed")


class TestDeciding:
    def test_a_cancelled_run_is_over_at_once(self, client: AgentQ, stage: Stage) -> None:
        """It needs no worker and no message."""
        run_id = stage.asked(READ)
        assert client.cancel(run_id, reason="wrong customer") is RunStatus.CANCELLED
        assert {event.actor for event in client.events(run_id) if event.kind == "run.cancelled"} == {"ann"}

    def test_an_unknown_write_needs_a_decision_before_a_replay(self, client: AgentQ, stage: Stage) -> None:
        """Running on over a refund that may have been paid is what must not happen."""
        run_id = stage.unknown()
        with pytest.raises(DecisionRequiredError):
            client.replay(run_id)
        assert client.status(run_id) is RunStatus.FAILED

    def test_happened_records_the_result_and_the_run_goes_on_behind_it(self, client: AgentQ, stage: Stage) -> None:
        """The call is never made again; what a person saw is its result, even when that is nothing."""
        run_id = stage.unknown()
        step = client.resolve(run_id, happened=None, reason="seen at the provider", actor="bob")
        assert (step.number, step.state, step.result) == (FIRST_CALL, StepState.COMPLETED, None)
        client.replay(run_id, reason="go on")
        run = client.get(run_id)
        assert run.status is RunStatus.RUNNING
        assert [(each.kind, each.state) for each in run.steps[FIRST_CALL - 1 :]] == [
            (StepKind.TOOL, StepState.COMPLETED),
            (StepKind.MODEL, StepState.AVAILABLE),
        ]
        assert [event.actor for event in client.events(run_id) if event.kind == "write.resolved"] == ["bob"]

    @pytest.mark.parametrize("wrong", [{"reason": "x" * 1_000_000}, {"reason": None}, {"actor": "x" * 201}])
    def test_a_reason_is_a_text_that_an_event_can_hold(
        self, client: AgentQ, stage: Stage, wrong: dict[str, Any]
    ) -> None:
        """It is written once for each of ten thousand runs, and read by every verify and export afterwards."""
        run_id = stage.unknown()
        for change in (client.cancel, client.discard, client.resolve_by_probe, client.replay):
            with pytest.raises(InvalidInputError, match="it takes a"):
                change(run_id, **wrong)
        with pytest.raises(InvalidInputError):
            client.resolve(run_id, happened=1, **wrong)
        with pytest.raises(InvalidInputError):
            client.pause("pay", **wrong)
        assert client.get(run_id).dead_letter is not None and not client.pauses()

    def test_a_replay_can_carry_the_decision(self, client: AgentQ, stage: Stage) -> None:
        """Two commands at night where one does are one too many."""
        run_id = stage.unknown()
        client.replay(run_id, did_not_happen=True, looked_at="now")
        [call] = [step for step in client.get(run_id).steps if step.kind is StepKind.TOOL]
        assert (call.state, call.attempt) == (StepState.AVAILABLE, 2)
        assert client.get(run_id).pending_effect is None

    def test_a_look_that_came_too_early_is_refused(self, client: AgentQ, stage: Stage) -> None:
        """The request may still land after it."""
        run_id = stage.unknown(PLAIN, deadline_seconds=60)
        with pytest.raises(TooEarlyError) as refusal:
            client.resolve(run_id, did_not_happen=True, looked_at="now")
        assert refusal.value.not_before is not None and refusal.value.not_before > datetime.now(UTC)
        assert client.get(run_id).pending_effect is not None

    def test_the_second_decision_is_told_who_was_first(self, client: AgentQ, stage: Stage) -> None:
        """Two operators at one dead letter must not overwrite each other."""
        run_id = stage.unknown()
        client.resolve(run_id, happened="re_17", actor="bob")
        with pytest.raises(AlreadyDecidedError, match="bob"):
            client.resolve(run_id, did_not_happen=True, looked_at="now")

    def test_a_cancelled_unknown_write_is_resolved_but_not_resumed(self, client: AgentQ, stage: Stage) -> None:
        """Its outcome matters; the run was not wanted any more."""
        run_id = stage.unknown(is_cancelled=True)
        client.resolve(run_id, happened="re_17")
        with pytest.raises(RefusedError, match="cancelled"):
            client.replay(run_id)

    def test_contradicting_words_are_refused_before_anything_is_recorded(self, client: AgentQ, stage: Stage) -> None:
        """Half a decision is none."""
        run_id = stage.unknown()
        half: list[dict[str, Any]] = [
            {"happened": 1, "did_not_happen": True},
            {"happened": 1, "looked_at": "1m"},
            {"did_not_happen": True},
            {},
        ]
        for words in half:
            with pytest.raises(InvalidInputError):
                client.resolve(run_id, **words)
        assert client.get(run_id).pending_effect is not None

    def test_a_list_of_dead_letters_names_agent_tool_and_contradictions(self, client: AgentQ, stage: Stage) -> None:
        """It is what an operator sees first; contradictions come first in it."""
        unknown, contradicted = stage.unknown(), stage.contradicted()
        assert [
            (letter.run_id, letter.agent, letter.tool, letter.outcome_unknown, letter.has_contradiction)
            for letter in client.dead_letters()
        ] == [(contradicted, "support", "look", False, True), (unknown, "support", "pay", True, False)]
