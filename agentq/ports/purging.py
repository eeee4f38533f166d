"""What a purge asks of the store: old runs go for good, whole ones, a batch at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol


class Kept(StrEnum):
    """Why a run stays, however old it is."""

    FENCE = "a write in doubt"
    DEAD_LETTER = "an open dead letter"
    CONTRADICTION = "a contradiction"
    IN_USE = "in use"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far a purge has come: runs are looked at by the time they finished at, then by id."""

    finished_at: datetime
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgedBatch:
    """What became of the runs of one batch. `place` is where the next one begins; None: this was the last."""

    run_ids: tuple[str, ...] = ()
    kept: Mapping[Kept, int] = field(default_factory=dict)
    place: Place | None = None


class PurgeStore(Protocol):
    """Deletes finished runs with all that they own."""

    @property
    def excludes_writers(self) -> bool:
        """Nobody else can write while a batch is deleted."""
        ...

    def time_before(self, age: timedelta) -> datetime:
        """The time that long ago, by the database's clock."""
        ...

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
        """Delete up to `runs_max` runs that finished before then, those behind `after`, oldest first, in one
        transaction. Never a run over which a fence stands, with an open dead letter, or that somebody changes right
        now; one with a contradiction only if asked to.

        A rehearsal looks in the same way, and deletes nothing."""
        ...
