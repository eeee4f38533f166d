"""Leases in Redis: who may execute an attempt, and which attempt was started."""

import math
from collections.abc import Sequence
from typing import Any

from redis import Redis, RedisError

from agentq.adapters.redis.scripts import Script, unavailable
from agentq.domain.errors import ConfigurationError
from agentq.domain.model import StepRef
from agentq.ports.leases import LeaseAnswer, LeaseSurvey, LeaseView

MARK_SECONDS = 24 * 3600  # Longer than a broker delivers a dead worker's message again, whatever its timeout.
SURVEY_MAX = 1000  # Keys of one call: the script holds the server for a moment, and Lua's stack is finite.

_acquire, _renew, _release, _bury = Script("acquire"), Script("renew"), Script("release"), Script("bury")
_survey, _claim, _unmark = Script("survey"), Script("claim"), Script("unmark")


class RedisLeases:
    """`ports.Leases`; every method but a large survey is one round trip. All times are the server's.

    Lease and mark are one value: it is the lease for as long as it says, and the mark of a started attempt for as long
    as the key lives."""

    def __init__(
        self,
        client: Redis,
        *,
        prefix: str,
        deployment: str,
        lease_seconds: float,
        mark_seconds: float = MARK_SECONDS,
    ) -> None:
        """`client` answers with text. `lease_seconds`: for so long after a flush a survey isn't to be trusted."""
        self._client = client
        self._prefix = prefix
        self._deployment = deployment
        self._lease_seconds = lease_seconds
        self._mark_seconds = mark_seconds
        self._key = f"{prefix}:{deployment}:lease:"
        self._marker = f"{prefix}:{deployment}:leases-since"
        self._mark = f"{prefix}:deployment"

    def claim_deployment(self) -> None:
        """Mark the prefix as this deployment's. Raises ConfigurationError when it is another's, and
        LeasesUnavailableError."""
        self._refuse_other(_claim(self._client, [self._mark], self._deployment))
        self.survey(())  # From now on it is known since when leases are kept.

    def check_claim(self) -> bool:
        """Like `claim_deployment`, but changes nothing. False: nobody has claimed the prefix yet."""
        try:
            deployment: Any = self._client.get(self._mark)
        except (RedisError, OSError) as error:
            raise unavailable(error) from error
        if deployment is not None:
            self._refuse_other(deployment)
        return deployment is not None

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> LeaseAnswer:
        """Never HELD twice, not even for the same owner: who lost the reply may release, and leave."""
        return LeaseAnswer(_acquire(self._client, [self._key_of(ref)], ref.attempt, owner, *self._times(seconds)))

    def renew(self, ref: StepRef, owner: str, seconds: float) -> bool:
        return bool(_renew(self._client, [self._key_of(ref)], ref.attempt, owner, *self._times(seconds)))

    def release(self, ref: StepRef, owner: str) -> None:
        _release(self._client, [self._key_of(ref)], owner)

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey:
        views: list[LeaseView] = []
        is_trustworthy = True
        for start in range(0, max(1, len(refs)), SURVEY_MAX):
            keys = [self._key_of(ref) for ref in refs[start : start + SURVEY_MAX]]
            now, since, found = _survey(self._client, [self._marker, *keys])
            is_trustworthy = is_trustworthy and int(now) - int(since) > self._lease_seconds * 1000
            views.extend(_view(value, int(now)) for value in found)
        return LeaseSurvey(is_trustworthy=is_trustworthy, views=tuple(views))

    def unmark(self, ref: StepRef) -> bool:
        return bool(_unmark(self._client, [self._key_of(ref)], ref.attempt))

    def bury(self, ref: StepRef, process: str) -> bool:
        return bool(_bury(self._client, [self._key_of(ref)], process))

    def _refuse_other(self, deployment: str) -> None:
        if deployment != self._deployment:
            raise ConfigurationError(
                f"the Redis keys under {self._prefix!r} belong to deployment {deployment!r}, the database to "
                f"{self._deployment!r}: set AGENTQ_KEY_PREFIX to another value, or, if that deployment is gone, "
                f"delete the key {self._mark!r}"
            )

    def _key_of(self, ref: StepRef) -> str:
        return f"{self._key}{ref.run_id}:{ref.number}"

    def _times(self, seconds: float) -> tuple[int, int]:
        return math.ceil(seconds * 1000), math.ceil(max(self._mark_seconds, seconds))


def _view(value: str | None, now: int) -> LeaseView:
    if value is None:
        return LeaseView(owner=None, started_attempt=None)
    attempt, held_until, owner = value.split(" ", 2)
    return LeaseView(owner=owner if int(held_until) > now else None, started_attempt=int(attempt))
