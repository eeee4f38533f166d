"""How a run and its steps may change: the transition table. A change that isn't in it can't be made."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from agentq.domain.model import RunStatus, StepState

State = TypeVar("State", RunStatus, StepState)


@dataclass(frozen=True, slots=True)
class Transition(Generic[State]):
    """`change` leads from `source` to `target`. No source: it creates."""

    source: State | None
    change: StrEnum
    target: State


class RunChange(StrEnum):
    """What may change a run's status."""

    ENQUEUE = "enqueue"
    REFUSE = "refuse"
    START = "start"  # Its first settle or heartbeat.
    ANSWER = "answer"
    STOP = "stop"
    CANCEL = "cancel"
    REPLAY = "replay"
    WITHDRAW = "withdraw"  # A dead letter over a write turns out to be none, or the write is asked about again.
    RESOLVE_CANCELLED = "resolve a cancelled run's write"


# WAITING_FOR_APPROVAL is a status that other programs may already know by name; no change leads there.
RUN_TRANSITIONS: tuple[Transition[RunStatus], ...] = (
    Transition(None, RunChange.ENQUEUE, RunStatus.QUEUED),
    Transition(None, RunChange.REFUSE, RunStatus.FAILED),
    Transition(RunStatus.QUEUED, RunChange.START, RunStatus.RUNNING),
    Transition(RunStatus.QUEUED, RunChange.STOP, RunStatus.FAILED),
    Transition(RunStatus.QUEUED, RunChange.CANCEL, RunStatus.CANCELLED),
    Transition(RunStatus.QUEUED, RunChange.ANSWER, RunStatus.COMPLETED),
    Transition(RunStatus.RUNNING, RunChange.ANSWER, RunStatus.COMPLETED),
    Transition(RunStatus.RUNNING, RunChange.STOP, RunStatus.FAILED),
    Transition(RunStatus.RUNNING, RunChange.CANCEL, RunStatus.CANCELLED),
    Transition(RunStatus.FAILED, RunChange.REPLAY, RunStatus.RUNNING),
    Transition(RunStatus.FAILED, RunChange.WITHDRAW, RunStatus.RUNNING),
    Transition(RunStatus.FAILED, RunChange.RESOLVE_CANCELLED, RunStatus.CANCELLED),
)


class StepChange(StrEnum):
    """What may change a step's state."""

    ADD = "add"
    ADD_BEHIND = "add behind others"
    ADD_ANSWERED = "add, call can't be made"  # No such tool, or arguments that don't fit: its error is the result.
    COPY = "copy"  # With its result, from the run that this one is a copy of.
    OPEN = "open"
    REQUEUE = "requeue"
    SETTLE = "settle"
    STOP = "stop"
    CLOSE = "close"  # Its run ended otherwise.
    RESOLVE = "resolve: happened"
    SETTLE_LATE = "settle late"
    WITHDRAW = "withdraw"
    REPLAY = "replay"


STEP_TRANSITIONS: tuple[Transition[StepState], ...] = (
    Transition(None, StepChange.ADD, StepState.AVAILABLE),
    Transition(None, StepChange.ADD_BEHIND, StepState.WAITING),
    Transition(None, StepChange.ADD_ANSWERED, StepState.COMPLETED),
    Transition(None, StepChange.COPY, StepState.COMPLETED),
    Transition(StepState.WAITING, StepChange.OPEN, StepState.AVAILABLE),
    Transition(StepState.WAITING, StepChange.SETTLE_LATE, StepState.COMPLETED),
    Transition(StepState.WAITING, StepChange.CLOSE, StepState.CLOSED),
    Transition(StepState.AVAILABLE, StepChange.REQUEUE, StepState.AVAILABLE),
    Transition(StepState.AVAILABLE, StepChange.SETTLE, StepState.COMPLETED),
    Transition(StepState.AVAILABLE, StepChange.STOP, StepState.DEAD_LETTERED),
    Transition(StepState.AVAILABLE, StepChange.CLOSE, StepState.CLOSED),
    Transition(StepState.DEAD_LETTERED, StepChange.RESOLVE, StepState.COMPLETED),
    Transition(StepState.DEAD_LETTERED, StepChange.SETTLE_LATE, StepState.COMPLETED),
    Transition(StepState.DEAD_LETTERED, StepChange.WITHDRAW, StepState.AVAILABLE),
    Transition(StepState.DEAD_LETTERED, StepChange.REPLAY, StepState.WAITING),
    Transition(StepState.DEAD_LETTERED, StepChange.CLOSE, StepState.CLOSED),
    Transition(StepState.CLOSED, StepChange.SETTLE_LATE, StepState.COMPLETED),
    Transition(StepState.CLOSED, StepChange.WITHDRAW, StepState.WAITING),
    Transition(StepState.CLOSED, StepChange.REPLAY, StepState.WAITING),
)


def run_after(change: RunChange, status: RunStatus | None) -> RunStatus:
    """The status that the change leads to. Raises ValueError when it can't be made from this status."""
    return _after(RUN_TRANSITIONS, change, status)


def step_after(change: StepChange, state: StepState | None) -> StepState:
    """The state that the change leads to. Raises ValueError when it can't be made from this state."""
    return _after(STEP_TRANSITIONS, change, state)


def run_sources(change: RunChange) -> tuple[RunStatus, ...]:
    """The statuses that the change may be made from: the guard of the statement that makes it."""
    return tuple(each.source for each in RUN_TRANSITIONS if each.change is change and each.source is not None)


def step_sources(change: StepChange) -> tuple[StepState, ...]:
    """The states that the change may be made from: the guard of the statement that makes it."""
    return tuple(each.source for each in STEP_TRANSITIONS if each.change is change and each.source is not None)


def mermaid(transitions: Iterable[Transition[State]]) -> str:
    """The table as a Mermaid state diagram; a state that nothing leaves leads to the end."""
    rows = list(transitions)
    lines = ["stateDiagram-v2"]
    lines += [f"    {each.source or '[*]'} --> {each.target}: {_label(each.change)}" for each in rows]
    left = {each.source for each in rows}
    ends = dict.fromkeys(each.target for each in rows if each.target not in left)
    lines += [f"    {state} --> [*]" for state in ends]
    return "\n".join(lines) + "\n"


def _after(transitions: Iterable[Transition[State]], change: StrEnum, source: State | None) -> State:
    for each in transitions:
        if each.change is change and each.source is source:
            return each.target
    raise ValueError(f"{change!s} can't be made from {source!s}")


def _label(change: StrEnum) -> str:
    return change.value.replace(":", ",")  # A colon ends the label's beginning in Mermaid.
