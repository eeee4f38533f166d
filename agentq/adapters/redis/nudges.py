"""Nudges in Redis: how workers wake the keeper, and which keeper leads."""

import json
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from redis import Redis, RedisError

from agentq.adapters.redis.scripts import Script, unavailable
from agentq.domain.errors import LeasesUnavailableError
from agentq.domain.model import StepRef
from agentq.ports.leases import DeathNote

logger = logging.getLogger(__name__)

NOTES_MAX = 1000  # No keeper is reading when so many lie there; it will find those deaths by their leases.
BLOCK_SECONDS = 1.0  # Of one blocking read: shorter than the client's timeout.

_nudge, _lead = Script("nudge"), Script("lead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """A keeper by its owner, and how long it has led; None: a keeper of an older version, which doesn't say."""

    owner: str
    seconds: float | None


class RedisNudges:
    """`ports.Nudges`: a list that the leading keeper waits for. Notes are JSON, a mere nudge is an empty entry."""

    def __init__(self, client: Redis, *, prefix: str, deployment: str) -> None:
        """`client` answers with text, and has a timeout of more than a second."""
        self._client = client
        self._list = f"{prefix}:{deployment}:nudges"
        self._leader = f"{prefix}:{deployment}:leader"
        self._leads_since = f"{prefix}:{deployment}:leader-since"
        self._teller = f"{prefix}:{deployment}:teller"
        self._tells_since = f"{prefix}:{deployment}:teller-since"

    def leave_note(self, note: DeathNote) -> None:
        """Never raises: who sees a death has no other use for Redis, and the lease tells of it later."""
        ref = note.ref
        text = json.dumps({"run_id": ref.run_id, "number": ref.number, "attempt": ref.attempt, "process": note.process})
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                pipeline.lpush(self._list, text)
                pipeline.ltrim(self._list, 0, NOTES_MAX - 1)
                pipeline.execute()
        except (RedisError, OSError) as error:
            logger.warning("couldn't leave a note run=%s step=%s: %s", ref.run_id, ref.number, error)

    def nudge(self) -> None:
        """Never raises."""
        try:
            _nudge(self._client, [self._list])
        except LeasesUnavailableError as error:
            logger.warning("couldn't nudge the keeper: %s", error)

    def wait(self, seconds: float) -> list[DeathNote]:
        """Never raises: with Redis away it is a wait, and nothing is noted."""
        ends_at = time.monotonic() + seconds
        left = seconds
        try:
            while left > 0:
                first: Any = self._client.blpop([self._list], timeout=max(0.01, min(left, BLOCK_SECONDS)))
                if first:
                    return _notes([first[1], *self._rest()])
                left = ends_at - time.monotonic()
        except (RedisError, OSError) as error:
            logger.warning("can't be nudged: %s", error)
            time.sleep(max(0.0, ends_at - time.monotonic()))
        return []

    def lead(self, owner: str, seconds: float) -> bool:
        """Raises LeasesUnavailableError."""
        return bool(_lead(self._client, [self._leader, self._leads_since], owner, math.ceil(seconds * 1000)))

    def lead_telling(self, owner: str, seconds: float) -> bool:
        """Raises LeasesUnavailableError."""
        return bool(_lead(self._client, [self._teller, self._tells_since], owner, math.ceil(seconds * 1000)))

    def leader(self) -> Leader | None:
        """The keeper that leads now. Raises LeasesUnavailableError."""
        try:
            with self._client.pipeline(transaction=True) as pipeline:
                pipeline.mget([self._leader, self._leads_since])
                pipeline.time()
                (owner, since), now = pipeline.execute()
        except (RedisError, OSError) as error:
            raise unavailable(error) from error
        if owner is None:
            return None
        return Leader(owner=owner, seconds=None if since is None else now[0] + now[1] / 1e6 - int(since) / 1000)

    def _rest(self) -> list[str]:
        rest: Any = self._client.lpop(self._list, NOTES_MAX)
        return rest or []


def _notes(entries: list[str]) -> list[DeathNote]:
    """The notes among them, once each; what a newer version wrote and this one can't read is left out."""
    notes: dict[DeathNote, None] = {}
    for entry in filter(None, entries):
        try:
            note = json.loads(entry)
            ref = StepRef(run_id=note["run_id"], number=note["number"], attempt=note["attempt"])
            notes[DeathNote(ref=ref, process=note["process"])] = None
        except (ValueError, KeyError, TypeError):
            logger.warning("left an unreadable note out")
    return list(notes)
