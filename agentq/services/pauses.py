"""What is paused, as a process remembers it for a moment: reads ask here; writes are stopped by their fence."""

from agentq.domain.pauses import Pause, pause_of
from agentq.ports.steps import StepStore
from agentq.ports.world import Clock

REMEMBERED_SECONDS = 1.0  # How late a read may notice a pause, or its end.


class PauseBoard:
    """Asks the store when what it remembers is old; safe to share between threads, which may both ask."""

    def __init__(self, store: StepStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._pauses: tuple[Pause, ...] = ()
        self._asked_at: float | None = None

    def stops(self, *, agent: str, tool: str, is_write: bool) -> bool:
        """Such a call has to wait. Raises StoreUnavailableError."""
        now = self._clock.elapsed_seconds()
        if self._asked_at is None or now - self._asked_at >= REMEMBERED_SECONDS:
            self._pauses = self._store.pauses()
            self._asked_at = now
        return pause_of(self._pauses, agent=agent, tool=tool, is_write=is_write) is not None
