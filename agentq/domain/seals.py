"""Seals: digests that chain a run's audit events together, so that no row of them can be changed unseen.

What is digested is a text that no other rows make: each field with its length in front, a missing one as a dash. The
function `agentq_seal_1` in PostgreSQL makes the same text; a changed text is a new version of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from agentq.domain.times import exact_time_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """An event as it is stored: `data` is its JSON text, to the letter."""

    run_id: str
    sequence: int
    at: datetime
    kind: str
    number: int | None
    attempt: int | None
    actor: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Made when a run ends, over the seal before it and the events since. `number` counts a run's seals from 1,
    `sequence` is the last event's, `events_lost` what the run had lost by then."""

    run_id: str
    number: int
    sequence: int
    events_lost: int
    at: datetime
    digest: str


def digest_of(
    events: Iterable[LoggedEvent],
    *,
    run_id: str,
    number: int,
    sequence: int,
    events_lost: int,
    at: datetime,
    previous: str | None,
) -> str:
    """The digest of the seal that has these fields, over its events in order; `previous` is the seal's before it."""
    digest = sha256(_text_of(previous, run_id, number, sequence, events_lost, exact_time_text(at)).encode())
    for event in events:
        fields = (event.kind, event.number, event.attempt, event.actor, event.data)
        digest.update(_text_of(event.sequence, exact_time_text(event.at), *fields).encode())
    return digest.hexdigest()


def _text_of(*fields: str | int | None) -> str:
    return "".join("-" if field is None else f"{len(str(field))}:{field}" for field in fields)
