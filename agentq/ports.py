"""What the core asks of the world: Protocols that speak in transitions, and the data they take and give."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from agentq.domain.decisions import Choice as Choice
from agentq.domain.decisions import Discarding as Discarding
from agentq.domain.decisions import Replaying as Replaying
from agentq.domain.decisions import Ruling as Ruling
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import AgentqError
from agentq.domain.failures import FailureClass
from agentq.domain.model import (
    DeadLetter,
    DeadLetterGroup,
    DeadLetterReason,
    Event,
    Fence,
    Json,
    ModelReply,
    Run,
    RunMode,
    RunStatus,
    Step,
    StepKind,
    StepRef,
)
from agentq.domain.outcomes import Recorded, Retried, Stopped
from agentq.domain.pauses import Pause
from agentq.domain.probes import ProbeVerdict
from agentq.domain.replay import Copying, ReplayPlan

# --- A step, from message to settle ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wakeup:
    """What a dispatcher needs to publish a step: ids for the message, the rest to route it and to name it in Flower."""

    ref: StepRef
    agent: str
    kind: StepKind
    tool: str | None = None
    effect: ToolEffect = ToolEffect.READ_ONLY
    deadline_seconds: float | None = None
    is_isolated: bool = False


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
    database's time of this reading: whoever looks at the world after it, looked later than that.
    """

    run: RunHead
    step: Step
    loaded_at: datetime
    history: tuple[HistoryItem, ...] = ()
    fence: Fence | None = None
    handed_back_seconds: float | None = None
    throttled_seconds: float | None = None


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
    """

    ref: StepRef
    owner: str
    effect: ToolEffect
    change: Recorded | Retried | Stopped
    fence_id: str | None = None
    with_events: bool = True
    probe: "ProbeWord | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeWord:
    """What a probe said, and a moment before it looked (database time)."""

    verdict: ProbeVerdict
    looked_at: datetime

    def is_early_for(self, fence: Fence) -> bool:
        """True: a look then doesn't tell whether a call that left no trace may still take effect."""
        return fence.settled_at is None or self.looked_at <= fence.settled_at


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

    def hand_back(self, ref: StepRef, *, due_in_seconds: float, why: str) -> bool:
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


# --- Enqueueing -----------------------------------------------------------------------------------------------------


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


# --- Keeping --------------------------------------------------------------------------------------------------------


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


# --- Pausing --------------------------------------------------------------------------------------------------------


class PauseStore(Protocol):
    """Tools that people switch off for a while. Each change is in the audit log."""

    def pauses(self) -> tuple[Pause, ...]: ...

    def pause(self, tool: str | None, agent: str | None, *, reads: bool, actor: str, reason: str) -> Pause:
        """From when it returns, no write of that tool (for that agent) begins: every fence that is stamped later is
        refused. Writes that are in flight go on. Pausing it again changes reads and reason."""
        ...

    def resume(self, tool: str | None, agent: str | None, *, actor: str, reason: str) -> int:
        """End that pause and make the steps that waited for it due: how many. Raises NotFoundError."""
        ...

    def writes_in_flight(self, tool: str | None, agent: str | None) -> int:
        """How many fences stand over calls of that tool (for that agent) in runs that are active."""
        ...

    def tools_seen(self) -> set[str]:
        """The tools of steps that are open now, and of open dead letters."""
        ...


# --- Deciding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What became of one run among many that were decided about. `refusal` says why nothing was changed."""

    run_id: str
    refusal: AgentqError | None = None
    wakeups: tuple[Wakeup, ...] = ()


