"""What comes next in a run, computed anew from its recorded steps alone: for orphans and replays."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

from agentq.domain.effects import ToolEffect
from agentq.domain.model import Json, NewStep, Step, StepKind, StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class StillOpen:
    """A step may run already: nothing is to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """Open these steps: the lowest batch of the turn that isn't done."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddModelStep:
    """All that was asked for is done: the model's turn."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddCalls:
    """The last turn asked for calls that were never added: add them from this number on, and open the first batch."""

    first_number: int
    calls: tuple[NewStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last turn was the answer: the run is done."""

    output: Json


Next: TypeAlias = StillOpen | OpenBatch | AddModelStep | AddCalls | Finish


def next_after(steps: Sequence[Step]) -> Next:
    """What a run with these steps does next. Steps that its end closed count as waiting."""
    ordered = sorted(steps, key=lambda step: step.number)
    if any(step.state is StepState.AVAILABLE for step in ordered):
        return StillOpen()
    undone = [step for step in ordered if step.state is not StepState.COMPLETED]
    if undone:
        first = undone[0]  # Batches are numbered in the order of their steps.
        batch = takewhile(lambda step: (step.kind, step.batch) == (first.kind, first.batch), undone)
        return OpenBatch(numbers=tuple(step.number for step in batch))
    if not ordered or ordered[-1].kind is StepKind.TOOL:
        return AddModelStep(number=len(ordered) + 1)
    return _after_turn(ordered[-1])


def _after_turn(turn: Step) -> Next:
    message: dict[str, Any] = turn.result if isinstance(turn.result, dict) else {"content": turn.result}
    calls = message.get("tool_calls") or ()
    if not calls:
        return Finish(output=message.get("content"))
    return AddCalls(
        first_number=turn.number + 1,
        calls=tuple(_strictest(batch, call) for batch, call in enumerate(calls)),
    )


def _strictest(batch: int, call: dict[str, Any]) -> NewStep:
    # What the tool does was never pinned, and no code is at hand to ask: fail closed, alone in its batch.
    function = call.get("function") or {}
    return NewStep(
        kind=StepKind.TOOL,
        batch=batch,
        tool=function.get("name"),
        call_id=call.get("id"),
        arguments=_parsed(function.get("arguments")),
        effect=ToolEffect.NON_IDEMPOTENT_WRITE,
    )


def _parsed(arguments: object) -> Json:
    try:
        parsed: Json = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return str(arguments)  # The step's own validation tells the model.
    return parsed
