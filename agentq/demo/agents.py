"""The support agent of the demo: what it may do in the shop, and the function that stands in for its model."""

import json
import os
import re
import time
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from agentq import Agent, FunctionModel, ToolContext, ToolEffect, ToolError, tool
from agentq.domain.model import ToolCall

SHOP_URL = "DEMO_SHOP_URL"  # Variables of the demo's own, because `AGENTQ_` ones are agentq's settings.
MODEL = "DEMO_MODEL"
REQUEST_SECONDS_MAX = 30.0
THINKING_SECONDS = 0.2  # So that a person sees the turn happen; a real model takes longer.

_OPENER = build_opener(ProxyHandler({}))  # The shop is on this machine, whatever proxy leads off it.

INSTRUCTIONS = """\
You answer the support tickets of a shop. Work in this order, and never call a tool twice for the same order:
1. Look up every order that the ticket names, all in one turn.
2. Tag each of them with one word for what the ticket is about: damaged, missing or question. If the customer asks for
   a refund of an order, refund its full amount, in the same turn, after the tag.
3. Answer the customer in one or two sentences.
"""


@tool
def look_up_order(context: ToolContext, order_id: str) -> dict[str, Any]:
    """Look up an order: what was bought, and for how much.

    Args:
        order_id: the number of the order, digits only
    """
    return _ask_shop(context, "GET", f"/orders/{quote(order_id, safe='')}")


@tool(effect=ToolEffect.IDEMPOTENT_WRITE)
def tag_order(context: ToolContext, order_id: str, tag: str) -> dict[str, Any]:
    """Tag an order with one word, so that colleagues find it.

    Args:
        order_id: the number of the order, digits only
        tag: one word in lower case
    """
    path = f"/orders/{quote(order_id, safe='')}/tags/{quote(tag, safe='')}"
    return _ask_shop(context, "PUT", path, headers={"Idempotency-Key": context.idempotency_key})


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def refund_order(context: ToolContext, order_id: str, amount_cents: int) -> dict[str, Any]:
    """Send money back for an order. The payment service pays each time that it is asked.

    Args:
        order_id: the number of the order, digits only
        amount_cents: how much, at most what was paid
    """
    return _ask_shop(context, "POST", "/refunds", {"order_id": order_id, "amount_cents": amount_cents})


def _ask_shop(
    context: ToolContext, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """The shop's answer. What it refuses has certainly not happened; of any other failure nobody can say that."""
    request = Request(
        os.environ[SHOP_URL] + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    try:
        with _OPENER.open(request, timeout=min(context.deadline_seconds, REQUEST_SECONDS_MAX)) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer
    except HTTPError as error:
        with error:
            if 400 <= error.code < 500:  # noqa: PLR2004 - the client errors of HTTP
                raise ToolError(json.load(error)["error"], nothing_happened=True) from error
            raise


def answer_ticket(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    """What a well-behaved model would reply to a ticket: look up, then tag and refund, then answer."""
    time.sleep(THINKING_SECONDS)
    ticket = next(message["content"] for message in messages if message["role"] == "user")
    turns = sum(message["role"] == "assistant" for message in messages)
    if turns == 0:
        return [_call("look_up_order", order_id=order_id) for order_id in re.findall(r"\b\d{3,4}\b", ticket)]
    if turns == 1:
        found = [order for order in _results(messages) if "amount_cents" in order]
        calls = [_call("tag_order", order_id=order["order_id"], tag=_topic(ticket)) for order in found]
        if "refund" in ticket:
            calls += [
                _call("refund_order", order_id=order["order_id"], amount_cents=order["amount_cents"]) for order in found
            ]
        return calls or "We are sorry, we find no such order. Could you check its number?"
    refunded = [result for result in _results(messages) if "refund_id" in result]
    if refunded:
        euros = sum(refund["amount_cents"] for refund in refunded) / 100
        return f"We are sorry for the trouble. {euros:.2f} EUR are on their way back to you."
    items = ", ".join(result["item"] for result in _results(messages) if "item" in result)
    return f"Thank you for asking. A colleague who knows {items} will write to you."


def _call(name: str, **arguments: str | int) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)


def _results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the tools returned so far; their error texts are left out."""
    contents = [message["content"] for message in messages if message["role"] == "tool"]
    return [json.loads(content) for content in contents if content.startswith("{")]


def _topic(ticket: str) -> str:
    words = {"damaged": ("broken", "cracked", "torn"), "missing": ("never arrived", "missing")}
    return next((tag for tag, signs in words.items() if any(sign in ticket for sign in signs)), "question")


support = Agent(
    name="support",
    model=os.environ.get(MODEL) or FunctionModel(answer_ticket, name="answer_ticket"),
    instructions=INSTRUCTIONS,
    tools=[look_up_order, tag_order, refund_order],
)
