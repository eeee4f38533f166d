"""Starting runs: what is refused before anything is stored, and what the broker may do to it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from agentq.domain.errors import (
    BrokerUnavailableError,
    IdempotencyConflictError,
    InvalidInputError,
    StoreUnavailableError,
    UnknownAgentError,
)
from agentq.domain.model import Json, StepKind, StepRef
from agentq.ports.dispatch import Dispatcher, Wakeup
from agentq.ports.runs import Added, NewRun, RunStore, ServedAgent
from agentq.services.enqueue import (
    BATCH_RUNS,
    Enqueued,
    EnqueueRequest,
    enqueue,
    enqueue_message,
    new_run_id,
    request_from,
)

SUPPORT = ServedAgent(name="support", input_bytes_max=100, seen_seconds=1)


class FakeRuns:
    """The part of a RunStore that enqueueing speaks to; `taken` are keys that other runs have."""

    def __init__(self, *agents: ServedAgent, taken: Sequence[str] = (), fails_after_batches: int | None = None) -> None:
        self._agents = {agent.name: agent for agent in agents}
        self._taken = taken
        self._fails_after_batches = fails_after_batches
        self.batches: list[list[NewRun]] = []
        self.undispatched: list[StepRef] = []

    @property
    def stored(self) -> list[NewRun]:
        return [run for batch in self.batches for run in batch]

    def agents(self) -> dict[str, ServedAgent]:
        return self._agents

    def add(self, runs: Sequence[NewRun]) -> list[Added]:
        if self._fails_after_batches == len(self.batches):
            raise StoreUnavailableError("the database is away")
        for run in runs:
            if run.idempotency_key in self._taken:
                raise IdempotencyConflictError(f"the key {run.idempotency_key!r} has another run")
        known = {run.idempotency_key: run.id for run in self.stored if run.idempotency_key}
        known |= {run.id: run.id for run in self.stored}
        self.batches.append([run for run in runs if run.id not in known and run.idempotency_key not in known])
        return [self._added(run, known) for run in runs]

    def undispatch(self, refs: Sequence[StepRef]) -> None:
        self.undispatched += refs

    def _added(self, run: NewRun, known: dict[str, str]) -> Added:
        before = known.get(run.idempotency_key or "") or known.get(run.id)
        if before:
            return Added(run_id=before, is_new=False)
        ref = StepRef(run_id=run.id, number=1, attempt=1)
        return Added(run_id=run.id, is_new=True, wakeup=Wakeup(ref=ref, agent=run.agent, kind=StepKind.MODEL))


class FakeDispatcher:
    def __init__(self, *, backlog: int = 0, is_away: bool = False) -> None:
        self._backlog = backlog
        self._is_away = is_away
        self.published: list[Wakeup] = []

    def publish(self, wakeups: Sequence[Wakeup]) -> None:
        if self._is_away:
            raise BrokerUnavailableError("the broker is away")
        self.published += wakeups

    def backlog(self) -> Mapping[StepKind, int]:
        if self._is_away:
            raise BrokerUnavailableError("the broker is away")
        return {StepKind.MODEL: self._backlog + len(self.published)}


def enqueue_all(
    requests: list[EnqueueRequest], runs: FakeRuns, dispatcher: FakeDispatcher, backlog_max: int = 1000
) -> list[Enqueued]:
    return enqueue(
        requests, runs=cast(RunStore, runs), dispatcher=cast(Dispatcher, dispatcher), backlog_max=backlog_max
    )


def receive(message: Mapping[str, Any], message_id: str, runs: FakeRuns) -> Enqueued:
    dispatcher = cast(Dispatcher, FakeDispatcher())
    return enqueue_message(message, message_id, runs=cast(RunStore, runs), dispatcher=dispatcher, backlog_max=1000)


def request(**changes: Any) -> EnqueueRequest:
    return EnqueueRequest(**{"agent": "support", "input": "Refund order 17", **changes})


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({"agent": 17}, "agent is 17"),
            ({"input": {"when": object()}}, "input can't be written as JSON"),
            ({"input": float("nan")}, "input can't be written as JSON"),
            ({"input": "half \ud800"}, "input holds half of a surrogate pair"),
            ({"input": "x" * 99}, "input is 101 bytes of JSON; agent 'support' takes at most 100"),
            ({"idempotency_key": ""}, "idempotency_key has 0 characters"),
            ({"idempotency_key": "k" * 201}, "idempotency_key has 201 characters"),
            ({"idempotency_key": "a\nb"}, "idempotency_key is 'a\\nb'"),
            ({"idempotency_key": 17}, "idempotency_key is 17"),
            ({"run_id": "../etc"}, "run_id is '../etc'"),
            ({"run_id": "r" * 65}, "run_id is"),
            ({"metadata": ["team"]}, "metadata is ['team']"),
            ({"metadata": {"team": {"name": "x"}}}, "metadata['team'] is"),
            ({"metadata": {"": "x"}}, "metadata has the key ''"),
            ({"metadata": {"team": "x" * 1001}}, "metadata['team'] is"),
            ({"metadata": {f"k{number}": "x" for number in range(33)}}, "metadata has 33 entries"),
        ],
    )
    def test_a_wrong_argument_is_named_and_changes_nothing(self, changes: dict[str, Any], names: str) -> None:
        """The sender must learn which field to correct, and may send the corrected request as if for the first time."""
        runs = FakeRuns(SUPPORT)
        with pytest.raises(InvalidInputError) as refusal:
            enqueue_all([request(), request(**changes)], runs, FakeDispatcher())
        assert names in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert runs.batches == []

    def test_a_cyclic_input_is_refused(self) -> None:
        """It has no JSON, and must not end in a recursion."""
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        with pytest.raises(InvalidInputError, match="input can't be written as JSON"):
            enqueue_all([request(input=cyclic)], FakeRuns(SUPPORT), FakeDispatcher())

    def test_an_unknown_agent_is_answered_with_those_that_are_served(self) -> None:
        """A typing error is seen at once, not as a run that waits for ever."""
        runs = FakeRuns(SUPPORT, ServedAgent(name="billing", input_bytes_max=100, seen_seconds=1))
        with pytest.raises(UnknownAgentError) as refusal:
            enqueue_all([request(agent="suport")], runs, FakeDispatcher())
        assert "did you mean 'support'?" in str(refusal.value)
        assert "billing, support" in str(refusal.value)

    def test_without_any_agent_the_person_is_told_to_start_a_worker(self) -> None:
        """The first enqueue on a fresh database must not look like a typing error."""
        with pytest.raises(UnknownAgentError, match="no worker has registered any agent yet"):
            enqueue_all([request()], FakeRuns(), FakeDispatcher())

    def test_a_mapping_with_an_unknown_or_missing_field_is_refused(self) -> None:
        """A misspelt field that is ignored would lose its meaning silently."""
        with pytest.raises(InvalidInputError, match="unknown field 'idempotencyKey'"):
            request_from({"agent": "support", "input": "x", "idempotencyKey": "k"})
        with pytest.raises(InvalidInputError, match="field 'input' is missing"):
            request_from({"agent": "support"})


class TestStoring:
    @pytest.mark.parametrize("value", ["text", None, 17, True, [1, "a"], {"a": {"b": []}}])
    def test_any_json_may_be_an_input(self, value: Json) -> None:
        """Services send what they have; only its size is limited."""
        runs = FakeRuns(SUPPORT)
        enqueue_all([request(input=value)], runs, FakeDispatcher())
        assert [run.input for run in runs.stored] == [value]

    def test_an_input_is_stored_as_plain_json(self) -> None:
        """The same request sent by Celery, as JSON, must be the same input for its idempotency key."""
        runs = FakeRuns(SUPPORT)
        enqueue_all([request(input={"ids": (1, 2), 3: "x"})], runs, FakeDispatcher())
        assert runs.stored[0].input == {"ids": [1, 2], "3": "x"}

    def test_many_runs_are_stored_in_batches_and_answered_in_order(self) -> None:
        """One transaction a run would take minutes; one for all would hold locks as long."""
        runs = FakeRuns(SUPPORT)
        ids = [f"run-{number}" for number in range(BATCH_RUNS + 3)]
        enqueued = enqueue_all([request(run_id=run_id) for run_id in ids], runs, FakeDispatcher(), backlog_max=10_000)
        assert [one.run_id for one in enqueued] == ids
        assert [len(batch) for batch in runs.batches] == [BATCH_RUNS, 3]

    def test_a_failure_midway_says_how_much_is_stored(self) -> None:
        """Whoever calls again must know that the first runs are there."""
        runs = FakeRuns(SUPPORT, fails_after_batches=1)
        with pytest.raises(StoreUnavailableError) as failure:
            enqueue_all([request() for _ in range(BATCH_RUNS + 1)], runs, FakeDispatcher())
        assert f"{BATCH_RUNS} runs are stored already" in failure.value.__notes__[0]

    def test_ids_sort_by_the_time_they_were_made(self) -> None:
        """Lists are newest first, and an index of random ids would be written all over."""
        ids = [new_run_id() for _ in range(200)]
        assert len(set(ids)) == 200
        assert all(len(run_id) == 32 for run_id in ids)
        assert sorted(ids, key=lambda run_id: run_id[:16]) == ids

    def test_an_agent_that_nobody_serves_right_now_is_a_warning(self) -> None:
        """The run is safe in the queue, but a person who waits for it should know."""
        silent = ServedAgent(name="support", input_bytes_max=100, seen_seconds=3600)
        enqueued = enqueue_all([request()], FakeRuns(silent), FakeDispatcher())
        assert enqueued[0].warning is not None and "no worker serves agent 'support'" in enqueued[0].warning
        assert enqueue_all([request()], FakeRuns(SUPPORT), FakeDispatcher())[0].warning is None


class TestPublishing:
    def test_a_broker_that_is_away_costs_nothing_but_time(self) -> None:
        """SQL comes first: the run is stored, and its step is left to the dispatcher."""
        runs = FakeRuns(SUPPORT)
        enqueued = enqueue_all([request()], runs, FakeDispatcher(is_away=True))
        assert [run.id for run in runs.stored] == [enqueued[0].run_id]
        assert [ref.run_id for ref in runs.undispatched] == [enqueued[0].run_id]

    def test_the_brokers_backlog_is_bounded(self) -> None:
        """A million queued runs are a million rows, not a million messages."""
        runs, dispatcher = FakeRuns(SUPPORT), FakeDispatcher(backlog=8)
        enqueue_all([request() for _ in range(5)], runs, dispatcher, backlog_max=10)
        stored = [run.id for run in runs.stored]
        assert [wakeup.ref.run_id for wakeup in dispatcher.published] == stored[:2]
        assert [ref.run_id for ref in runs.undispatched] == stored[2:]

    def test_a_repeat_publishes_nothing(self) -> None:
        """The run that the key had before is on its way already."""
        runs, dispatcher = FakeRuns(SUPPORT), FakeDispatcher()
        first = enqueue_all([request(idempotency_key="ticket-991")], runs, dispatcher)
        second = enqueue_all([request(idempotency_key="ticket-991")], runs, dispatcher)
        assert (second[0].run_id, second[0].is_new) == (first[0].run_id, False)
        assert len(dispatcher.published) == 1


class TestMessages:
    def test_a_messages_id_stands_in_for_a_missing_key(self) -> None:
        """The broker may deliver it again: that must find the run, not start a second."""
        runs = FakeRuns(SUPPORT)
        message = {"agent": "support", "input": "x"}
        first, second = receive(message, "task-1", runs), receive(message, "task-1", runs)
        assert first.is_new and not second.is_new
        assert first.run_id == second.run_id
        assert runs.stored[0].idempotency_key == "task-1"

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            ({"agent": "nobody", "input": "x"}, "unknown agent 'nobody'"),
            ({"agent": None, "input": "x"}, "agent is None"),
            ({"input": "x"}, "field 'agent' is missing"),
            ({"agent": "support", "input": "x", "priority": 3}, "unknown field 'priority'"),
            ({"agent": "support", "input": "x" * 1000}, "input is 1,002 bytes"),
            ({"agent": "support", "input": "x", "run_id": "no id!"}, "run_id is 'no id!'"),
            ({"agent": "support", "input": "x", "idempotency_key": ["k"]}, "idempotency_key is ['k']"),
        ],
    )
    def test_a_refused_message_is_a_row_with_its_reason(self, message: dict[str, Any], reason: str) -> None:
        """Its sender has no reply to read: it asks by the key, or the id, that it gave."""
        runs = FakeRuns(SUPPORT)
        refused = receive(message, "task-1", runs)
        [row] = runs.stored
        assert row.error is not None and reason in row.error
        assert row.idempotency_key == "task-1"
        assert refused.run_id == row.id and not refused.is_new
        assert receive(message, "task-1", runs).run_id == row.id
        assert len(runs.stored) == 1

    def test_a_refused_message_is_found_by_its_own_key_and_id(self) -> None:
        """These are the names that its sender knows."""
        runs = FakeRuns(SUPPORT)
        receive({"agent": "nobody", "input": "x", "run_id": "r-1", "idempotency_key": "k-1"}, "task-1", runs)
        assert (runs.stored[0].id, runs.stored[0].idempotency_key) == ("r-1", "k-1")

    def test_a_conflict_is_kept_without_the_other_runs_key(self) -> None:
        """The key finds the run that it started; the conflict must neither hide it nor be lost."""
        runs = FakeRuns(SUPPORT, taken=["ticket-991"])
        message = {"agent": "support", "input": "other", "idempotency_key": "ticket-991"}
        first, second = receive(message, "task-1", runs), receive(message, "task-1", runs)
        [row] = runs.stored
        assert row.idempotency_key is None
        assert row.error is not None and "ticket-991" in row.error
        assert first.run_id == second.run_id == row.id

    def test_a_database_that_is_away_is_not_a_refusal(self) -> None:
        """The message must stay with the broker until one of the two is stored."""
        runs = FakeRuns(SUPPORT, fails_after_batches=0)
        with pytest.raises(StoreUnavailableError):
            receive({"agent": "support", "input": "x"}, "task-1", runs)
