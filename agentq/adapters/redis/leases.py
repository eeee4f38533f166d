"""Leases in Redis: who may execute an attempt, and which attempt was started."""

import math
from collections.abc import Sequence
from typing import Any

from redis import Redis, RedisError

from agentq.adapters.redis.scripts import Script, unavailable
from agentq.domain.errors import ConfigurationError
from agentq.domain.model import StepRef
from agentq.ports.leases import Acquired, LeaseAnswer, LeaseSurvey, LeaseView, Tally

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

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> Acquired:
        """Never HELD twice, not even for the same owner: who lost the reply may release, and leave."""
        answer, suppressed, counted_ms = self._run_counting(_acquire, ref, owner, seconds)
        return Acquired(answer=LeaseAnswer(answer), tally=self._tally(suppressed, counted_ms))

    def renew(self, ref: StepRef, owner: str, seconds: float) -> Tally | None:
        is_held, suppressed, counted_ms = self._run_counting(_renew, ref, owner, seconds)
        return self._tally(suppressed, counted_ms) if is_held else None

    def release(self, ref: StepRef, owner: str, *, is_suppressed: bool = False) -> None:
        _release(self._client, [self._key_of(ref)], owner, int(is_suppressed), math.ceil(self._mark_seconds))

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey:
        views: list[LeaseView] = []
        is_trustworthy, counted_ms = True, math.inf
        for start in range(0, max(1, len(refs)), SURVEY_MAX):
            keys = [self._key_of(ref) for ref in refs[start : start + SURVEY_MAX]]
            now, since, found, counts = _survey(self._client, [self._marker, *keys])
            counted_ms = min(counted_ms, int(now) - int(since))
            is_trustworthy = is_trustworthy and int(now) - int(since) > self._lease_seconds * 1000
            views.extend(_view(value, count, int(now)) for value, count in zip(found, counts, strict=True))
        counted_seconds = min(counted_ms / 1000, self._mark_seconds)
        return LeaseSurvey(is_trustworthy=is_trustworthy, views=tuple(views), counted_seconds=counted_seconds)

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

    def _run_counting(self, script: Script, ref: StepRef, owner: str, seconds: float) -> tuple[Any, int, int]:
        answer: tuple[Any, int, int] = script(
            self._client,
            [self._key_of(ref), self._marker],
            ref.attempt,
            owner,
            *self._times(seconds),
            # A restarted server may have counts that are older than its marker says: a survey tells, and marks it.
            when_unknown=lambda: self.survey(()),
        )
        return answer

    def _tally(self, suppressed: int, counted_ms: int) -> Tally:
        # A count is forgotten a mark's time after it last grew.
        return Tally(suppressed=suppressed, counted_seconds=min(counted_ms / 1000, self._mark_seconds))

    def _key_of(self, ref: StepRef) -> str:
        return f"{self._key}{ref.run_id}:{ref.number}"

    def _times(self, seconds: float) -> tuple[int, int]:
        return math.ceil(seconds * 1000), math.ceil(max(self._mark_seconds, seconds))


def _view(value: str | None, count: str | None, now: int) -> LeaseView:
    suppressed = int(count or 0)
    if value is None:
        return LeaseView(owner=None, started_attempt=None, suppressed=suppressed)
    attempt, held_until, started, owner = value.split(" ", 3)
    return LeaseView(
        owner=owner if int(held_until) > now else None,
        started_attempt=int(attempt),
        started_by=owner,
        started_seconds=(now - int(started)) / 1000 if int(started) else None,
        suppressed=suppressed,
    )
