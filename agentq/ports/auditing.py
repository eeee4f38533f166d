"""Reading the audit log, to prove it and to take it elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from agentq.domain.audit import AuditedRun
from agentq.domain.seals import LoggedEvent, Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditScope:
    """Which runs: these, or those created in that time (`until` excluded), or all. Times are UTC."""

    run_ids: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    @property
    def is_everything(self) -> bool:
        return not self.run_ids and self.since is None and self.until is None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Some runs with what the log tells of them, all as at one moment. `unreadable` are the ids of those with a row
    that can't be read. `strays` are ids that the log tells of, without a run; looked for only when the scope is
    everything."""

    runs: tuple[AuditedRun, ...]
    unreadable: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()


class AuditStore(Protocol):
    """Only reads."""

    def pages(self, scope: AuditScope) -> Iterator[AuditPage]:
        """Each run of the scope once; no page holds many more events than the largest run has.

        Raises NotFoundError, before the first page, for an id that is no run's."""
        ...

    def deployment_events(self) -> Sequence[LoggedEvent] | None:
        """What was done to the deployment rather than to a run, in order. None: it can't be read."""
        ...

    def entries(self, since: datetime | None, until: datetime | None) -> Iterator[LoggedEvent | Seal]:
        """All events and seals of that time (`until` excluded), as at one moment, by time, run id and sequence; a seal
        follows its last event. Read as they are asked for. Raises UnreadableLogError at one that can't be read."""
        ...
