"""A model over HTTP: a real local server that answers by script, and can misbehave in every way that a server does."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Any, TypeAlias

WAIT_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server does with one request.

    `delay_seconds` passes first (or until the server stops), then it waits until `waits_for_requests` requests are in
    flight. `cut_after_bytes` closes the connection in the middle of the body; `drip_seconds` sends a byte at a time.
    """

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_seconds: float = 0
    waits_for_requests: int = 0
    cut_after_bytes: int | None = None
    drip_seconds: float = 0


def reply(
    text: str | None = None, *, calls: Sequence[dict[str, Any]] = (), finish_reason: object = None, **extra: Any
) -> Answer:
    """A well-formed reply with a text, calls, or both; `extra` goes into the message."""
    message: dict[str, Any] = {"role": "assistant", "content": text, **extra}
    if calls:
        message["tool_calls"] = list(calls)
    reason = finish_reason or ("tool_calls" if calls else "stop")
    return raw(
        json.dumps(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": "stub",
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
            }
        )
    )


def call(name: str, arguments: Mapping[str, Any] | str, call_id: str = "call_1") -> dict[str, Any]:
    """One tool call of a reply; a str as `arguments` is sent as it is."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def raw(body: str) -> Answer:
    """Status 200 with this body, whatever it is."""
    return Answer(body=body.encode())


def failure(status: int, message: str = "scripted failure", **headers: str) -> Answer:
    """An error as OpenAI words it; `retry_after="1"` becomes a Retry-After header."""
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    body = json.dumps({"error": {"message": message, "type": "stub", "code": None}}).encode()
    return Answer(body=body, status=status, headers=named)


def cut(answer: Answer, after_bytes: int = 20) -> Answer:
    """The same answer, whose connection breaks in the middle."""
    return replace(answer, cut_after_bytes=after_bytes)


def slow(answer: Answer, seconds: float) -> Answer:
    """The same answer, later; stopping the server ends the wait."""
    return replace(answer, delay_seconds=seconds)


def dripping(answer: Answer, seconds: float) -> Answer:
    """The same answer, a byte at a time with a pause after each."""
    return replace(answer, drip_seconds=seconds)


Turn: TypeAlias = Answer | list[Answer] | Callable[[dict[str, Any]], Answer]


class ModelServer:
    """Serves `POST /v1/chat/completions` on a free port until it is left.

    `turns[n]` answers requests that hold n assistant messages, whoever asks and however often: an Answer each time the
    same, a list one after the other and its last for good, a function of the request's body whatever it likes. Requests
    past the last turn get that one.
    """

    def __init__(self, *turns: Turn) -> None:
        self._turns = turns
        self._served = [0] * len(turns)
        self._changed = Condition()
        self._in_flight = 0
        self.stopping = Event()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.in_flight_max = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.model = self
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def start(self) -> "ModelServer":
        self._thread.start()
        return self

    def stop(self) -> None:
        self.stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "ModelServer":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def enter(self, request: dict[str, Any], key: str) -> Answer:
        """Count a request in, and choose its answer; called by the handler."""
        turn_index = sum(message["role"] == "assistant" for message in request["messages"])
        turn_index = min(turn_index, len(self._turns) - 1)
        with self._changed:
            self.requests.append(request)
            self.keys.append(key)
            self._in_flight += 1
            self.in_flight_max = max(self.in_flight_max, self._in_flight)
            self._changed.notify_all()
            served = self._served[turn_index]
            self._served[turn_index] += 1
        turn = self._turns[turn_index]
        if isinstance(turn, Answer):
            return turn
        answer: Answer = turn[min(served, len(turn) - 1)] if isinstance(turn, list) else turn(request)
        return answer

    def wait_for_requests(self, count: int) -> bool:
        """True once so many requests were in flight at the same moment; False when that takes too long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.in_flight_max >= count or self.stopping.is_set(), timeout=WAIT_SECONDS_MAX
            )
            return self.in_flight_max >= count

    def leave(self) -> None:
        with self._changed:
            self._in_flight -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # A hundred clients at once must not be refused by the kernel.
    model: ModelServer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is part of the scripts; its traceback would only be noise."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model = self.server.model
        answer = model.enter(request, self.headers.get("Authorization", ""))
        try:
            if answer.delay_seconds:
                model.stopping.wait(answer.delay_seconds)
            if answer.waits_for_requests:
                model.wait_for_requests(answer.waits_for_requests)
            self._send(answer)
        finally:
            model.leave()

    def _send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        own = {"Content-Type": "application/json", "Date": self.date_time_string()}
        for name, value in {**own, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if answer.cut_after_bytes is not None:
            self.wfile.write(answer.body[: answer.cut_after_bytes])
            self.close_connection = True
        elif answer.drip_seconds:
            self._drip(answer)
        else:
            self.wfile.write(answer.body)

    def _drip(self, answer: Answer) -> None:
        for byte in answer.body:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            if self.server.model.stopping.wait(answer.drip_seconds):
                return

    def log_message(self, format: str, *args: object) -> None:
        """Tests say what went wrong; a line for each request would hide it."""
