"""What a person may decide about a dead letter."""

from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from agentq.domain.errors import InvalidInputError
from agentq.domain.model import Decision, Json

REASON_CHARACTERS_MAX = 2000  # An audit event holds it, and a decision about ten thousand runs writes it as often.
ACTOR_CHARACTERS_MAX = 200
RUNS_PER_SECOND_MIN = 1 / 86_400  # One a day: no one waits longer for the next, and no clock could.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A person's (or probe's) word on an unknown write. `result` with HAPPENED; `looked_at` with DID_NOT_HAPPEN: when
    they looked (UTC); None: at the moment when it is decided."""

    decision: Decision
    result: Json = None
    looked_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaying:
    """A person's wish to run a run again from where it stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarding:
    """A person's word that a run is given up: it stays failed, and an unknown write stays unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A person's wish to have the tool's probe asked once more what became of an unknown write, and to go by it."""


Choice: TypeAlias = Ruling | Replaying | Discarding | Asking


def signed(actor: object, reason: object) -> dict[str, str]:
    """Who decides, and why, as the audit log may hold it. Raises InvalidInputError."""
    return {
        "actor": _text("actor", actor, ACTOR_CHARACTERS_MAX),
        "reason": _text("reason", reason, REASON_CHARACTERS_MAX),
    }


def _text(name: str, text: object, characters_max: int) -> str:
    if not isinstance(text, str):
        raise InvalidInputError(f"{name} is of type {type(text).__name__}; it takes a text")
    if len(text) > characters_max:
        raise InvalidInputError(f"{name} has {len(text):,} characters; it takes at most {characters_max:,}")
    return text
