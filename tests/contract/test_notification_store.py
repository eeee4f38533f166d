"""Which dead letters somebody is still to be told of: the contract of `NotificationStore`."""

import pytest

from agentq.adapters.sql.notifying import SqlNotificationStore
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage


@pytest.fixture
def store(stage: Stage) -> SqlNotificationStore:
    return SqlNotificationStore(stage.database)


def runs_of(store: SqlNotificationStore, limit: int = 100) -> list[str]:
    return [letter.run_id for letter in store.untold(limit)]


def mark(store: SqlNotificationStore, *run_ids: str) -> None:
    store.mark_told([letter.id for letter in store.untold(100) if letter.run_id in run_ids])


def test_the_oldest_that_nobody_was_told_of_come_first(stage: Stage, store: SqlNotificationStore) -> None:
    """Each once, with what a person needs to find it."""
    first, second, third = stage.failed(READ), stage.unknown(PLAIN), stage.failed(READ)
    assert runs_of(store) == [first, second, third]
    assert runs_of(store, 2) == [first, second]
    letter = store.untold(2)[1]
    assert (letter.number, letter.agent, letter.tool, letter.outcome_unknown) == (FIRST_CALL, "support", "pay", True)
    assert (letter.reason, letter.failure_class) == (DeadLetterReason.NOT_RETRYABLE, FailureClass.UNKNOWN)
    assert letter.fingerprint

    mark(store, first, third)
    assert runs_of(store) == [second] and store.count_untold() == 1
    mark(store, second)
    mark(store)
    assert runs_of(store) == [] and store.count_untold() == 0


def test_what_was_closed_before_is_not_told(stage: Stage, store: SqlNotificationStore) -> None:
    """Whoever is woken for it would find nothing to do."""
    replayed, discarded = stage.failed(READ), stage.failed(READ)
    stage.decisions.replay(replayed, actor="ann", reason="")
    stage.decisions.discard(discarded, actor="ann", reason="")
    assert runs_of(store) == [] and store.count_untold() == 0


def test_a_run_that_stops_again_is_told_again(stage: Stage, store: SqlNotificationStore) -> None:
    """It is another dead letter: the first decision didn't help."""
    run_id = stage.failed(READ)
    mark(store, run_id)
    stage.decisions.replay(run_id, actor="ann", reason="")
    assert runs_of(store) == []
    stage.stop(run_id, FIRST_CALL)
    assert runs_of(store) == [run_id]


def test_marking_what_is_gone_is_no_failure(stage: Stage, store: SqlNotificationStore) -> None:
    """It was told, and decided while it was."""
    run_id = stage.failed(READ)
    [letter] = store.untold(10)
    stage.decisions.discard(run_id, actor="ann", reason="")
    store.mark_told([letter.id, 12345])
    assert runs_of(store) == []
