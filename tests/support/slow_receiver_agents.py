"""An agent that follows a script, with writes to a receiver that may act for a while after a call's deadline."""

from agentq import Agent, FunctionModel, ProbeAnswer, ToolContext, ToolEffect, tool
from tests.support.fault_agents import ASKING_SECONDS_MAX, ask, follow_script, question

KEYED, PLAIN = ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE
SETTLES_WITHIN_SECONDS = 3.0
PATIENCE_SECONDS = 0.5


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay(context: ToolContext, name: str) -> str:
    """Write something without a key; the receiver tells whether it was done by now."""
    return f"{name} paid: {ask(name, 'write', context)}"


@pay.probe
def find_payment(context: ToolContext, name: str) -> ProbeAnswer:
    receipt = ask(question(name), "probe", context)
    return ProbeAnswer.happened(f"{name} paid: {receipt}") if receipt else ProbeAnswer.did_not_happen()


@tool(effect=PLAIN, settles_within=SETTLES_WITHIN_SECONDS)
def pay_by_letter(context: ToolContext, name: str) -> str:
    """Write something without a key; only a person can find out whether it was done."""
    return f"{name} paid: {ask(name, 'write', context)}"


@tool(effect=KEYED, settles_within=SETTLES_WITHIN_SECONDS)
def put(context: ToolContext, name: str) -> str:
    """Write something under a key."""
    return f"{name} put: {ask(name, 'write', context, key=context.idempotency_key)}"


@tool(effect=KEYED, settles_within=SETTLES_WITHIN_SECONDS)
def put_impatiently(context: ToolContext, name: str) -> str:
    """Write something under a key; the first attempt hangs up long before its deadline."""
    key = context.idempotency_key
    seconds_max = PATIENCE_SECONDS if context.attempt == 1 else ASKING_SECONDS_MAX
    return f"{name} put: {ask(name, 'write', context, key=key, seconds_max=seconds_max)}"


support = Agent(
    name="support",
    model=FunctionModel(follow_script),
    instructions="Do what the script says.",
    tools=[pay, pay_by_letter, put, put_impatiently],
)
