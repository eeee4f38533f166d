"""Starting, reading and cancelling runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, Event, Json, Run, RunMode, RunStatus, StepRef
from agentq.ports.dispatch import Wakeup


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to be. `error` makes it a refused one: a row that is FAILED with its reason, and never runs."""

    id: str
    agent: str
    input: Json
    mode: RunMode = RunMode.QUEUED
    idempotency_key: str | None = None
    metadata: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """`is_new` False: the idempotency key had that run before, with the same agent and input. `wakeup` is its first
    step to publish, marked as dispatched already."""

    run_id: str
    is_new: bool
    wakeup: Wakeup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAgent:
    """An agent as workers registered it. `seen_seconds` is how long ago a worker that serves it was last alive."""

    name: str
    input_bytes_max: int
    seen_seconds: float


class RunStore(Protocol):
    """Starting, reading and cancelling runs."""

    def add(self, runs: Sequence[NewRun]) -> list[Added]:
        """Store all runs, each with its first step, in one transaction, in the order given.

        Raises IdempotencyConflictError (nothing is stored) when a key, or a run id, has another agent or input."""
        ...

    def undispatch(self, refs: Sequence[StepRef]) -> None:
        """These steps were not published after all: the dispatcher will see to them."""
        ...

    def agents(self) -> dict[str, ServedAgent]: ...

    def run(self, run_id: str) -> Run:
        """The run with its steps and its open dead letter. Raises NotFoundError."""
        ...

    def status(self, run_id: str) -> RunStatus:
        """Raises NotFoundError."""
        ...

    def run_by_key(self, idempotency_key: str) -> Run:
        """Raises NotFoundError."""
        ...

    def runs(self, filters: "RunFilter") -> list[Run]:
        """Newest first, without steps."""
        ...

    def events(self, run_id: str, after: int = 0) -> list[Event]: ...

    def cancel(self, run_id: str, *, actor: str, reason: str) -> RunStatus:
        """No fence: cancelled now, open steps closed with it. A fence: cancelled when that has ended. The status after.
        Cancelling an ended run changes nothing and returns its status."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """The one filter grammar of CLI, client and API. None: any. Times are UTC."""

    statuses: tuple[RunStatus, ...] = ()
    agent: str | None = None
    tool: str | None = None
    reason: DeadLetterReason | None = None
    failure_class: FailureClass | None = None
    fingerprint: str | None = None
    outcome_unknown: bool | None = None
    since: datetime | None = None
    until: datetime | None = None
    metadata: Mapping[str, str] | None = None
    limit: int = 100
