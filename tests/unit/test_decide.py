"""Deciding about many dead letters: in batches, at a rate, gone on with after an interruption."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from agentq.domain.decisions import Choice, Discarding, Replaying
from agentq.domain.errors import BrokerUnavailableError, DecisionRequiredError
from agentq.domain.model import StepKind, StepRef
from agentq.ports.deciding import Decided, DecisionStore
from agentq.ports.dispatch import Wakeup
from agentq.ports.runs import RunFilter, RunStore
from agentq.services.decide import BATCH_RUNS, decide


@dataclass
class Clock:
    """Time that passes by sleeping alone."""

    now: float = 0.0

    def elapsed_seconds(self) -> float:
        return self.now

    def random(self) -> float:
        return 0.5

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Letters:
    """Open dead letters; those of `blocked` runs need a decision. Replays open a tool's step."""

    open: dict[str, int]
    blocked: frozenset[str] = frozenset()
    batches: list[list[str]] = field(default_factory=list)
    rehearsed: int = 0

    def count_dead_letters(self, filters: RunFilter) -> tuple[int, int]:
        return len(self.open), max(self.open.values(), default=0)

    def page_of_dead_letters(self, filters: RunFilter, *, after: str, number_max: int, limit: int) -> list[str]:
        page = sorted(run_id for run_id, number in self.open.items() if run_id > after and number <= number_max)
        return page[:limit]

    def decide_many(
        self, run_ids: Sequence[str], choice: Choice, *, actor: str, reason: str, is_rehearsal: bool = False
    ) -> list[Decided]:
        self.batches.append(list(run_ids))
        self.rehearsed += is_rehearsal
        decided = []
        for run_id in run_ids:
            if run_id in self.blocked:
                decided.append(Decided(run_id=run_id, refusal=DecisionRequiredError("say what happened")))
                continue
            if not is_rehearsal:
                del self.open[run_id]
            ref = StepRef(run_id=run_id, number=2, attempt=2)
            decided.append(Decided(run_id=run_id, wakeups=(Wakeup(ref=ref, agent="a", kind=StepKind.TOOL),)))
        return decided


@dataclass
class Broker:
    """A queue of tool steps, and the notes of those that were left out of it."""

    queued: int = 0
    left: int = 0
    is_away: bool = False

    def publish(self, wakeups: Sequence[Wakeup]) -> None:
        self.queued += len(wakeups)

    def backlog(self) -> Mapping[StepKind, int]:
        if self.is_away:
            raise BrokerUnavailableError("away")
        return {StepKind.TOOL: self.queued}

    def is_drained(self) -> bool:
        return not self.queued

    def undispatch(self, refs: Sequence[StepRef]) -> None:
        self.left += len(refs)


def letters(count: int, *, blocked: int = 0) -> Letters:
    names = [f"r-{number:05}" for number in range(count)]
    return Letters({name: number for number, name in enumerate(names, 1)}, frozenset(names[:blocked]))


def deciding(
    store: Letters,
    *,
    broker: Broker | None = None,
    clock: Clock | None = None,
    choice: Choice = Replaying(),  # noqa: B008 - frozen
    filters: RunFilter = RunFilter(limit=100_000),  # noqa: B008 - frozen
    is_rehearsal: bool = False,
    runs_per_second: float | None = None,
    backlog_max: int = 10_000,
) -> Iterator[list[Decided]]:
    broker = broker or Broker()
    return decide(
        filters,
        choice,
        actor="ann",
        reason="mended",
        decisions=cast(DecisionStore, store),  # No more of it is asked.
        runs=cast(RunStore, broker),
        dispatcher=broker,
        clock=clock or Clock(),
        backlog_max=backlog_max,
        is_rehearsal=is_rehearsal,
        runs_per_second=runs_per_second,
    )


def test_all_that_match_are_decided_in_batches_in_the_order_of_their_ids() -> None:
    """One order for everybody, and no transaction that holds ten thousand runs."""
    store = letters(BATCH_RUNS + 7, blocked=3)
    decided = [one for batch in deciding(store) for one in batch]
    assert [len(batch) for batch in store.batches] == [BATCH_RUNS, 7]
    assert [one.run_id for one in decided] == sorted(one.run_id for one in decided)
    assert sum(one.refusal is None for one in decided) == BATCH_RUNS + 4
    assert len(store.open) == 3


def test_an_interrupted_bulk_is_gone_on_with_by_the_same_call() -> None:
    """What is done isn't matched again, and what is left is tried again."""
    store = letters(2 * BATCH_RUNS, blocked=2)
    next(deciding(store))
    assert len(store.open) == BATCH_RUNS + 2
    rest = [one for batch in deciding(store) for one in batch]
    assert (len(rest), len(store.open)) == (BATCH_RUNS + 2, 2)


def test_what_stops_again_meanwhile_is_not_replayed_again() -> None:
    """A cause that isn't mended would make the bulk run for ever."""
    store = letters(2 * BATCH_RUNS)
    batches = deciding(store)
    next(batches)
    store.open["r-99999"] = 100_000
    for _ in batches:
        pass
    assert list(store.open) == ["r-99999"]


@pytest.mark.parametrize(("rate", "seconds"), [(50, 4.0), (0.5, 398.0), (1000, 0.0)])
def test_a_rate_is_kept(rate: float, seconds: float) -> None:
    """A service that has just come back isn't to be flooded; each batch is at most a second's runs."""
    clock, store = Clock(), letters(200 if rate == 0.5 else 250)
    for _ in deciding(store, clock=clock, runs_per_second=rate):
        pass
    assert clock.now == pytest.approx(seconds)
    assert max(len(batch) for batch in store.batches) <= max(1, rate)


def test_a_rehearsal_publishes_and_waits_for_nothing() -> None:
    """It tells what would be done, at once."""
    store, broker, clock = letters(250, blocked=1), Broker(), Clock()
    decided = [
        one
        for batch in deciding(store, broker=broker, clock=clock, is_rehearsal=True, runs_per_second=1)
        for one in batch
    ]
    assert (len(decided), len(store.open), broker.queued, clock.now) == (250, 250, 0, 0.0)
    assert store.rehearsed == len(store.batches)


@pytest.mark.parametrize(("is_away", "queued", "left"), [(False, 30, 220), (True, 0, 250)])
def test_the_brokers_queue_stays_within_its_limit(is_away: bool, queued: int, left: int) -> None:
    """Ten thousand runs again are ten thousand rows; the keeper feeds the rest."""
    broker = Broker(is_away=is_away)
    for _ in deciding(letters(250), broker=broker, backlog_max=30):
        pass
    assert (broker.queued, broker.left) == (queued, left)


def test_a_limit_ends_it() -> None:
    """A few first, to see whether the cause is mended."""
    store = letters(50)
    assert [len(batch) for batch in deciding(store, filters=RunFilter(limit=5), choice=Discarding())] == [5]
