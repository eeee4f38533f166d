"""Leases in memory: the same contract for tests and for runs that no other process can touch."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentq.domain.model import StepRef
from agentq.ports.leases import LeaseAnswer, LeaseSurvey, LeaseView


@dataclass(slots=True)
class _Held:
    attempt: int
    held_until: float
    owner: str


class MemoryLeases:
    """`ports.Leases` of one process; marks are kept for as long as it lives."""

    def __init__(self, *, lease_seconds: float = 15.0, elapsed_seconds: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds = lease_seconds
        self._elapsed_seconds = elapsed_seconds
        self._held: dict[tuple[str, int], _Held] = {}
        self._since: float | None = None
        self._lock = threading.Lock()

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> LeaseAnswer:
        with self._lock:
            held, now = self._held.get(_key(ref)), self._elapsed_seconds()
            if held and held.attempt >= ref.attempt:
                return LeaseAnswer.HELD_BY_OTHER if held.held_until > now else LeaseAnswer.ALREADY_STARTED
            self._held[_key(ref)] = _Held(ref.attempt, now + seconds, owner)
            return LeaseAnswer.HELD

    def renew(self, ref: StepRef, owner: str, seconds: float) -> bool:
        with self._lock:
            held, now = self._held.get(_key(ref)), self._elapsed_seconds()
            hold_until = now + seconds
            if held and held.owner == owner:
                hold_until = max(hold_until, held.held_until)
            elif held and (held.held_until > now or held.attempt > ref.attempt):
                return False
            self._held[_key(ref)] = _Held(ref.attempt, hold_until, owner)
            return True

    def release(self, ref: StepRef, owner: str) -> None:
        with self._lock:
            held = self._held.get(_key(ref))
            if held and held.owner == owner:
                del self._held[_key(ref)]

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey:
        with self._lock:
            now = self._elapsed_seconds()
            if self._since is None:
                self._since = now
            return LeaseSurvey(
                is_trustworthy=now - self._since > self._lease_seconds,
                views=tuple(_view(self._held.get(_key(ref)), now) for ref in refs),
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
            self._since = None


def _key(ref: StepRef) -> tuple[str, int]:
    return ref.run_id, ref.number


def _view(held: _Held | None, now: float) -> LeaseView:
    if held is None:
        return LeaseView(owner=None, started_attempt=None)
    return LeaseView(owner=held.owner if held.held_until > now else None, started_attempt=held.attempt)
