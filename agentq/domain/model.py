"""The nouns of a run: its statuses, its steps, its fence and what a step may end as."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias

from agentq.domain.effects import ToolEffect
from agentq.domain.failures import FailureClass

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class RunStatus(StrEnum):
    """Where a run is. A dead letter is `FAILED` with a reason."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)


class RunMode(StrEnum):
    """Who drives a run: workers, or the process that asked for it."""

    QUEUED = "queued"
    INTERACTIVE = "interactive"


class StepKind(StrEnum):
    MODEL = "model"
    TOOL = "tool"


class StepState(StrEnum):
    """Where a step is.

    `WAITING` steps were asked for in the same turn as an open one and come after it; `CLOSED` steps were open when
    their run ended otherwise (a cancel, another step's dead letter); a replay opens them again.
    """

    WAITING = "waiting"
    AVAILABLE = "available"
    COMPLETED = "completed"
    DEAD_LETTERED = "dead_lettered"
    CLOSED = "closed"


class DeadLetterReason(StrEnum):
    NOT_RETRYABLE = "NOT_RETRYABLE"
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"


class Decision(StrEnum):
    """What a person or a probe says about an unknown write."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"


class Charge(StrEnum):
    """Which budget a requeue spends."""

    NOTHING = "nothing"
    TRY = "try"
    PATIENCE = "patience"
    CRASH = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRef:
    """Names one attempt of one step: all that a step's message holds."""

    run_id: str
    number: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that a model asked for. `id` is the model's own name for it; a call without one gets its own.

    `arguments_error` says why the model's arguments were no JSON object (`arguments` is empty then): such a call is
    never made, the text becomes its error result.
    """

    id: str = ""
    name: str
    arguments: dict[str, Any]
    arguments_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that one model turn used."""

    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """What a model answered: the final text, or the calls it wants made (with or without a text beside them)."""

    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewStep:
    """A step that a settle adds. `batch` numbers the groups of one turn that run together: a write has its own.

    `error` is set for a call that can't be made (no such tool, arguments that don't fit): the step is stored as
    completed, with that text as its error result.
    """

    kind: StepKind
    batch: int = 0
    tool: str | None = None
    call_id: str | None = None
    arguments: Json = None
    effect: ToolEffect = ToolEffect.READ_ONLY
    deadline_seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One recorded unit of a run, as the store holds it.

    `attempt` is the number of the attempt that may run now; it is also the fencing token of everything the step does.
    `tries` and `crashes` count what was spent of the two budgets. `may_have_happened` stays on a keyed write that was
    requeued over its fence, until a result is recorded, and on a write that was given up as unknown. `ruling` is what
    was decided about its unknown write, by whom and when. `suppressed` is how many of its deliveries had come to
    nothing when it was last settled or requeued; None: not known.
    """

    run_id: str
    number: int
    kind: StepKind
    state: StepState
    attempt: int
    batch: int = 0
    tool: str | None = None
    call_id: str | None = None
    arguments: Json = None
    effect: ToolEffect = ToolEffect.READ_ONLY
    deadline_seconds: float | None = None
    tries: int = 0
    crashes: int = 0
    throttled_since: datetime | None = None
    may_have_happened: bool = False
    result: Json = None
    is_error: bool = False
    usage: Usage = Usage()
    due_at: datetime | None = None
    dispatched_at: datetime | None = None
    finished_at: datetime | None = None
    ruling: Decision | None = None
    ruled_by: str | None = None
    ruled_at: datetime | None = None
    suppressed: int | None = None

    @property
    def ref(self) -> StepRef:
        return StepRef(run_id=self.run_id, number=self.number, attempt=self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """`pending_effect`: the write in flight, stamped on the run's row before the tool is called.

    `is_callable` is False when the process that stamped it had no such tool: nothing can have been called.
    `deadline_at` is database time: by then the caller has ended the call, or itself. `settles_within_seconds` is how
    long the receiver may still act after that; None: nobody can say, so only a person can rule that it didn't happen.
    `probes` counts how often its tool's probe was asked, or is about to be. `failure_class` and `error` say how the
    call failed, if whoever made it lived to see that.
    """

    id: str
    number: int
    attempt: int
    tool: str
    effect: ToolEffect
    owner: str
    stamped_at: datetime
    deadline_at: datetime
    settles_within_seconds: float | None
    is_callable: bool = True
    has_probe: bool = False
    probes: int = 0
    failure_class: FailureClass | None = None
    error: str | None = None

    @property
    def settled_at(self) -> datetime | None:
        """From when on a look that finds nothing means something; None: nobody can say."""
        if self.settles_within_seconds is None:
            return None
        return self.deadline_at + timedelta(seconds=self.settles_within_seconds)

    def is_over_by(self, at: datetime) -> bool:
        """True: by then its call has done whatever it may do, so that a look after it that finds nothing counts."""
        return self.settled_at is not None and at > self.settled_at


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Why a run stopped and waits for a person. `has_contradiction` is filled in lists only.

    `fingerprint` is the same for errors that differ in numbers, ids and quoted parts alone.
    """

    run_id: str
    number: int
    reason: DeadLetterReason
    failure_class: FailureClass
    error: str
    outcome_unknown: bool
    created_at: datetime
    id: int = 0
    closed_at: datetime | None = None
    closed_by: str | None = None
    closed_as: str | None = None
    agent: str | None = None
    tool: str | None = None
    fingerprint: str = ""
    has_contradiction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """Open dead letters that stopped over the same tool (None: a model turn) for what looks like the same cause.

    `error` and `run_id` are those of the newest.
    """

    tool: str | None
    failure_class: FailureClass
    reason: DeadLetterReason
    fingerprint: str
    count: int
    unknown_count: int
    contradicted_count: int
    oldest_at: datetime
    newest_at: datetime
    error: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as people and programs see it.

    `copied_from` is the run whose first `copied_steps` results it began with. `age_seconds` ago it was enqueued, by the
    database's clock when it was read; None in lists.
    """

    id: str
    agent: str
    input: Json
    status: RunStatus
    mode: RunMode
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    output: Json = None
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    idempotency_key: str | None = None
    cancel_requested: bool = False
    pending_effect: Fence | None = None
    has_contradiction: bool = False
    events_lost: int = 0
    copied_from: str | None = None
    copied_steps: int = 0
    dead_letter: DeadLetter | None = None
    steps: tuple[Step, ...] = ()
    age_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a run's audit log. `sequence` counts within the run, from 1."""

    run_id: str
    sequence: int
    at: datetime
    kind: str
    number: int | None
    attempt: int | None
    actor: str
    data: dict[str, Any]
