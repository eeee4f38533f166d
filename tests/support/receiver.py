"""The outside world of a test: an HTTP server on loopback that counts what it is asked, and holds replies back."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import eventually

HELD_SECONDS_MAX = 60.0  # What a test forgot to release is answered then.


class Hold(StrEnum):
    """Where a request waits until it is released."""

    BEFORE = "before it takes effect"
    AT_WORK = "before it takes effect; another request with its key is refused meanwhile: the key is in use"
    AFTER = "after it took effect, before the reply"


class KeyInUseError(Exception):
    """The first request with that key is still worked on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as it arrived. `name` is the test's own; a keyed write has a `key`, and takes effect once for each."""

    name: str
    kind: str
    pid: int
    run_id: str | None = None
    step: int | None = None
    attempt: int | None = None
    key: str | None = None


class Receiver:
    """Takes requests of any kind: a write changes the world (`effects`), a probe is answered with the receipt of its
    step's write (0: there was none), anything else is only counted."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._requests: list[Request] = []
        self._effects: Counter[tuple[str, int]] = Counter()
        self._receipts: dict[str, int] = {}
        self._receipt_of_step: dict[tuple[str | None, int | None], int] = {}
        self._holds: dict[str, Hold] = {}
        self._keys_at_work: set[str | None] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- what tests do

    @contextmanager
    def holding(self, *names: str, when: Hold = Hold.AFTER) -> Iterator[None]:
        """Inside, requests of these names wait; at the end all are released."""
        for name in names:
            self.hold(name, when)
        try:
            yield
        finally:
            for name in names:
                self.release(name)

    def hold(self, name: str, when: Hold = Hold.AFTER) -> None:
        with self._changed:
            self._holds[name] = when

    def release(self, name: str) -> None:
        with self._changed:
            self._holds.pop(name, None)
            self._changed.notify_all()

    def release_all(self) -> None:
        with self._changed:
            self._holds.clear()
            self._changed.notify_all()

    def requests(self, name: str) -> list[Request]:
        """All of that name, in the order in which they arrived."""
        with self._changed:
            return [request for request in self._requests if request.name == name]

    def requests_of(self, run_id: str, kind: str) -> list[Request]:
        """All of that kind by this run, in the order in which they arrived."""
        with self._changed:
            return [request for request in self._requests if (request.run_id, request.kind) == (run_id, kind)]

    def wait_for(self, name: str, count: int = 1, *, seconds: float = 20.0) -> Request:
        """The request of that name that makes it `count`; it may be held now."""
        eventually(
            lambda: len(self.requests(name)) >= count, seconds=seconds, what=f"{count} requests of {name!r} arrive"
        )
        return self.requests(name)[count - 1]

    def effects_of(self, run_id: str) -> int:
        """How often this run's writes changed the world."""
        with self._changed:
            return sum(count for (of_run, _), count in self._effects.items() if of_run == run_id)

    @property
    def effects(self) -> dict[tuple[str, int], int]:
        """By run id and step number."""
        with self._changed:
            return dict(self._effects)

    # --- what it does with a request

    def take(self, request: Request) -> int:
        """Count the request, let it take effect and return its receipt; waits where it is held. Raises
        KeyInUseError."""
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()
            self._wait_while_held(request.name, Hold.BEFORE)
            self._work_on(request)
            receipt = self._commit(request)
            self._wait_while_held(request.name, Hold.AFTER)
            return receipt

    def _work_on(self, request: Request) -> None:
        if request.key in self._keys_at_work:
            raise KeyInUseError
        if self._holds.get(request.name) is Hold.AT_WORK:
            self._keys_at_work.add(request.key)
            self._wait_while_held(request.name, Hold.AT_WORK)
            self._keys_at_work.discard(request.key)

    def _commit(self, request: Request) -> int:
        """The same key gets the same receipt, and changes nothing again."""
        if request.kind == "probe":
            return self._receipt_of_step.get((request.run_id, request.step), 0)
        if request.key in self._receipts:
            return self._receipts[request.key]
        receipt = sum(self._effects.values()) + 1
        if request.kind == "write" and request.run_id is not None and request.step is not None:
            self._effects[request.run_id, request.step] += 1
            self._receipt_of_step[request.run_id, request.step] = receipt
        if request.key is not None:
            self._receipts[request.key] = receipt
        return receipt

    def _wait_while_held(self, name: str, when: Hold) -> None:
        self._changed.wait_for(lambda: self._holds.get(name) is not when, HELD_SECONDS_MAX)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    code, answer = HTTPStatus.OK, {"receipt": receiver.take(Request(**asked))}
                except KeyInUseError:
                    code, answer = HTTPStatus.CONFLICT, {}
                body = json.dumps(answer).encode()
                try:
                    self.send_response(code)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # Whoever asked is dead: what tests are about.

            def log_message(self, *_: Any) -> None:
                """Tests look at what arrived."""

        return Handler
