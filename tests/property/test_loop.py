"""The agent loop, whatever a model asks for: batches keep order and part writes; a conversation grows by steps."""

import json
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from agentq.domain.agents import Agent
from agentq.domain.function_model import FunctionModel
from agentq.domain.loop import assistant_message, conversation, steps_for
from agentq.domain.model import Json, ModelReply, NewStep, StepKind, ToolCall
from agentq.domain.tools import tool
from tests.support.stage import KEYED, PLAIN


@tool
def look() -> None: ...


@tool(effect=KEYED)
def tag() -> None: ...


@tool(effect=PLAIN)
def pay() -> None: ...


AGENT = Agent(name="support", model=FunctionModel(lambda *_: "done"), instructions="Be brief.", tools=[look, tag, pay])
NAMES = ("look", "tag", "pay", "unknown")
names = st.lists(st.sampled_from(NAMES), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(), scalars, max_size=2)


def steps_of(asked: list[str]) -> tuple[NewStep, ...]:
    return steps_for(
        AGENT, tuple(ToolCall(id=str(number), name=name, arguments={}) for number, name in enumerate(asked))
    )


def is_made(step: NewStep) -> bool:
    return step.error is None


@given(names)
def test_steps_keep_the_order_of_the_calls(asked: list[str]) -> None:
    """A later batch is never opened before an earlier one, so no write overtakes what was asked before it."""
    steps = steps_of(asked)
    assert [step.tool for step in steps] == asked
    batches = [step.batch for step in steps]
    assert batches == sorted(batches)
    assert set(batches) == set(range(1, len(set(batches)) + 1))


@given(names)
def test_every_write_is_alone(asked: list[str]) -> None:
    """Two writes at once would be two fences, and one run has one."""
    steps = steps_of(asked)
    for write in (step for step in steps if step.effect.is_write and is_made(step)):
        assert [step for step in steps if step.batch == write.batch] == [write]


@given(names)
def test_reads_that_follow_each_other_share_a_batch(asked: list[str]) -> None:
    """They run in parallel; a write between them parts them."""
    steps = steps_of(asked)
    for is_write, group in groupby(steps, key=lambda step: step.effect.is_write and is_made(step)):
        if not is_write:
            assert len({step.batch for step in group}) == 1


@given(st.lists(st.tuples(st.text(max_size=9), st.lists(values, max_size=3)), max_size=5))
def test_a_conversation_is_linear(turns: list[tuple[str, list[Json]]]) -> None:
    """One message a step, the step's own and in its order: what was read before is never written anew."""
    history: list[tuple[StepKind, str | None, str]] = []
    before = conversation(AGENT, "hi", history)
    assert len(before) == 2
    for number, (text, results) in enumerate(turns):
        calls = tuple(ToolCall(id=f"{number}.{index}", name="look", arguments={}) for index in range(len(results)))
        history.append((StepKind.MODEL, None, json.dumps(assistant_message(ModelReply(text=text, tool_calls=calls)))))
        for made, result in zip(calls, results, strict=True):
            history.append((StepKind.TOOL, made.id, json.dumps(result)))
        after = conversation(AGENT, "hi", history)
        assert after[: len(before)] == before
        assert len(after) == len(before) + 1 + len(results)
        answered = [message["tool_call_id"] for message in after if message["role"] == "tool"]
        asked = [each["id"] for message in after for each in message.get("tool_calls", ())]
        assert answered == asked
        before = after
