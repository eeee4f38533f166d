"""Leases in memory: the same contract for tests and for runs that no other process can touch."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentq.domain.model import StepRef
from agentq.ports.leases import Acquired, LeaseAnswer, LeaseSurvey, LeaseView, Tally


@dataclass(slots=True)
class _Held:
    attempt: int
    held_until: float
    started: float | None
    owner: str


class MemoryLeases:
    """`ports.Leases` of one process; marks are kept for as long as it lives."""

    def __init__(self, *, lease_seconds: float = 15.0, elapsed_seconds: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds = lease_seconds
        self._elapsed_seconds = elapsed_seconds
        self._held: dict[tuple[str, int], _Held] = {}
        self._suppressed: Counter[tuple[str, int]] = Counter()
        self._since: float | None = None
        self._lock = threading.Lock()

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> Acquired:
        with self._lock:
            held, now = self._held.get(_key(ref)), self._elapsed_seconds()
            if held and held.attempt >= ref.attempt:
                self._suppressed[_key(ref)] += 1
                answer = LeaseAnswer.HELD_BY_OTHER if held.held_until > now else LeaseAnswer.ALREADY_STARTED
                return Acquired(answer=answer, tally=self._tally(ref))
            self._held[_key(ref)] = _Held(ref.attempt, now + seconds, now, owner)
            return Acquired(answer=LeaseAnswer.HELD, tally=self._tally(ref))

    def renew(self, ref: StepRef, owner: str, seconds: float) -> Tally | None:
        with self._lock:
            held, now = self._held.get(_key(ref)), self._elapsed_seconds()
            hold_until, started = now + seconds, None
            if held and held.owner == owner:
                hold_until, started = max(hold_until, held.held_until), held.started
            elif held and (held.held_until > now or held.attempt > ref.attempt):
                return None
            self._held[_key(ref)] = _Held(ref.attempt, hold_until, started, owner)
            return self._tally(ref)

    def release(self, ref: StepRef, owner: str, *, is_suppressed: bool = False) -> None:
        with self._lock:
            held = self._held.get(_key(ref))
            if held and held.owner == owner:
                del self._held[_key(ref)]
            self._suppressed[_key(ref)] += is_suppressed

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey:
        with self._lock:
            now = self._elapsed_seconds()
            if self._since is None:
                self._since = now
            return LeaseSurvey(
                is_trustworthy=now - self._since > self._lease_seconds,
                views=tuple(_view(self._held.get(_key(ref)), self._suppressed[_key(ref)], now) for ref in refs),
                counted_seconds=now - self._since,
            )

    def unmark(self, ref: StepRef) -> bool:
        with self._lock:
            held = self._held.get(_key(ref))
            if held and (held.held_until > self._elapsed_seconds() or held.attempt != ref.attempt):
                return False
            self._held.pop(_key(ref), None)
            return True

    def bury(self, ref: StepRef, process: str) -> bool:
        with self._lock:
            held = self._held.get(_key(ref))
            if held is None or not held.owner.startswith(process):
                return False
            held.held_until = float("-inf")
            return True

    def flush(self) -> None:
        """Forget everything, as a Redis may at any moment."""
        with self._lock:
            self._held.clear()
            self._suppressed.clear()
            self._since = None

    def _tally(self, ref: StepRef) -> Tally:
        counted_seconds = 0.0 if self._since is None else self._elapsed_seconds() - self._since
        return Tally(suppressed=self._suppressed[_key(ref)], counted_seconds=counted_seconds)


def _key(ref: StepRef) -> tuple[str, int]:
    return ref.run_id, ref.number


def _view(held: _Held | None, suppressed: int, now: float) -> LeaseView:
    if held is None:
        return LeaseView(owner=None, started_attempt=None, suppressed=suppressed)
    return LeaseView(
        owner=held.owner if held.held_until > now else None,
        started_attempt=held.attempt,
        started_by=held.owner,
        started_seconds=None if held.started is None else now - held.started,
        suppressed=suppressed,
    )
