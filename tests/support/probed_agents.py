"""An agent that follows a script, with plain writes whose probes answer in every way, good and bad."""

import os
import signal
from typing import Any

from agentq import Agent, FunctionModel, ProbeAnswer, ToolContext, ToolEffect, tool
from tests.support.fault_agents import ask, follow_script, look, question

PLAIN = ToolEffect.NON_IDEMPOTENT_WRITE
SETTLES_WITHIN_SECONDS = 1.0


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay(context: ToolContext, name: str) -> str:
    """Write something without a key; the receiver tells whether it was done."""
    return f"{name} paid: {ask(name, 'write', context)}"


@pay.probe
async def ask_about_payment(context: ToolContext, name: str) -> ProbeAnswer:
    receipt = ask(question(name), "probe", context)
    return ProbeAnswer.happened(f"{name} paid: {receipt}") if receipt else ProbeAnswer.did_not_happen()


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_once_failing(context: ToolContext, name: str) -> str:
    """Write something without a key; the first attempt breaks off before anything is sent."""
    if context.attempt == 1:
        raise ConnectionRefusedError("nobody listens")
    return f"{name} paid: {ask(name, 'write', context)}"


pay_once_failing.probe(ask_about_payment)


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_without_reply(context: ToolContext, name: str) -> str:
    """Write something without a key, and lose the reply."""
    ask(name, "write", context)
    raise ConnectionResetError("the reply was lost")


pay_without_reply.probe(ask_about_payment)


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_somebody_vague(context: ToolContext, name: str) -> str:
    """Write something without a key; the probe raises, or answers nonsense, as the name says."""
    return f"{name} paid: {ask(name, 'write', context)}"


@pay_somebody_vague.probe
def ask_in_vain(context: ToolContext, name: str) -> Any:
    ask(question(name), "probe", context)
    if name.startswith("raises"):
        raise LookupError("no such page")
    return ProbeAnswer.cant_tell() if name.startswith("can't tell") else {"happened": True}


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_deadly(context: ToolContext, name: str) -> str:
    """Kill the process before anything is sent, every time."""
    os.kill(os.getpid(), signal.SIGKILL)
    return name


pay_deadly.probe(ask_about_payment)

support = Agent(
    name="support",
    model=FunctionModel(follow_script),
    instructions="Do what the script says.",
    tools=[look, pay, pay_once_failing, pay_without_reply, pay_somebody_vague, pay_deadly],
)
