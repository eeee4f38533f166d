"""Telling people that a dead letter has come: which ones nobody was told of, and the ways to tell."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentq.domain.model import DeadLetter


class NotificationStore(Protocol):
    """Open dead letters that nobody was told of yet."""

    def untold(self, limit: int) -> list[DeadLetter]:
        """The oldest of them."""
        ...

    def count_untold(self) -> int: ...

    def mark_told(self, ids: Sequence[int]) -> None:
        """Somebody was told of these, now."""
        ...


class Channel(Protocol):
    """One way to tell somebody."""

    @property
    def name(self) -> str:
        """The setting that names it, for logs."""
        ...

    def tell(self, notification: Mapping[str, Any]) -> None:
        """Returns once it was taken; never waits for long. Raises NotToldError."""
        ...
