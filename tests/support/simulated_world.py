"""The world of a simulation: one clock that only tests move, a broker's queue, and the receivers of what tools send."""

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import event

from agentq.adapters.sql.engine import Database
from agentq.domain.failures import ModelError
from agentq.domain.model import StepKind, StepRef
from agentq.ports.dispatch import Wakeup

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
JULIAN_EPOCH = 2461041.5  # EPOCH as SQLite's julianday counts.
DAY_SECONDS = 86400.0


@dataclass(slots=True)
class Time:
    """Seconds since the simulation began; the database, Redis and all processes go by it."""

    now: float = 0.0

    @property
    def moment(self) -> datetime:
        return EPOCH + timedelta(seconds=round(self.now, 3))


def run_on(time: Time, database: Database) -> None:
    """From now on this (SQLite) database takes its time from there, and doesn't wait for the disk."""

    def strftime(_: str, of: str, *modifiers: str) -> str:
        assert of == "now"
        seconds = sum(float(modifier.removesuffix(" seconds")) for modifier in modifiers)
        return (time.moment + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]

    def julianday(of: str | None) -> float | None:
        if of is None:
            return None
        moment = time.moment if of == "now" else datetime.fromisoformat(of).replace(tzinfo=UTC)
        return JULIAN_EPOCH + (moment - EPOCH).total_seconds() / DAY_SECONDS

    def prepare(connection: sqlite3.Connection, _: Any) -> None:
        connection.create_function("strftime", -1, strftime)
        connection.create_function("julianday", -1, julianday)
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(database.engine, "connect", prepare)


class Broker:
    """A `Dispatcher` whose queue tests read, thin out and double."""

    def __init__(self) -> None:
        self.messages: list[StepRef] = []
        self.unacknowledged: list[StepRef] = []

    def publish(self, wakeups: list[Wakeup]) -> None:
        self.messages.extend(wakeup.ref for wakeup in wakeups)

    def backlog(self) -> dict[StepKind, int]:
        return {StepKind.MODEL: len(self.messages)}

    def is_drained(self) -> bool:
        return not self.messages and not self.unacknowledged


class Place(StrEnum):
    """Where a request is."""

    FLYING = "flying"
    LANDED = "landed"
    LOST = "lost"


@dataclass(slots=True, kw_only=True)
class Request:
    """It lands or never does before `ends_at`, whatever becomes of its sender."""

    run_id: str
    number: int
    key: str | None
    ends_at: float
    place: Place = Place.FLYING

    @property
    def step(self) -> tuple[str, int]:
        return self.run_id, self.number


@dataclass(slots=True)
class Receiver:
    """Counts what happened. Requests with a key count once; while one is under way, another with its key is refused."""

    requests: list[Request] = field(default_factory=list)
    effects: Counter[tuple[str, int]] = field(default_factory=Counter)

    def send(self, request: Request) -> Request:
        if request.key is not None and any(other.key == request.key for other in self.flying):
            raise ModelError("key in use", status=409)
        self.requests.append(request)
        return request

    @property
    def flying(self) -> list[Request]:
        return [request for request in self.requests if request.place is Place.FLYING]

    def land(self, request: Request) -> None:
        is_known = request.key is not None and self.effects[request.step] > 0
        request.place = Place.LANDED
        self.effects[request.step] += not is_known