class DecisionStore(Protocol):
    """Dead letters, and what people decide about them. Every decision is audited, refused ones too."""

    def dead_letters(self, filters: RunFilter) -> list[DeadLetter]:
        """Open ones, those with a contradiction first, then newest first."""
        ...

    def dead_letter_groups(self, filters: RunFilter) -> list[DeadLetterGroup]:
        """Open ones by what they have in common; those with a contradiction first, then the largest."""
        ...

    def count_dead_letters(self, filters: RunFilter) -> tuple[int, int]:
        """How many are open that match, and the highest number of any that is."""
        ...

    def page_of_dead_letters(self, filters: RunFilter, *, after: str, number_max: int, limit: int) -> list[str]:
        """The next runs behind run id `after` whose open one matches, in order; none that came after that number."""
        ...

    def resolve(self, run_id: str, ruling: Ruling, *, actor: str, reason: str) -> Step:
        """Record what became of the unknown write; the run stays failed until it is replayed.

        Raises NotFoundError, AlreadyDecidedError (no write is in doubt), TooEarlyError."""
        ...

    def discard(self, run_id: str, *, actor: str, reason: str) -> RunStatus:
        """Give the run up: it leaves the list for good; an unknown write stays unknown. The status after: a run that
        was to be cancelled is cancelled, every other one stays failed.

        Raises NotFoundError, AlreadyDecidedError, RefusedError (no dead letter)."""
        ...

    def replay_plan(self, run_id: str, copying: Copying | None = None) -> ReplayPlan:
        """What `replay`, or `copy`, would do now. Raises NotFoundError; InvalidInputError for a step that isn't there
        or begins nothing, or a write that can't be repeated."""
        ...

    def replay(
        self, run_id: str, *, actor: str, reason: str, ruling: Ruling | None = None, digest: str | None = None
    ) -> tuple[Wakeup, ...]:
        """Run a failed run again from where it stopped: recorded results stay, the failed step and those that its end
        closed are opened with new budgets. With a `ruling` the unknown write is resolved first, in the same
        transaction; what was resolved stays so when the replay is refused then.

        Raises NotFoundError, DecisionRequiredError, AlreadyDecidedError, RefusedError (cancelled), StalePlanError (the
        plan has another digest now), and with a ruling what `resolve` raises."""
        ...

    def copy(
        self, run_id: str, new_run_id: str, copying: Copying, *, actor: str, reason: str, digest: str | None = None
    ) -> tuple[Wakeup, ...]:
        """Start a new run with the recorded results before a step of an ended run, which stays as it was. A second copy
        needs the digest of a plan, which shows the first.

        Raises NotFoundError, InvalidInputError (no such step, or none that begins a turn or batch), RefusedError (a
        write would be made again that isn't accepted), AlreadyDecidedError, StalePlanError."""
        ...

    def decide_many(
        self, run_ids: Sequence[str], choice: Choice, *, actor: str, reason: str, is_rehearsal: bool = False
    ) -> list[Decided]:
        """Decide about several runs in one transaction, each as if it were alone; in the order of their ids.

        A rehearsal does all of it and takes it back."""
        ...


# --- Leases ---------------------------------------------------------------------------------------------------------


class LeaseAnswer(StrEnum):
    HELD = "held"  # It is ours now.
    HELD_BY_OTHER = "held_by_other"
    ALREADY_STARTED = "already_started"  # This attempt, or a newer one, was started and not released.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """What Redis knows of a step: who holds it, and which attempt was started and never released."""

    owner: str | None
    started_attempt: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSurvey:
    """`is_trustworthy` False: Redis was flushed or restarted less than a lease time ago; judge nothing by it."""

    is_trustworthy: bool
    views: tuple[LeaseView, ...]


class Leases(Protocol):
    """The right to execute one attempt for a while. Every method raises LeasesUnavailableError when Redis is away."""

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> LeaseAnswer:
        """An attempt starts once: leaves a mark that outlives the lease and is taken off by `release` alone. Takes over
        the lease of a lower attempt."""
        ...

    def renew(self, ref: StepRef, owner: str, seconds: float) -> bool:
        """Hold on for at least `seconds` from now. A missing lease is taken again, unless a newer attempt was started.
        False: lost."""
        ...

    def release(self, ref: StepRef, owner: str) -> None:
        """Give lease and mark back, if they are the owner's."""
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


class Dispatcher(Protocol):
    """Publishes wake-up calls. Raises BrokerUnavailableError at once rather than wait for a broker that is away."""

    def publish(self, wakeups: Sequence[Wakeup]) -> None: ...

    def backlog(self) -> Mapping[StepKind, int]:
        """How many messages wait in the queue of each kind of step."""
        ...

    def is_drained(self) -> bool:
        """True: no message is queued and none is delivered and unacknowledged, so that no step can be in one."""
        ...


# --- The world ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model turn. Messages and tools have the shapes of the Chat Completions API."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    timeout_seconds: float


class ModelClient(Protocol):
    """Asks a model for its next reply. Raises what `FailureClassifier` knows; never retries by itself."""

    def complete(self, request: ModelRequest) -> ModelReply: ...


class Clock(Protocol):
    """Time and chance, so that tests own both."""

    def elapsed_seconds(self) -> float:
        """A clock for durations that goes on while the machine sleeps."""
        ...

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def sleep(self, seconds: float) -> None: ...


class CallLimit(Protocol):
    """Ends this process when a call outlives its deadline."""

    @property
    def can_end_calls(self) -> bool:
        """False: a call in this process can't be ended (a thread beside others), so it must not write."""
        ...

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Inside, the process has at most `seconds` to live, whatever the call does; leaving lifts that."""
        ...
