"""A purge's batches: what age it refuses, how far it comes, and when it rests."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from agentq.domain.errors import InvalidInputError
from agentq.ports.purging import Place, PurgedBatch
from agentq.services.purge import REST_SECONDS_MIN, purge
from tests.support.fakes import FakeClock

NOW = datetime(2026, 1, 31, tzinfo=UTC)
BATCH_SECONDS = 0.5


class ListedRuns:
    """A store with runs that were told to it; each batch takes its time."""

    def __init__(self, clock: FakeClock, run_ids: Sequence[str], *, excludes_writers: bool) -> None:
        self.excludes_writers = excludes_writers
        self.asked: list[tuple[datetime, str | None]] = []
        self._clock = clock
        self._left = list(run_ids)

    def time_before(self, age: timedelta) -> datetime:
        return NOW - age

    def purge(
        self,
        *,
        finished_before: datetime,
        after: Place | None,
        runs_max: int,
        with_contradictions: bool,
        actor: str,
        is_rehearsal: bool,
    ) -> PurgedBatch:
        self.asked.append((finished_before, None if after is None else after.run_id))
        self._clock.now += BATCH_SECONDS
        batch, self._left = self._left[:runs_max], self._left[runs_max:]
        place = Place(finished_at=NOW, run_id=batch[-1]) if self._left else None
        return PurgedBatch(run_ids=tuple(batch), place=place)


def purged(
    run_ids: str,
    *,
    older_than: timedelta = timedelta(days=30),
    visibility_timeout: timedelta = timedelta(hours=1),
    batch_runs: int = 2,
    excludes_writers: bool = False,
    is_rehearsal: bool = False,
) -> tuple[ListedRuns, list[float], str]:
    """The store, how long it rested, and the runs that went."""
    clock = FakeClock()
    store = ListedRuns(clock, run_ids, excludes_writers=excludes_writers)
    batches = purge(
        store,
        older_than=older_than,
        visibility_timeout=visibility_timeout,
        clock=clock,
        actor="ann",
        batch_runs=batch_runs,
        is_rehearsal=is_rehearsal,
    )
    gone = "".join(run_id for batch in batches for run_id in batch.run_ids)
    return store, clock.slept, gone


def test_each_batch_begins_where_the_last_one_ended() -> None:
    """And all look for runs that finished before one moment, or a slow purge would take younger and younger ones."""
    store, slept, gone = purged("abcde")
    moment = NOW - timedelta(days=30)
    assert store.asked == [(moment, None), (moment, "b"), (moment, "d")]
    assert (gone, slept) == ("abcde", [])


def test_it_rests_where_nobody_else_can_write() -> None:
    """Whoever waits for SQLite's lock looks again now and then: a purge that takes it at once starves them all."""
    _, slept, gone = purged("abcde", excludes_writers=True)
    assert (gone, slept) == ("abcde", [BATCH_SECONDS] * 2)
    assert min(slept) >= REST_SECONDS_MIN
    _, slept, _ = purged("abcde", excludes_writers=True, is_rehearsal=True)
    assert slept == []


@pytest.mark.parametrize(
    ("older_than", "visibility_timeout", "says"),
    [
        (timedelta(0), timedelta(hours=1), "older_than is 0s; it takes 2h or more"),
        (timedelta(minutes=119), timedelta(hours=1), "it takes 2h or more"),
        (timedelta(hours=3), timedelta(hours=2), "it takes 4h or more"),
        (timedelta(minutes=59), timedelta(minutes=1), "it takes 1h or more"),
    ],
)
def test_what_a_message_may_still_ask_for_is_kept(
    older_than: timedelta, visibility_timeout: timedelta, says: str
) -> None:
    """A request that the broker delivers again finds its run by its key; without that it would start it once more."""
    with pytest.raises(InvalidInputError, match=says):
        purged("a", older_than=older_than, visibility_timeout=visibility_timeout)


@pytest.mark.parametrize("batch_runs", [0, -1, 5001])
def test_a_batch_has_limits(batch_runs: int) -> None:
    """One transaction over everything would hold back whoever cleans up behind it, and lose all when it breaks."""
    with pytest.raises(InvalidInputError, match="a whole number from 1 to 5000"):
        purged("a", batch_runs=batch_runs)
