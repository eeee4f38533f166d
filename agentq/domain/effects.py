"""What tools do to the world, by declaration."""

from collections.abc import Callable
from enum import StrEnum


class ToolEffect(StrEnum):
    """What a tool does to the world; it decides whether a call may be repeated after a crash."""

    READ_ONLY = "read_only"
    IDEMPOTENT_WRITE = "idempotent_write"
    NON_IDEMPOTENT_WRITE = "non_idempotent_write"

    @property
    def is_write(self) -> bool:
        return self is not ToolEffect.READ_ONLY

    @property
    def is_plain_write(self) -> bool:
        """At most once per fence: only a probe or a person can say what became of an interrupted call."""
        return self is ToolEffect.NON_IDEMPOTENT_WRITE


_STRICTNESS = {
    ToolEffect.READ_ONLY: 0,
    ToolEffect.IDEMPOTENT_WRITE: 1,
    ToolEffect.NON_IDEMPOTENT_WRITE: 2,
}


def stricter(first: ToolEffect, second: ToolEffect) -> ToolEffect:
    """The effect that promises less about repeating; used when a step and the code disagree."""
    return max(first, second, key=_STRICTNESS.__getitem__)


class ToolEffectResolver:
    """Says what a tool does, by its name, and fails closed.

    `declared` returns the effect that the code declares for a name, or None for a name it doesn't know.
    """

    def __init__(self, declared: Callable[[str], ToolEffect | None]) -> None:
        self._declared = declared

    def effect_for(self, name: str) -> ToolEffect:
        """The declared effect; `NON_IDEMPOTENT_WRITE` for a name that nobody declared."""
        return self._declared(name) or ToolEffect.NON_IDEMPOTENT_WRITE
