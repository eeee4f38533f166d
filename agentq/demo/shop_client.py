"""Asks the demo's shop what it saw, over the same HTTP as the agent's tools."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT_SECONDS = 5.0

_OPENER = build_opener(ProxyHandler({}))  # The shop is on this machine, whatever proxy leads off it.


class ShopClient:
    """What a person would look up in the back office of the payment service."""

    def __init__(self, url: str) -> None:
        self.url = url

    def refunds(self) -> list[dict[str, Any]]:
        """All that the payment service committed, oldest first."""
        refunds: list[dict[str, Any]] = self._ask("GET", "/refunds")
        return refunds

    def refund_of(self, order_id: str) -> dict[str, Any] | None:
        """The refund of that order; None: the payment service has committed none."""
        return next((refund for refund in self.refunds() if refund["order_id"] == order_id), None)

    def release(self) -> None:
        """Let go the replies that the shop holds back."""
        self._ask("POST", "/release")

    def _ask(self, method: str, path: str) -> Any:
        with _OPENER.open(Request(self.url + path, method=method), timeout=TIMEOUT_SECONDS) as reply:
            return json.load(reply)


def requests_by_order(refunds: list[dict[str, Any]]) -> Mapping[str, int]:
    return Counter(refund["order_id"] for refund in refunds)
