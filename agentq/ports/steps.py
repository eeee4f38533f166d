"""A step, from message to settle."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from agentq.domain.effects import ToolEffect
from agentq.domain.failures import FailureClass
from agentq.domain.model import Fence, Json, RunMode, RunStatus, Step, StepKind, StepRef
from agentq.domain.outcomes import Recorded, Retried, Stopped
from agentq.domain.pauses import Pause
from agentq.domain.probes import ProbeVerdict
from agentq.ports.dispatch import Wakeup


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """What a step needs to know of its run."""

    id: str
    agent: str
    input: Json
    mode: RunMode
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryItem:
    """One completed step as the next model turn needs it. `result` is the stored JSON text, not yet parsed."""

    kind: StepKind
    call_id: str | None
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An attempt that may run: the step, its run, for a model turn the results so far, and a fence that stands.

    `handed_back_seconds` is how long ago the step was first handed back for want of its agent or tool,
    `throttled_seconds` how long ago a rate limit or an open circuit first held it up; None: never. `loaded_at` is the
    database's time of this reading: whoever looks at the world after it, looked later than that. `run_age_seconds` is
    how long ago the run was enqueued.
    """

    run: RunHead
    step: Step
    loaded_at: datetime
    history: tuple[HistoryItem, ...] = ()
    fence: Fence | None = None
    handed_back_seconds: float | None = None
    throttled_seconds: float | None = None
    run_age_seconds: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRequest:
    """A fence to stamp. `id` is chosen by the caller, so that a lost reply can be asked again."""

    ref: StepRef
    id: str
    owner: str
    tool: str
    effect: ToolEffect
    deadline_seconds: float
    settles_within_seconds: float | None
    is_callable: bool = True
    has_probe: bool = False


class FenceVerdict(StrEnum):
    STAMPED = "stamped"  # It stands and is ours, by this call or by an earlier try of it.
    FENCE_STANDS = "fence_stands"  # Another write is in flight, or unknown.
    MOVED_ON = "moved_on"  # The run ended, is to be cancelled, or another attempt is up.
    PAUSED = "paused"  # A person paused the tool: nothing is stamped, and nothing must be called.


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """One guarded change of a step by whoever holds it. `fence_id` is the caller's own fence, None without one.

    `owner` makes it idempotent: the same settlement sent again is answered ALREADY.
    `with_events=False` gives up the audit events (counted on the run): only for what only reads.
    `probe` is set when the change follows from what a probe said of the call under that fence.
    `suppressed` is how many deliveries of the step came to nothing until now; None: not known, what is stored stays.
    `held_by` had the attempt, None: the owner; `held_seconds` ago it took it, as far as that is known.
    """

    ref: StepRef
    owner: str
    effect: ToolEffect
    change: Recorded | Retried | Stopped
    fence_id: str | None = None
    with_events: bool = True
    probe: "ProbeWord | None" = None
    suppressed: int | None = None
    held_by: str | None = None
    held_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeWord:
    """What a probe said, and two moments between which it looked (database time).

    Finding nothing counts for what was over by the first; finding something for what had been done by the second.
    """

    verdict: ProbeVerdict
    looked_after: datetime
    looked_before: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NextProbe:
    """Ask the probe of the call under that fence again: `wait_seconds` from now, and with `waits_for_fence` not before
    "did not happen" would count. `verdict` is what it said now. `failure_class` and `error`: how the call failed,
    from whoever made it."""

    ref: StepRef
    fence_id: str
    owner: str
    verdict: ProbeVerdict
    wait_seconds: float
    waits_for_fence: bool
    failure_class: FailureClass | None = None
    error: str | None = None


class Verdict(StrEnum):
    APPLIED = "applied"
    ALREADY = "already"  # By an earlier try of the same settlement.
    LATE = "late"  # Applied although the step had moved on: the outcome of a write is never dropped.
    AGREED = "agreed"  # A result is recorded that says the same; noted.
    CONTRADICTED = "contradicted"  # ... that says otherwise; recorded and raised.
    MOVED_ON = "moved_on"  # Nothing was changed, nothing is lost: somebody else has the step, or the run ended.
    REFUSED = "refused"  # A requeue over a plain write's fence without a decision, or after a look that was too early.


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A settle's answer: what became of it, what to wake, and where the run stands now."""

    verdict: Verdict
    wakeups: tuple[Wakeup, ...] = ()
    run_status: RunStatus | None = None


class StepStore(Protocol):
    """What a worker does to a step. Every change locks the run's row first and decides on what it reads after that.

    Every method raises StoreUnavailableError when the database can't be reached or its reply was lost. All changes may
    be sent again after that: they find what they did before.
    """

    def load(self, ref: StepRef) -> Loaded | None:
        """The attempt, if its run is active and it is available and due; None otherwise."""
        ...

    def fence(self, request: FenceRequest) -> FenceVerdict:
        """Stamp `pending_effect`, durably, if the run is active, no cancel is requested, the attempt is up, no fence
        stands and the tool isn't paused. Raises AuditRefusedError when the fence's event can't be stored: then nothing
        is stamped."""
        ...

    def take_back(self, ref: StepRef, fence_id: str, owner: str) -> bool:
        """Clear the caller's own fence because nothing was called; withdraws a dead letter shown over it, carries out
        a cancel that waited for it. The attempt stays and is dispatched again. False: that fence doesn't stand."""
        ...

    def hand_back(self, ref: StepRef, *, due_in_seconds: float, why: str, owner: str = "agentq") -> bool:
        """Make the attempt available again later at no charge: it couldn't be started here. False: it moved on."""
        ...

    def park(self, ref: StepRef) -> bool:
        """The attempt's tool is paused: make it available again later at no charge; the later, the longer the pause
        lasts, and at once when it ends. False: it moved on."""
        ...

    def pauses(self) -> tuple[Pause, ...]:
        """What is paused now."""
        ...

    def ask_again(self, request: NextProbe) -> bool:
        """Make the step due again later, to be delivered as a question to its tool's probe. False: that fence doesn't
        stand over it any more."""
        ...

    def settle(self, settlement: Settlement) -> Settled:
        """Make one guarded change. Raises StoreRefusedError when the database refuses its data (nothing is changed),
        AuditRefusedError when it refuses the event."""
        ...

    def beat(self, ref: StepRef) -> bool:
        """Called now and then during a long attempt: shows a queued run as running. True: a cancel is requested."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOutcome:
    """A write's settlement that the database didn't take, and the name under which it is kept."""

    name: str
    settlement: Settlement


class OutcomeFiles(Protocol):
    """Where the outcome of a performed write waits while the database, or its audit log, doesn't take it."""

    def keep(self, settlement: Settlement) -> None:
        """Durable when it returns. Raises OutcomeNotKeptError."""
        ...

    def pending(self) -> Iterator[KeptOutcome]:
        """What is kept; what can't be read, or isn't ours, is left out."""
        ...

    def forget(self, outcome: KeptOutcome) -> None:
        """The database has it. May be called twice."""
        ...

    def set_aside(self, outcome: KeptOutcome, why: str) -> None:
        """The database has no place for it: it is left for a person, and isn't pending any more."""
        ...
