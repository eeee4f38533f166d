"""The outside world: an HTTP server in a process of its own that commits each request and replies a little later.

It is what a payment service is to an agent: what it committed has happened, whoever hears of it. Run as
`python -m benchmarks.safety.world FILE`; it prints its URL. Nobody kills it. Standard library alone, because the
workers of every system ask it.
"""

import json
import os
import sqlite3
import sys
import time
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

URL_VARIABLE = "BENCH_WORLD_URL"
LOOK, PAY, LOOK_AGAIN = "look", "pay", "look_again"  # What a run does, in this order; PAY is the plain write.
REPLY_SECONDS = {LOOK: 0.02, PAY: 0.15, LOOK_AGAIN: 0.02}  # From commit to reply.
ASKING_SECONDS_MAX = 20.0
_TABLE = """
CREATE TABLE requests (
    receipt INTEGER PRIMARY KEY, run_id TEXT, kind TEXT, pid INTEGER, step INTEGER, attempt INTEGER,
    committed_at REAL, replied_at REAL
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the world committed it. Times are seconds since the epoch; `replied_at` None: not yet."""

    receipt: int
    run_id: str
    kind: str
    pid: int
    step: int | None
    attempt: int | None
    committed_at: float
    replied_at: float | None


# --- What workers do


def ask(run_id: str, kind: str, *, step: int | None = None, attempt: int | None = None) -> int:
    """Do it; the receipt, once the world has replied."""
    asked = {"run_id": run_id, "kind": kind, "pid": os.getpid(), "step": step, "attempt": attempt}
    return int(_call(os.environ[URL_VARIABLE], asked)["receipt"])


def payments_of(run_id: str) -> list[int]:
    """The receipts of what was paid for this run so far: what a probe asks."""
    return [int(receipt) for receipt in _call(os.environ[URL_VARIABLE], {"payments_of": run_id})["receipts"]]


def held_payments(url: str) -> list[tuple[int, float]]:
    """Payments that are committed and not replied to yet: the pid that asked, and for how many seconds."""
    return [(int(pid), float(seconds)) for pid, seconds in _call(url, {"held": PAY})["held"]]


def unseen_of(url: str, run_ids: list[str]) -> set[str]:
    """Those of these runs that have asked for nothing yet."""
    return set(_call(url, {"unseen_of": run_ids})["unseen"])


def _call(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(url, json.dumps(asked).encode(), ASKING_SECONDS_MAX) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


# --- What the world is


class World:
    """Commits to a file before it replies."""

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute(_TABLE)
        self._runs: set[str] = set()
        self._held: dict[int, tuple[int, float]] = {}  # By receipt: the pid, and when it was committed.

    def take(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "held" in asked:
            now = time.time()
            with self._lock:
                return {"held": [(pid, now - committed_at) for pid, committed_at in self._held.values()]}
        if "unseen_of" in asked:
            with self._lock:
                return {"unseen": [run_id for run_id in asked["unseen_of"] if run_id not in self._runs]}
        if "payments_of" in asked:
            statement = "SELECT receipt FROM requests WHERE run_id = ? AND kind = ? ORDER BY receipt"
            with self._lock:
                rows = self._file.execute(statement, (asked["payments_of"], PAY)).fetchall()
            return {"receipts": [receipt for (receipt,) in rows]}
        return {"receipt": self._commit(asked)}

    def _commit(self, asked: dict[str, Any]) -> int:
        """It has happened; whoever asked hears of it later."""
        with self._lock:
            committed_at = time.time()
            row = self._file.execute(
                "INSERT INTO requests (run_id, kind, pid, step, attempt, committed_at) VALUES (?, ?, ?, ?, ?, ?)",
                (asked["run_id"], asked["kind"], asked["pid"], asked["step"], asked["attempt"], committed_at),
            )
            receipt = int(row.lastrowid or 0)
            self._runs.add(asked["run_id"])
            if asked["kind"] == PAY:
                self._held[receipt] = (asked["pid"], committed_at)
        time.sleep(REPLY_SECONDS[asked["kind"]])
        with self._lock:
            self._held.pop(receipt, None)
            self._file.execute("UPDATE requests SET replied_at = ? WHERE receipt = ?", (time.time(), receipt))
        return receipt


def read_log(path: Path) -> list[Request]:
    """Everything that was asked, in the order of the commits."""
    columns = "receipt, run_id, kind, pid, step, attempt, committed_at, replied_at"
    names = columns.split(", ")
    file = sqlite3.connect(path)
    try:
        rows = file.execute(f"SELECT {columns} FROM requests ORDER BY receipt").fetchall()
    finally:
        file.close()
    return [Request(**dict(zip(names, row, strict=True))) for row in rows]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> int:
    world = World(Path(sys.argv[1]))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(world.take(asked)).encode()
            try:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # Whoever asked was killed.

        def log_message(self, *_: Any) -> None:
            """The log is in the file."""

    server = _Server(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}/\n")
    sys.stdout.flush()
    server.serve_forever()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
