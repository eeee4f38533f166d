"""An agent that pays orders at a service that may die; the service can be asked about all payments but wires."""

import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

from agentq import Agent, FunctionModel, ProbeAnswer, ToolContext, ToolEffect, tool
from agentq.domain.model import ToolCall

AGENT = "payments"
SERVICE_FILE = "service.url"  # In the worker's folder.
ASKING_SECONDS_MAX = 10.0


@tool
def check_balance(account: str) -> dict[str, Any]:
    """Look up what an account holds."""
    found: dict[str, Any] = _ask(f"balances/{account}")
    return found


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, settles_within=1)
def send_payment(context: ToolContext, order_id: str, method: str) -> dict[str, Any]:
    """Pay an order. The service pays each time that it is asked."""
    paid: dict[str, Any] = _ask("payments", {"reference": context.idempotency_key, "order_id": order_id})
    return paid


@send_payment.probe
def find_payment(context: ToolContext, order_id: str, method: str) -> ProbeAnswer:
    if method == "wire":
        return ProbeAnswer.cant_tell()  # The bank sends a list once a day.
    found = _ask(f"payments/{context.idempotency_key}")
    return ProbeAnswer.happened(found) if found else ProbeAnswer.did_not_happen()


def _ask(path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(Path(SERVICE_FILE).read_text() + path, data, ASKING_SECONDS_MAX) as reply:
            return json.load(reply)
    except URLError as error:
        raise ConnectionError(f"the payment service is away: {error.reason}") from error


def pay_order(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | list[ToolCall]:
    """The input is `ORDER METHOD`. An account is looked at first."""
    order_id, method = next(message["content"] for message in messages if message["role"] == "user").split()
    turn = sum(message["role"] == "assistant" for message in messages)
    calls = [ToolCall(id="pay", name="send_payment", arguments={"order_id": order_id, "method": method})]
    if method == "account":
        calls.insert(0, ToolCall(id="check", name="check_balance", arguments={"account": order_id}))
    return [calls[turn]] if turn < len(calls) else f"order {order_id} is paid"


payments = Agent(
    name=AGENT,
    model=FunctionModel(pay_order),
    instructions="Pay what is asked for.",
    tools=[check_balance, send_payment],
)
