"""The agent that the runs of agentq are of: its one turn asks for a read, a plain write and a read."""

import os
from typing import Any

from agentq import Agent, FunctionModel, ProbeAnswer, ToolContext, ToolEffect, tool
from agentq.domain.model import ToolCall
from benchmarks.safety.world import LOOK, LOOK_AGAIN, PAY, ask, payments_of

AGENT = "payer"
PROBE_VARIABLE = "BENCH_PROBE"  # Not empty: paying has a probe.
SETTLES_WITHIN_SECONDS = 1.0  # The world commits a request as soon as it has read it.


def _ask(context: ToolContext, kind: str) -> int:
    return ask(context.run_id, kind, step=context.step, attempt=context.attempt)


@tool
def look(context: ToolContext) -> int:
    """Look something up."""
    return _ask(context, LOOK)


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, settles_within=SETTLES_WITHIN_SECONDS)
def pay(context: ToolContext) -> int:
    """Pay, without a key."""
    return _ask(context, PAY)


def _what_was_paid(context: ToolContext) -> ProbeAnswer:
    """The world's word on the one payment of this run."""
    receipts = payments_of(context.run_id)
    return ProbeAnswer.happened(receipts[0]) if receipts else ProbeAnswer.did_not_happen()


if os.environ.get(PROBE_VARIABLE):
    pay.probe(_what_was_paid)


@tool
def look_again(context: ToolContext) -> int:
    """Look something up."""
    return _ask(context, LOOK_AGAIN)


def _turn(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    if messages[-1]["role"] == "tool":
        return "done"
    return [ToolCall(id=name, name=name, arguments={}) for name in (LOOK, PAY, LOOK_AGAIN)]


payer = Agent(name=AGENT, model=FunctionModel(_turn), tools=[look, pay, look_again])
