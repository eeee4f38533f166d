"""Tell people that dead letters have come, beside the keeper's work and without ever holding it up."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentq.domain.errors import AgentqError, NotToldError
from agentq.domain.model import DeadLetter
from agentq.domain.times import time_text
from agentq.ports.notifying import Channel, NotificationStore

logger = logging.getLogger(__name__)

BATCH_MAX = 100  # Dead letters of one notification: a storm of ten thousand is a hundred of them.
RETRY_SECONDS_FIRST = 5.0
RETRY_SECONDS_MAX = 300.0
FAILURES_TO_BE_LOUD = 5  # After so many in a row it is an error in the log: nobody hears of anything.
AHEAD_MAX = 10_000  # Dead letters that one channel has told and another one, which fails, has not.


@dataclass(slots=True)
class _Way:
    """A channel, and how it goes with it. `told` are those that aren't marked yet, because another channel fails."""

    channel: Channel
    told: set[int] = field(default_factory=set)
    failures: int = 0
    due_at: float = 0.0


class Notifier:
    """At least once: what was told is marked after it was, so that who dies in between has it told again."""

    def __init__(
        self, *, store: NotificationStore, channels: Sequence[Channel], elapsed_seconds: Callable[[], float]
    ) -> None:
        self._store = store
        self._ways = [_Way(channel) for channel in channels]
        self._elapsed_seconds = elapsed_seconds
        self._thread: threading.Thread | None = None

    def notify(self) -> None:
        """Have one notification sent through each channel, if there is something to tell; returns at once.

        Called once a pass, it sends no more than one a pass. One thread does it: while that is at work, none begins.
        """
        is_at_work = self._thread is not None and self._thread.is_alive()
        if is_at_work or not any(self._is_due(way) for way in self._ways):
            return
        self._thread = threading.Thread(target=self._tell, name="notifier", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._thread is not None:
            self._thread.join()

    def _tell(self) -> None:
        try:
            for way in filter(self._is_due, self._ways):
                self._tell_through(way)
            self._mark()
        except AgentqError as error:
            logger.warning("who is told of dead letters can't be seen to now: %s", error)
        except Exception:
            logger.exception("telling of dead letters failed")

    def _is_due(self, way: _Way) -> bool:
        return self._elapsed_seconds() >= way.due_at

    def _tell_through(self, way: _Way) -> None:
        limit = BATCH_MAX + len(way.told)
        untold = self._store.untold(limit)
        if len(untold) < limit:
            way.told &= {letter.id for letter in untold}  # The others were closed.
        letters = [letter for letter in untold if letter.id not in way.told][:BATCH_MAX]
        if not letters or len(way.told) >= AHEAD_MAX:
            return
        more = max(0, self._store.count_untold() - len(way.told) - len(letters))
        try:
            way.channel.tell(notification(letters, more=more))
        except NotToldError as error:
            self._failed(way, len(letters) + more, error)
            return
        way.failures, way.due_at = 0, 0.0
        way.told |= {letter.id for letter in letters}
        logger.info("told of %s dead letters through %s", len(letters), way.channel.name)

    def _failed(self, way: _Way, waiting: int, error: NotToldError) -> None:
        wait_seconds = min(RETRY_SECONDS_FIRST * 2.0**way.failures, RETRY_SECONDS_MAX)
        way.failures += 1
        way.due_at = self._elapsed_seconds() + wait_seconds
        level = logging.ERROR if way.failures >= FAILURES_TO_BE_LOUD else logging.WARNING
        logger.log(
            level,
            "nobody is told of %s dead letters: %s: %s; tried %s times, again in %g s",
            waiting,
            way.channel.name,
            error,
            way.failures,
            wait_seconds,
        )

    def _mark(self) -> None:
        by_all = sorted(set.intersection(*(way.told for way in self._ways)))
        self._store.mark_told(by_all)
        for way in self._ways:
            way.told.difference_update(by_all)


def notification(letters: Sequence[DeadLetter], *, more: int) -> dict[str, Any]:
    """What is told, as JSON: ids, names and classes; never an argument, a result or an error's text, which may hold
    what no chat room should. `more` wait to be told after these."""
    return {
        "dead_letters": [
            {
                "id": letter.id,
                "run_id": letter.run_id,
                "step": letter.number,
                "agent": letter.agent,
                "tool": letter.tool,
                "reason": letter.reason.value,
                "failure_class": letter.failure_class.value,
                "outcome_unknown": letter.outcome_unknown,
                "fingerprint": letter.fingerprint,
                "created_at": time_text(letter.created_at),
            }
            for letter in letters
        ],
        "more": more,
    }
