"""What may become of an attempt: the three changes that a settle can make."""

from dataclasses import dataclass

from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, Json, NewStep, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The run is done: this is its output."""

    output: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model turn asked for these calls."""

    calls: tuple[NewStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A call of a turn is done: the last of its batch opens the next batch, or the next model turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The step is completed with this result. `note` goes into its audit event (never a payload)."""

    result: Json
    then: Answer | Turn | Join
    is_error: bool = False
    usage: Usage = Usage()
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """Requeue: the step is available again as a new attempt, `due_in_seconds` from now, with no fence.

    `waits_for_fence`: not before the fence's deadline plus `settles_within` either, because the receiver may still be
    at work.
    """

    charge: Charge
    error: str
    failure_class: FailureClass | None = None
    due_in_seconds: float = 0
    waits_for_fence: bool = False
    is_isolated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The run ends as failed; of a queued run it is a dead letter. With `outcome_unknown` the fence stays."""

    reason: DeadLetterReason
    failure_class: FailureClass
    error: str
    outcome_unknown: bool = False
