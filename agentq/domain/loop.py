"""The agent loop: from the results so far to the next model turn, and from a reply to the next steps or the answer."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from agentq.domain.agents import Agent
from agentq.domain.effects import ToolEffect
from agentq.domain.model import Json, ModelReply, NewStep, StepKind, ToolCall
from agentq.domain.tools import Tool

Message = dict[str, Any]


def conversation(agent: Agent, run_input: Json, history: Iterable[tuple[StepKind, str | None, str]]) -> list[Message]:
    """What the model reads: instructions, the input, then every completed step in order.

    `history` holds each step's kind, call id and stored result (JSON text). Chat Completions shapes.
    """
    messages: list[Message] = [{"role": "system", "content": agent.instructions}] if agent.instructions else []
    messages.append({"role": "user", "content": as_text(run_input)})
    messages.extend(
        json.loads(result)
        if kind is StepKind.MODEL
        else {"role": "tool", "tool_call_id": call_id, "content": _stored_as_text(result)}
        for kind, call_id, result in history
    )
    return messages


def as_text(value: Json) -> str:
    """A text stays as it is; anything else becomes JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def assistant_message(reply: ModelReply) -> Message:
    """The reply as the next turns will read it; this is what a model step stores."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in reply.tool_calls
        ]
    return message


def steps_for(agent: Agent, calls: tuple[ToolCall, ...]) -> tuple[NewStep, ...]:
    """One step a call, in the order asked. Consecutive reads share a batch and run in parallel; a write runs alone.

    A call that can't be made (no such tool, arguments that don't fit) ends as an error result without being called.
    """
    return tuple(_batched(_step_for(agent.tool(call.name), call) for call in calls))


def _step_for(tool: Tool | None, call: ToolCall) -> NewStep:
    if tool is None:
        error: str | None = f"there is no tool {call.name!r}"
    else:
        error = call.arguments_error or tool.problem_with(call.arguments)
    return NewStep(
        kind=StepKind.TOOL,
        tool=call.name,
        call_id=call.id,
        arguments=call.arguments,
        effect=tool.effect if tool else ToolEffect.NON_IDEMPOTENT_WRITE,
        deadline_seconds=tool.deadline_seconds if tool else None,
        error=error,
    )


def _batched(steps: Iterable[NewStep]) -> Iterator[NewStep]:
    batch, after_write = 0, True
    for step in steps:
        is_alone = step.effect.is_write and step.error is None
        if is_alone or after_write:
            batch += 1
        after_write = is_alone
        yield replace(step, batch=batch)


def _stored_as_text(result: str) -> str:
    text: str = json.loads(result) if result.startswith('"') else result
    return text
