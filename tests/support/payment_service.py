"""A payment service that dies: an HTTP server on loopback in a process of its own, with its payments in a file.

Run as `python -m tests.support.payment_service FOLDER PORT`. It pays whenever it is asked to, and commits before it
replies. Standard library alone.
"""

import json
import sqlite3
import sys
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPLY_SECONDS = 0.2  # Between commit and reply: long enough for a kill to hit that moment.
PAYMENTS_FILE = "payments.db"
READY_TEXT = "ready to pay"


def payments_in(folder: Path) -> list[tuple[str, str]]:
    """Reference and order of each payment, repeated ones too."""
    with closing(_opened(folder)) as database:
        return database.execute("SELECT reference, order_id FROM payments").fetchall()


def _opened(folder: Path) -> sqlite3.Connection:
    database = sqlite3.connect(folder / PAYMENTS_FILE, timeout=30, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE IF NOT EXISTS payments (reference TEXT, order_id TEXT)")
    return database


class _Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        kind, _, name = self.path.strip("/").partition("/")
        if kind == "balances":
            self._answer({"account": name, "cents": 100_000})
            return
        with closing(_opened(self.folder)) as database:
            found = database.execute("SELECT order_id FROM payments WHERE reference = ?", (name,)).fetchone()
        self._answer({"order_id": found[0]} if found else None)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with closing(_opened(self.folder)) as database:
            database.execute("INSERT INTO payments VALUES (?, ?)", (asked["reference"], asked["order_id"]))
        time.sleep(REPLY_SECONDS)
        self._answer({"order_id": asked["order_id"]})

    def log_message(self, *_: Any) -> None:
        """The payments tell."""

    def _answer(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # Whoever asked is dead.


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    """Serve until this process is ended."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    _Handler.folder = folder
    _opened(folder).close()
    server = _Server(("127.0.0.1", port), _Handler)
    sys.stdout.write(f"{READY_TEXT}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
