"""Agents for tests with real workers, without a network: one reads, writes and answers, another only fails."""

import json
from pathlib import Path
from typing import Any

from agentq import Agent, FunctionModel, ToolContext, ToolEffect, tool
from agentq.domain.model import ToolCall

LEDGER = Path(__file__).with_name("ledger.txt")


@tool
def look_up(order: str) -> dict[str, Any]:
    """What an order cost."""
    return {"order": order, "cents": 1200}


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, deadline=10)
def refund(context: ToolContext, order: str) -> str:
    """Pay an order back: a line in a ledger beside this module."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{context.run_id} {order}\n")
    return "refunded"


def reply(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if results:
        return f"done: {json.dumps(results)}"
    order = {"order": "17"}
    return [ToolCall(id="1", name="look_up", arguments=order), ToolCall(id="2", name="refund", arguments=order)]


def refuse(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    raise PermissionError("this model answers nobody")


sulker = Agent(name="sulker", model=FunctionModel(refuse), instructions="Refuse.")
clerk = Agent(name="clerk", model=FunctionModel(reply), instructions="Refund orders.", tools=[look_up, refund])
