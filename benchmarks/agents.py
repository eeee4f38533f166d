"""The agents that the benchmarks run: models that are functions, tools that do next to nothing."""

import os

from agentq import Agent, FunctionModel, ToolEffect, tool
from agentq.domain.model import ModelReply, ToolCall

STEPS = int(os.environ.get("BENCH_STEPS", "5"))
WRITES = int(os.environ.get("BENCH_WRITES", "1"))
GROWTH_MESSAGE = "x" * 400
_TEXT = "y" * 160  # With the rest of the row, about what the naive transaction inserts.


@tool
def read_something(item: int) -> str:
    """Look something up."""
    return _TEXT


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def write_something(item: int) -> str:
    """Change something."""
    return _TEXT


@tool
def read_message(item: int) -> str:
    """Look up a text of 400 bytes."""
    return GROWTH_MESSAGE


def _stepwise(messages: list[dict[str, object]], tools: list[dict[str, object]]) -> str | list[ToolCall]:
    """Model turns and calls take turns; the last `WRITES` calls write."""
    calls_made = sum(message["role"] == "tool" for message in messages)
    calls_wanted = (STEPS - 1) // 2
    if calls_made == calls_wanted:
        return "done"
    name = "write_something" if calls_made >= calls_wanted - WRITES else "read_something"
    return [ToolCall(id=f"call-{calls_made}", name=name, arguments={"item": calls_made})]


def _growing(messages: list[dict[str, object]], tools: list[dict[str, object]]) -> str | ModelReply:
    """Read every message, as a model would, then ask for one more."""
    size = sum(len(str(message["content"])) for message in messages)
    calls_made = sum(message["role"] == "tool" for message in messages)
    if calls_made == STEPS // 2:
        return f"done after {size} characters"
    call = ToolCall(id=f"call-{calls_made}", name="read_message", arguments={"item": calls_made})
    return ModelReply(text=GROWTH_MESSAGE, tool_calls=(call,))


stepwise = Agent(name="stepwise", model=FunctionModel(_stepwise), tools=[read_something, write_something])
growing = Agent(name="growing", model=FunctionModel(_growing), tools=[read_message])
