"""The shop of the demo, a process of its own: orders and a payment service, on loopback HTTP.

Run as `python -m agentq.demo.shop FOLDER`; the first line of its output is its address. Standard library alone.
"""

import json
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

REPLY_SECONDS = 0.15  # As from a service some way off; a person sees each step happen.
HELD_SECONDS_MAX = 25.0  # What is held back is answered then, whoever forgot to release it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order. The replies about archived orders are held back until the demo releases them."""

    id: str
    item: str
    amount_cents: int
    is_archived: bool = False


ORDERS = (
    Order(id="1001", item="Copper kettle", amount_cents=8900),
    Order(id="1002", item="Reading lamp", amount_cents=4550),
    Order(id="1003", item="Espresso machine", amount_cents=31900),
    Order(id="1004", item="Wool blanket", amount_cents=7200),
    Order(id="1006", item="Garden chair", amount_cents=12900),
    Order(id="907", item="Oak shelf", amount_cents=15900, is_archived=True),
    Order(id="908", item="Brass hook", amount_cents=1200, is_archived=True),
    Order(id="909", item="Wall clock", amount_cents=6400, is_archived=True),
)

ARCHIVED_ORDERS = frozenset(order.id for order in ORDERS if order.is_archived)
HELD_REFUND = "1003"  # The payment service commits its refund and holds the reply back.


class RejectedError(Exception):
    """The shop says no, and has changed nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Shop:
    """The orders database, with what the payment service was asked for. Every request is counted, repeated ones too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._transaction() as database:
            database.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, item TEXT, amount_cents INTEGER)")
            database.execute("CREATE TABLE tags (key TEXT PRIMARY KEY, order_id TEXT, tag TEXT)")
            database.execute("CREATE TABLE refunds (id INTEGER PRIMARY KEY, order_id TEXT, amount_cents INTEGER)")
            database.executemany(
                "INSERT INTO orders VALUES (?, ?, ?)", [(order.id, order.item, order.amount_cents) for order in ORDERS]
            )

    def order(self, order_id: str) -> dict[str, Any]:
        """Raises RejectedError."""
        with self._transaction() as database:
            found = database.execute("SELECT item, amount_cents FROM orders WHERE id = ?", (order_id,)).fetchone()
            tags = database.execute("SELECT DISTINCT tag FROM tags WHERE order_id = ?", (order_id,)).fetchall()
        if found is None:
            raise RejectedError(404, f"there is no order {order_id!r}")
        return {"order_id": order_id, "item": found[0], "amount_cents": found[1], "tags": [tag for (tag,) in tags]}

    def tag(self, order_id: str, tag: str, key: str) -> dict[str, Any]:
        """Tag an order. The same key again changes nothing. Raises RejectedError."""
        self.order(order_id)
        with self._transaction() as database:
            database.execute("INSERT OR IGNORE INTO tags VALUES (?, ?, ?)", (key, order_id, tag))
        return {"order_id": order_id, "tag": tag}

    def refund(self, order_id: str, amount_cents: int) -> dict[str, Any]:
        """Send money back, each time that it is asked to. Raises RejectedError."""
        paid_cents = self.order(order_id)["amount_cents"]
        if not 0 < amount_cents <= paid_cents:
            raise RejectedError(422, f"order {order_id} was paid with {paid_cents} cents, not {amount_cents}")
        with self._transaction() as database:
            row = database.execute(
                "INSERT INTO refunds (order_id, amount_cents) VALUES (?, ?)", (order_id, amount_cents)
            ).lastrowid
        return _refund_view(row, order_id, amount_cents)

    def refunds(self) -> list[dict[str, Any]]:
        """All that were made, oldest first."""
        with self._transaction() as database:
            rows = database.execute("SELECT id, order_id, amount_cents FROM refunds ORDER BY id").fetchall()
        return [_refund_view(*row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=10)) as database, database:
            yield database


def _refund_view(row: int | None, order_id: str, amount_cents: int) -> dict[str, Any]:
    return {"refund_id": f"re_{row}", "order_id": order_id, "amount_cents": amount_cents}


class ShopServer(ThreadingHTTPServer):
    """The shop over HTTP, on a free port of this machine's own address."""

    daemon_threads = True

    def __init__(self, shop: Shop) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shop = shop
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ShopServer

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """The demo tells what happens."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, answer = 200, self._route(json.loads(body or b"null"))
        except RejectedError as error:
            status, answer = error.status, {"error": str(error)}
        payload = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
        except ConnectionError:
            self.close_connection = True  # Whoever asked is gone.

    def _route(self, body: Any) -> Any:
        shop = self.server.shop
        if self.path.startswith("/orders") or self.command == "POST":
            time.sleep(REPLY_SECONDS)
        match [self.command, *(unquote(part) for part in self.path.strip("/").split("/"))]:
            case ["GET", "orders", order_id]:
                if order_id in ARCHIVED_ORDERS:
                    self.server.released.wait(HELD_SECONDS_MAX)
                return shop.order(order_id)
            case ["PUT", "orders", order_id, "tags", tag]:
                return shop.tag(order_id, tag, self.headers["Idempotency-Key"])
            case ["POST", "refunds"]:
                refund = shop.refund(body["order_id"], body["amount_cents"])
                if refund["order_id"] == HELD_REFUND:
                    self.server.released.wait(HELD_SECONDS_MAX)
                return refund
            case ["GET", "refunds"]:
                return shop.refunds()
            case ["POST", "release"]:
                self.server.released.set()
                return {}
            case _:
                raise RejectedError(404, f"the shop has no {self.command} {self.path}")


def main() -> None:
    """Serve until this process is ended."""
    server = ShopServer(Shop(Path(sys.argv[1]) / "shop.db"))
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
