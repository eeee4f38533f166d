"""An agent for the crash matrix: a tool for each kind of step, each of which takes long enough for a heartbeat."""

import os
import time
from typing import Any

from agentq import Agent, FunctionModel, ProbeAnswer, ToolContext, ToolEffect, tool
from agentq.domain.model import ToolCall
from tests.support.fault_agents import ask, follow_script

CALL_SECONDS = 1.2
SETTLES_WITHIN_SECONDS = 0.5
KEYED, PLAIN = ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE


@tool
def look(context: ToolContext, name: str) -> str:
    """Look something up."""
    ask(name, "read", context)
    time.sleep(CALL_SECONDS)
    return f"{name} seen"


@tool(effect=KEYED)
def put(context: ToolContext, name: str) -> str:
    """Write something under a key."""
    receipt = ask(name, "write", context, key=context.idempotency_key)
    time.sleep(CALL_SECONDS)
    return f"{name} put: {receipt}"


@tool(effect=PLAIN)
def pay(context: ToolContext, name: str) -> str:
    """Write something without a key."""
    receipt = ask(name, "write", context)
    time.sleep(CALL_SECONDS)
    return f"{name} paid: {receipt}"


@tool(effect=PLAIN)
def pay_when_allowed(context: ToolContext, name: str) -> str:
    """Write something without a key; for calls that wait until a pause is over."""
    return f"{name} paid: {ask(name, 'write', context)}"


def look_for_payment(context: ToolContext, name: str) -> ProbeAnswer:
    receipt = ask(f"{name}?", "probe", context)
    return ProbeAnswer.happened(f"{name} paid: {receipt}") if receipt else ProbeAnswer.did_not_happen()


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_traceably(context: ToolContext, name: str) -> str:
    """Write something without a key; the receiver tells whether it was done."""
    receipt = ask(name, "write", context)
    time.sleep(CALL_SECONDS)
    return f"{name} paid: {receipt}"


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_without_reply(context: ToolContext, name: str) -> str:
    """Write something without a key, and lose the reply."""
    ask(name, "write", context)
    raise ConnectionResetError("the reply was lost")


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_at_second_try(context: ToolContext, name: str) -> str:
    """Write something without a key; the first attempt breaks off before anything is sent."""
    if context.attempt == 1:
        raise ConnectionRefusedError("nobody listens")
    return f"{name} paid: {ask(name, 'write', context)}"


for each in (pay_traceably, pay_without_reply, pay_at_second_try):
    each.probe(look_for_payment)


@tool
def vanish(context: ToolContext) -> str:
    """Known to those who run turns alone."""
    return "unreachable"


def follow_slowly(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    """`follow_script`; where the input says so the turn takes a while."""
    if any("is slow" in str(message["content"]) for message in messages if message["role"] == "user"):
        time.sleep(CALL_SECONDS)
    return follow_script(messages, tools)


TOOLS = [look, put, pay, pay_when_allowed, pay_traceably, pay_without_reply, pay_at_second_try]

support = Agent(
    name="support",
    model=FunctionModel(follow_slowly),
    instructions="Do what the script says.",
    tools=TOOLS if os.environ.get("CRASHING_ROLE") == "tools" else [*TOOLS, vanish],
)
