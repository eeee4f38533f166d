"""The right to execute one attempt, and what a worker tells the keeper."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from agentq.domain.model import StepRef


class LeaseAnswer(StrEnum):
    HELD = "held"  # It is ours now.
    HELD_BY_OTHER = "held_by_other"
    ALREADY_STARTED = "already_started"  # This attempt, or a newer one, was started and not released.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many deliveries of a step came to nothing: they found it held, started or over. All of the last
    `counted_seconds` are in it; those before may be missing, because a flush or a restart forgets them."""

    suppressed: int
    counted_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """`tally`: as it was then, a refused delivery included."""

    answer: LeaseAnswer
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """What Redis knows of a step: who holds it, and which attempt was started and never released, by whom and how long
    ago; how many of its deliveries came to nothing."""

    owner: str | None
    started_attempt: int | None
    started_by: str | None = field(default=None, compare=False)
    started_seconds: float | None = field(default=None, compare=False)
    suppressed: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSurvey:
    """`is_trustworthy` False: Redis was flushed or restarted less than a lease time ago; judge nothing by it.
    `counted_seconds`: for so long every delivery that came to nothing was counted."""

    is_trustworthy: bool
    views: tuple[LeaseView, ...]
    counted_seconds: float = 0.0


class Leases(Protocol):
    """The right to execute one attempt for a while. Every method raises LeasesUnavailableError when Redis is away."""

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> Acquired:
        """An attempt starts once: leaves a mark that outlives the lease and is taken off by `release` alone. Takes over
        the lease of a lower attempt. Counts the delivery that it refuses."""
        ...

    def renew(self, ref: StepRef, owner: str, seconds: float) -> Tally | None:
        """Hold on for at least `seconds` from now. A missing lease is taken again, unless a newer attempt was started.
        None: lost."""
        ...

    def release(self, ref: StepRef, owner: str, *, is_suppressed: bool = False) -> None:
        """Give lease and mark back, if they are the owner's. `is_suppressed`: the delivery found nothing to do; it is
        counted."""
        ...

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey: ...

    def unmark(self, ref: StepRef) -> bool:
        """Let this attempt start again: take off its mark, if it has one and nobody holds the lease. Only under a
        standing fence, where no delivery makes a call. False: it is held, or another attempt was started."""
        ...

    def bury(self, ref: StepRef, process: str) -> bool:
        """Drop the lease if its owner is of that dead process (a prefix of the owner); its mark stays."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathNote:
    """A pool child died (or was killed for its time limit) over this attempt, as its parent saw."""

    ref: StepRef
    process: str


class Nudges(Protocol):
    """How a worker wakes the keeper before its interval is over. Losing one costs an interval."""

    def leave_note(self, note: DeathNote) -> None: ...

    def nudge(self) -> None: ...

    def wait(self, seconds: float) -> list[DeathNote]:
        """Return at the first nudge or note, or after `seconds`: the notes left since the last call."""
        ...

    def lead(self, owner: str, seconds: float) -> bool:
        """Be, or stay, the leading keeper for `seconds`. False: another one is."""
        ...

    def lead_telling(self, owner: str, seconds: float) -> bool:
        """The same among the keepers that can tell people of dead letters: the leading one may not know how."""
        ...
