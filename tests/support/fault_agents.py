"""An agent that does what its input says, with a tool for each effect; each call asks the test's receiver."""

import ctypes
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from agentq import Agent, FunctionModel, ToolContext, ToolEffect, ToolError, tool
from agentq.domain.model import ToolCall

RECEIVER_FILE = "receiver.url"  # In the worker's folder.
ASKING_SECONDS_MAX = 120.0


def ask(
    name: str,
    kind: str,
    context: ToolContext | None = None,
    key: str | None = None,
    seconds_max: float = ASKING_SECONDS_MAX,
) -> int:
    """Ask the receiver; returns its receipt."""
    request = {"name": name, "kind": kind, "pid": os.getpid(), "key": key}
    if context is not None:
        request |= {"run_id": context.run_id, "step": context.step, "attempt": context.attempt}
    url = Path(RECEIVER_FILE).read_text()
    with urllib.request.urlopen(url, json.dumps(request).encode(), seconds_max) as reply:
        return int(json.load(reply)["receipt"])


def question(name: str) -> str:
    """The name under which the probe of that call asks the receiver."""
    return f"{name}?"


@tool
def look(context: ToolContext, name: str) -> str:
    """Look something up."""
    ask(name, "read", context)
    return f"{name} seen"


@tool(effect=ToolEffect.IDEMPOTENT_WRITE)
def put(context: ToolContext, name: str) -> str:
    """Write something under a key."""
    return f"{name} put: {ask(name, 'write', context, key=context.idempotency_key)}"


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def pay(context: ToolContext, name: str) -> str:
    """Write something without a key."""
    return f"{name} paid: {ask(name, 'write', context)}"


@tool
def die(context: ToolContext, name: str) -> str:
    """Kill the process that runs it."""
    ask(name, "read", context)
    os.kill(os.getpid(), signal.SIGKILL)
    return "unreachable"


@tool
def look_stubbornly(context: ToolContext, name: str, seconds: float) -> str:
    """Look something up; the first attempt lets no other thread of its process run for a while."""
    ask(name, "read", context)
    if context.attempt == 1:
        _hold_the_interpreter(seconds)
    return f"{name} seen"


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def pay_stubbornly(context: ToolContext, name: str, seconds: float) -> str:
    """Write something without a key, and let no other thread of its process run for a while."""
    receipt = ask(name, "write", context)
    _hold_the_interpreter(seconds)
    return f"{name} paid: {receipt}"


def _hold_the_interpreter(seconds: float) -> None:
    """What C code without a care for others does."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


@tool
def look_again(context: ToolContext, name: str) -> str:
    """Look something up; the first attempt finds nobody there."""
    ask(name, "read", context)
    if context.attempt == 1:
        raise ConnectionRefusedError("nobody is there")
    return f"{name} seen"


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def charge(context: ToolContext, name: str, is_rejected: bool) -> str:
    """Write something without a key: the service says no, or it does it and nobody knows what it said."""
    if is_rejected:
        raise ToolError("the card is blocked", nothing_happened=True)
    ask(name, "write", context)
    raise ToolError("no answer")


@tool
def look_at_much(context: ToolContext, name: str, size_bytes: int) -> dict[str, Any]:
    """Look something large and odd up."""
    ask(name, "read", context)
    return _much(size_bytes)


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def pay_for_much(context: ToolContext, name: str, size_bytes: int) -> dict[str, Any]:
    """Write something without a key, and get something large and odd for it."""
    ask(name, "write", context)
    return _much(size_bytes)


def _much(size_bytes: int) -> dict[str, Any]:
    """What neither database takes as it is, somewhat larger than that."""
    return {"text": "nul: \0" + "x" * size_bytes, "number": float("nan")}


def follow_script(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    """The calls that the input's script has for this turn, or in the end all results.

    The script: `turns`, for each turn its calls as pairs of tool and arguments; `asks`, for each turn the name under
    which the turn itself asks the receiver, or None.
    """
    script = _script(next(message["content"] for message in messages if message["role"] == "user"))
    turn = sum(message["role"] == "assistant" for message in messages)
    asks: list[str | None] = script.get("asks", [])
    name = asks[turn] if turn < len(asks) else None
    if name is not None:
        ask(name, "turn")
    turns: list[list[tuple[str, dict[str, Any]]]] = script.get("turns", [])
    if turn < len(turns):
        return [
            ToolCall(id=f"{turn}-{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(turns[turn])
        ]
    return " | ".join(message["content"] for message in messages if message["role"] == "tool") or "nothing to do"


def _script(text: str) -> dict[str, Any]:
    return json.loads(text) if text.startswith("{") else {}


support = Agent(
    name="support",
    model=FunctionModel(follow_script),
    instructions="Do what the script says.",
    tools=[
        look,
        put,
        pay,
        die,
        look_stubbornly,
        pay_stubbornly,
        look_again,
        charge,
        look_at_much,
        pay_for_much,
    ],
)
