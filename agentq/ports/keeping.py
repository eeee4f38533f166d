"""What the keeper reads, and the marks it leaves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentq.domain.model import Fence, StepRef
from agentq.ports.dispatch import Wakeup


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A step that was dispatched and has no result yet, as the reaper judges it."""

    wakeup: Wakeup
    crashes: int
    dispatched_seconds: float
    republished: int
    is_cancelled: bool
    fence: Fence | None
    fence_is_past_deadline: bool = False
    fence_is_settled: bool = False  # Past `settles_within` too; False where the tool doesn't declare it.
    run_age_seconds: float = math.inf  # How long ago its run was enqueued.


class KeeperStore(Protocol):
    """What the keeper reads, and the marks it leaves. Its verdicts go through `StepStore.settle` like a worker's."""

    def take_due(self, limit: int, *, first_steps: bool) -> list[Wakeup]:
        """Up to `limit` available steps that are due and not dispatched, oldest first, marked as dispatched now: the
        first steps of new runs (number 1, attempt 1), or all others."""
        ...

    def in_flight(self, *, after: StepRef | None, limit: int) -> list[InFlight]:
        """Dispatched, available steps of active runs in queued mode, and those under a fence of such a run, ordered by
        run id and number, after the given one."""
        ...

    def mark_republished(self, refs: Sequence[StepRef]) -> list[StepRef]:
        """Those that are still available at that attempt, marked as dispatched now, once more."""
        ...

    def ask_probe(self, ref: StepRef, fence_id: str) -> Wakeup | None:
        """Count one more question to the probe of the call under that fence, and mark the step as dispatched: its next
        delivery asks. None: the attempt or the fence is another one."""
        ...

    def runs_without_open_step(self, limit: int) -> list[str]:
        """Active runs that have no available step."""
        ...

    def resume(self, run_id: str) -> tuple[Wakeup, ...]:
        """Compute anew what comes next in such a run, and open it (or end the run): the wake-ups to publish."""
        ...

    def interactive_runs(self) -> list[tuple[StepRef, Fence | None, bool]]:
        """Active interactive runs: their open step (number 0: none), fence, and whether that is past its deadline."""
        ...

    def fail_interactive(self, run_id: str, *, error: str) -> bool:
        """The caller is lost: FAILED; a standing fence is listed like a dead letter. False: it has ended."""
        ...

    def see_agents(self, agents: Mapping[str, int]) -> None:
        """A worker that serves these (name: input_bytes_max) is alive now; registers those that are new."""
        ...
