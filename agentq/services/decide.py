"""Decide about many dead letters at once: in batches, at a rate, and so that it can be broken off and gone on with."""

from collections.abc import Iterator

from agentq.domain.decisions import Choice
from agentq.ports.deciding import Decided, DecisionStore
from agentq.ports.dispatch import Dispatcher
from agentq.ports.runs import RunFilter, RunStore
from agentq.ports.world import Clock
from agentq.services.publish import publish_within

BATCH_RUNS = 500  # Runs of one transaction: what a replay of them takes is far below the time others wait for a lock.


def decide(
    filters: RunFilter,
    choice: Choice,
    *,
    actor: str,
    reason: str,
    decisions: DecisionStore,
    runs: RunStore,
    dispatcher: Dispatcher,
    clock: Clock,
    backlog_max: int,
    is_rehearsal: bool = False,
    runs_per_second: float | None = None,
) -> Iterator[list[Decided]]:
    """Decide about every dead letter that matches and is open now, oldest run first; yields what became of each batch.

    A batch is one transaction. Broken off between two, or by an error, what is done is done, and isn't matched when it
    is called again: it goes on with the rest. What stops again meanwhile isn't matched in this call either. Replayed
    steps are published as long as their queue is shorter than `backlog_max`; the keeper sees to the others. A rehearsal
    does everything but keep and publish it.
    """
    _, number_max = decisions.count_dead_letters(filters)
    pace = _Pace(clock, runs_per_second)
    after, left = "", filters.limit
    while left > 0:
        page = decisions.page_of_dead_letters(
            filters, after=after, number_max=number_max, limit=min(pace.batch_runs, left)
        )
        if not page:
            return
        after, left = page[-1], left - len(page)
        if not is_rehearsal:
            pace.wait()
        decided = decisions.decide_many(page, choice, actor=actor, reason=reason, is_rehearsal=is_rehearsal)
        if not is_rehearsal:
            wakeups = [wakeup for one in decided for wakeup in one.wakeups]
            publish_within(wakeups, runs=runs, dispatcher=dispatcher, backlog_max=backlog_max)
        pace.note(len(decided))
        yield decided


class _Pace:
    """Keeps to so many runs a second from its first batch on, in batches of at most one second's runs."""

    def __init__(self, clock: Clock, runs_per_second: float | None) -> None:
        self._clock = clock
        self._runs_per_second = runs_per_second
        self._began = clock.elapsed_seconds()
        self._runs = 0

    @property
    def batch_runs(self) -> int:
        return BATCH_RUNS if self._runs_per_second is None else max(1, min(BATCH_RUNS, int(self._runs_per_second)))

    def wait(self) -> None:
        if self._runs_per_second is None:
            return
        ahead_seconds = self._runs / self._runs_per_second - (self._clock.elapsed_seconds() - self._began)
        if ahead_seconds > 0:
            self._clock.sleep(ahead_seconds)

    def note(self, runs: int) -> None:
        self._runs += runs
