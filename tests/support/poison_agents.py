"""An agent that follows a script, unless its input says that its turn kills the process that takes it."""

import os
import signal
from typing import Any

from agentq import Agent, FunctionModel
from agentq.domain.model import ToolCall
from tests.support.fault_agents import ask, follow_script, look

POISON = "poison"


def follow_or_die(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    """Poison kills at once, every time."""
    if any(message["role"] == "user" and message["content"] == POISON for message in messages):
        ask(POISON, "turn")
        os.kill(os.getpid(), signal.SIGKILL)
    return follow_script(messages, tools)


support = Agent(name="support", model=FunctionModel(follow_or_die), instructions="Do what it says.", tools=[look])
