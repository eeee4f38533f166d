"""What comes next, computed from recorded steps alone."""

from typing import Any

import pytest

from agentq.domain.effects import ToolEffect
from agentq.domain.model import Step, StepKind, StepState
from agentq.domain.resume import AddCalls, AddModelStep, Finish, Next, OpenBatch, StillOpen, next_after

DONE, OPEN, WAITING, DEAD, CLOSED = (
    StepState.COMPLETED,
    StepState.AVAILABLE,
    StepState.WAITING,
    StepState.DEAD_LETTERED,
    StepState.CLOSED,
)


def turn(number: int, state: StepState = DONE, *calls: str, text: str | None = None) -> Step:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}
            for name in calls
        ]
    return Step(run_id="r", number=number, kind=StepKind.MODEL, state=state, attempt=1, result=message)


def call(number: int, state: StepState = DONE, batch: int = 0) -> Step:
    return Step(run_id="r", number=number, kind=StepKind.TOOL, state=state, attempt=1, batch=batch, tool="look")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([], AddModelStep(number=1), id="a run without steps begins"),
        pytest.param([turn(1, OPEN)], StillOpen(), id="an available step is waited for"),
        pytest.param([turn(1), call(2, OPEN), call(3, WAITING, 1)], StillOpen(), id="also with others behind it"),
        pytest.param([turn(1, text="42")], Finish(output="42"), id="an answer that ended nothing ends the run"),
        pytest.param([turn(1), call(2)], AddModelStep(number=3), id="all calls done: the model's turn"),
        pytest.param(
            [turn(1), call(2), call(3, WAITING, 1), call(4, WAITING, 1), call(5, WAITING, 2)],
            OpenBatch(numbers=(3, 4)),
            id="the lowest waiting batch, whole",
        ),
        pytest.param([turn(1, DEAD)], OpenBatch(numbers=(1,)), id="a dead-lettered turn runs again"),
        pytest.param(
            [turn(1), call(2), call(3, DEAD), call(4, CLOSED), call(5, CLOSED, 1)],
            OpenBatch(numbers=(3, 4)),
            id="what the end closed opens with what failed",
        ),
        pytest.param([turn(1), call(2), turn(3, CLOSED)], OpenBatch(numbers=(3,)), id="a closed turn"),
        pytest.param([call(2), turn(1)], AddModelStep(number=3), id="the order given doesn't matter"),
    ],
)
def test_the_next_step_follows_from_the_recorded_ones(steps: list[Step], expected: Next) -> None:
    """A running run that lost its place, and a replay, go on where the records end, never over a recorded result."""
    assert expected == next_after(steps)


def test_calls_that_were_never_added_are_taken_for_plain_writes() -> None:
    """Their effect was never pinned and no code is at hand to ask, so each runs alone and is never repeated."""
    found = next_after([turn(1, DONE, "look", "pay")])

    assert isinstance(found, AddCalls)
    assert found.first_number == 2
    assert [(c.tool, c.call_id, c.batch) for c in found.calls] == [("look", "call-look", 0), ("pay", "call-pay", 1)]
    assert {ToolEffect.NON_IDEMPOTENT_WRITE} == {c.effect for c in found.calls}
    assert [c.arguments for c in found.calls] == [{"a": 1}, {"a": 1}]


def test_arguments_that_are_no_json_stay_as_they_were_written() -> None:
    """The step's validation tells the model what is wrong; here nothing may fail for it."""
    step = turn(1, DONE, "look")
    assert isinstance(step.result, dict)
    step.result["tool_calls"][0]["function"]["arguments"] = "{oops"  # type: ignore[index, call-overload]

    found = next_after([step])

    assert isinstance(found, AddCalls)
    assert found.calls[0].arguments == "{oops"
