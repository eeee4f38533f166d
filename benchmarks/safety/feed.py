"""Hands runs to a system as fast as it starts them, so that a run that waits was interrupted, not in a queue."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from benchmarks.safety.world import unseen_of

WAITING_MAX = 4  # Runs that the world hasn't heard of: enough to keep workers busy, too few for a queue.
WAITING_SECONDS_MAX = 10.0  # A run that waits for longer was interrupted before its first step.
POLL_SECONDS = 0.05


class Feeder:
    """From a thread of its own; `is_done` once all runs were handed over."""

    def __init__(self, run_ids: Sequence[str], enqueue: Callable[[Sequence[str]], None], world_url: str) -> None:
        self._left = deque(run_ids)
        self._enqueue = enqueue
        self._world_url = world_url
        self._waiting: dict[str, float] = {}
        self._allowed = 0
        self._stop = Event()
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Raises what handing over raised."""
        if self._error is not None:
            raise self._error
        return not self._left

    def allow(self, runs: int) -> None:
        """So many more may be handed over: the work must last for as long as the kills."""
        self._allowed += runs

    @contextmanager
    def feeding(self) -> Iterator[None]:
        thread = Thread(target=self._feed)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _feed(self) -> None:
        try:
            while self._left and not self._stop.is_set():
                self._hand_over(min(self._room(), self._allowed, len(self._left)))
                self._stop.wait(POLL_SECONDS)
        except Exception as error:
            self._error = error

    def _room(self) -> int:
        unseen = unseen_of(self._world_url, list(self._waiting))
        oldest = time.monotonic() - WAITING_SECONDS_MAX
        self._waiting = {
            run_id: since for run_id, since in self._waiting.items() if run_id in unseen and since > oldest
        }
        return WAITING_MAX - len(self._waiting)

    def _hand_over(self, count: int) -> None:
        if count > 0:
            batch = [self._left[index] for index in range(count)]
            self._enqueue(batch)
            for run_id in batch:
                self._left.popleft()
                self._waiting[run_id] = time.monotonic()
            self._allowed -= count
