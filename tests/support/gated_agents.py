"""An agent whose one write waits at a gate, so that a test can act in the middle of the call. Needs no network."""

import time
from pathlib import Path
from typing import Any

from agentq import Agent, FunctionModel, ToolContext, ToolEffect, tool
from agentq.domain.model import ToolCall

FOLDER = Path(__file__).parent
GATE, ENTERED, LEDGER = FOLDER / "gate", FOLDER / "entered", FOLDER / "ledger.txt"
POLL_SECONDS = 0.02


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def pay_back(context: ToolContext, order: str) -> str:
    """Pay an order back once the gate is open."""
    ENTERED.touch()
    while not GATE.exists() and context.deadline_seconds > 1:
        time.sleep(POLL_SECONDS)
    with LEDGER.open("a") as ledger:
        ledger.write(f"{context.run_id} {order}\n")
    return "paid back"


def reply(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    if messages[-1]["role"] == "tool":
        return f"done: {messages[-1]['content']}"
    return [ToolCall(id="1", name="pay_back", arguments={"order": "17"})]


teller = Agent(name="teller", model=FunctionModel(reply), instructions="Pay back.", tools=[pay_back])
