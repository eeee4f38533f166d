"""Waiting in tests: for a condition, with a deadline, never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")

POLL_SECONDS = 0.02


def eventually(condition: Callable[[], _Found | None], *, seconds: float = 15.0, what: str = "") -> _Found:
    """The first true value of the condition. Fails the test when it stays false."""
    given_up_at = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > given_up_at:
            raise AssertionError(f"not within {seconds:g} s: {what or condition}; last: {found!r}")
        time.sleep(POLL_SECONDS)
    return found
