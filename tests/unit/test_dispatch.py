"""Feeding the broker: retries at once, new runs as there is room, and nothing lost when it is away."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from agentq.domain.errors import BrokerUnavailableError
from agentq.domain.model import StepKind, StepRef
from agentq.ports.dispatch import Wakeup
from agentq.ports.keeping import KeeperStore
from agentq.ports.runs import RunStore
from agentq.services.dispatch import BATCH_MAX, dispatch
from tests.support.fakes import RecordingDispatcher


def wakeups(prefix: str, count: int) -> list[Wakeup]:
    refs = (StepRef(run_id=f"{prefix}-{number}", number=1, attempt=1) for number in range(count))
    return [Wakeup(ref=ref, agent="support", kind=StepKind.MODEL) for ref in refs]


class FakeRows:
    """The due steps of a store: first ones and others; what is taken counts as dispatched until it is given back."""

    def __init__(self, *, first: int = 0, others: int = 0) -> None:
        self.first, self.others = wakeups("first", first), wakeups("other", others)
        self.undispatched: list[StepRef] = []

    def take_due(self, limit: int, *, first_steps: bool) -> list[Wakeup]:
        rows = self.first if first_steps else self.others
        taken, rows[:] = rows[:limit], rows[limit:]
        return taken

    def undispatch(self, refs: Sequence[StepRef]) -> None:
        self.undispatched += refs

    def dispatch(self, broker: RecordingDispatcher, backlog_max: int = 100) -> int:
        rows: Any = self
        return dispatch(cast(KeeperStore, rows), cast(RunStore, rows), broker, backlog_max=backlog_max)


def test_what_is_due_is_published() -> None:
    """Retries before new runs: they have waited longer."""
    rows, broker = FakeRows(first=2, others=1), RecordingDispatcher()
    assert rows.dispatch(broker) == 3
    assert [wakeup.ref.run_id for wakeup in broker.published] == ["other-0", "first-0", "first-1"]


@pytest.mark.parametrize(("waiting", "published"), [(0, 10), (7, 3), (10, 0), (99, 0)])
def test_new_runs_fill_only_the_room_that_is_left(waiting: int, published: int) -> None:
    """A million queued runs are a million rows, not a million messages."""
    rows, broker = FakeRows(first=50), RecordingDispatcher(backlog=waiting)
    assert rows.dispatch(broker, backlog_max=10) == published
    assert len(rows.first) == 50 - published, "the others stay rows"


def test_running_runs_go_on_whatever_waits() -> None:
    """A step that is due again isn't kept behind new work."""
    rows, broker = FakeRows(first=1, others=3), RecordingDispatcher(backlog=999)
    assert rows.dispatch(broker) == 3


def test_a_pass_has_a_size() -> None:
    """So that reaping has its turn."""
    rows, broker = FakeRows(first=2 * BATCH_MAX), RecordingDispatcher()
    assert rows.dispatch(broker, backlog_max=10 * BATCH_MAX) == BATCH_MAX


def test_what_a_broker_does_not_take_stays_due() -> None:
    """Nothing is marked as sent that wasn't."""
    rows, broker = FakeRows(others=2), RecordingDispatcher()
    broker.is_away = True
    with pytest.raises(BrokerUnavailableError):
        rows.dispatch(broker)
    assert [ref.run_id for ref in rows.undispatched] == ["other-0", "other-1"]


def test_a_broker_that_is_away_takes_no_new_runs_from_their_rows() -> None:
    """It is asked for its backlog first."""
    rows, broker = FakeRows(first=2), RecordingDispatcher()
    broker.is_away = True
    with pytest.raises(BrokerUnavailableError):
        rows.dispatch(broker)
    assert len(rows.first) == 2
