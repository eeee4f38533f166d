"""What a person may decide about a dead letter."""

from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from agentq.domain.model import Decision, Json


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
