"""Telling people of dead letters: what is told, how often, and what a channel that fails or hangs costs."""

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from agentq.domain.errors import NotToldError, StoreUnavailableError
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetter, DeadLetterReason
from agentq.services import notify
from agentq.services.notify import BATCH_MAX, FAILURES_TO_BE_LOUD, RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX, Notifier
from tests.support.fakes import FakeClock
from tests.support.waiting import eventually


def dead_letter(number: int) -> DeadLetter:
    return DeadLetter(
        id=number,
        run_id=f"run {number}",
        number=2,
        reason=DeadLetterReason.NOT_RETRYABLE,
        failure_class=FailureClass.UNKNOWN,
        error="the card 4111 1111 1111 1111 was refused",
        outcome_unknown=True,
        created_at=datetime(2026, 1, 31, 12, tzinfo=UTC),
        agent="support",
        tool="pay",
        fingerprint="65badafcee",
    )


class Letters:
    """A store of open dead letters that nobody was told of."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.marked: list[int] = []
        self.asked = 0
        self.raises: list[Exception] = []

    def untold(self, limit: int) -> list[DeadLetter]:
        self.asked += 1
        if self.raises:
            raise self.raises.pop(0)
        return [dead_letter(number) for number in self._untold()][:limit]

    def count_untold(self) -> int:
        return len(self._untold())

    def mark_told(self, ids: Sequence[int]) -> None:
        self.marked += ids

    def _untold(self) -> list[int]:
        return [number for number in self.open if number not in self.marked]


class FakeChannel:
    """Keeps what it was told; fails as often as it is to, hangs while it is held."""

    def __init__(self, name: str = "a channel") -> None:
        self.name = name
        self.told: list[list[int]] = []
        self.more: list[int] = []
        self.failures = 0
        self.is_free = threading.Event()
        self.is_free.set()

    def tell(self, notification: Mapping[str, Any]) -> None:
        assert self.is_free.wait(10)
        if self.failures:
            self.failures -= 1
            raise NotToldError("nobody answers")
        self.told.append([letter["id"] for letter in notification["dead_letters"]])
        self.more.append(notification["more"])


class Office:
    """A notifier with all that it works with."""

    def __init__(self, channels: int = 1) -> None:
        self.letters = Letters()
        self.channels = [FakeChannel(f"channel {number}") for number in range(channels)]
        self.clock = FakeClock()
        self.notifier = Notifier(store=self.letters, channels=self.channels, elapsed_seconds=self.clock.elapsed_seconds)

    def passes(self, count: int = 1, *, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.clock.now += seconds
            self.notifier.notify()
            self.notifier.wait()


@pytest.fixture
def office() -> Office:
    return Office()


def test_each_is_told_once(office: Office) -> None:
    """And marked once it was."""
    office.letters.open = [1, 2]
    office.passes()
    office.letters.open.append(3)
    office.passes(3)
    assert office.channels[0].told == [[1, 2], [3]] and office.letters.marked == [1, 2, 3]


def test_a_storm_is_told_in_batches_one_a_pass(office: Office) -> None:
    """Ten thousand messages at once reach nobody; each says how many are still to come."""
    office.letters.open = list(range(1, 2 * BATCH_MAX + 51))
    office.passes()
    assert [len(told) for told in office.channels[0].told] == [BATCH_MAX]
    office.passes(3)
    assert [len(told) for told in office.channels[0].told] == [BATCH_MAX, BATCH_MAX, 50]
    assert office.channels[0].more == [BATCH_MAX + 50, 50, 0]
    assert office.letters.marked == office.letters.open


def test_no_text_of_an_error_leaves(office: Office) -> None:
    """It may hold what a customer wrote, or what a provider answered; who is told finds it by the run's id."""
    told = notify.notification([dead_letter(7)], more=0)
    assert told["dead_letters"] == [
        {
            "id": 7,
            "run_id": "run 7",
            "step": 2,
            "agent": "support",
            "tool": "pay",
            "reason": "NOT_RETRYABLE",
            "failure_class": "UNKNOWN",
            "outcome_unknown": True,
            "fingerprint": "65badafcee",
            "created_at": "2026-01-31T12:00:00.000Z",
        }
    ]


def test_what_fails_is_tried_again_with_growing_waits(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    """A chat that is down for an hour is asked some dozens of times; what waits is told when it is back."""
    channel = office.channels[0]
    office.letters.open, channel.failures = [1], 8
    waits, tried = [], 0
    while channel.failures:
        before = office.clock.now
        left = channel.failures
        while channel.failures == left:
            office.passes(seconds=1.0)
        waits.append(office.clock.now - before)
        tried += 1
    assert waits[1:4] == [RETRY_SECONDS_FIRST, 2 * RETRY_SECONDS_FIRST, 4 * RETRY_SECONDS_FIRST]
    assert waits[-1] == RETRY_SECONDS_MAX and office.letters.marked == []
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * (FAILURES_TO_BE_LOUD - 1) + [logging.ERROR] * (tried - FAILURES_TO_BE_LOUD + 1)
    assert "nobody is told of 1 dead letters: channel 0: nobody answers; tried 8 times" in caplog.messages[-1]
    office.passes(seconds=RETRY_SECONDS_MAX)
    assert channel.told == [[1]] and office.letters.marked == [1]


def test_one_channel_does_not_wait_for_another_that_fails() -> None:
    """Whoever can be told is, once; marked is what all have heard."""
    office = Office(channels=2)
    works, fails = office.channels
    office.letters.open, fails.failures = [1], 1
    office.passes()
    office.letters.open.append(2)
    office.passes()
    assert works.told == [[1], [2]] and fails.told == [] and office.letters.marked == []
    office.passes(seconds=RETRY_SECONDS_FIRST)
    assert works.told == [[1], [2]] and fails.told == [[1, 2]] and office.letters.marked == [1, 2]


def test_what_was_closed_meanwhile_is_forgotten() -> None:
    """A channel that fails for weeks must not make the keeper grow."""
    office = Office(channels=2)
    works, fails = office.channels
    office.letters.open, fails.failures = [1], 1
    office.passes()
    office.letters.open = [2]
    office.passes(seconds=RETRY_SECONDS_FIRST)
    assert works.told == [[1], [2]] and fails.told == [[2]] and office.letters.marked == [2]


def test_a_channel_that_hangs_holds_up_nobody(office: Office) -> None:
    """The keeper's pass goes on, and no second thread piles up behind the first."""
    channel = office.channels[0]
    channel.is_free.clear()
    office.letters.open = [1]
    before = threading.active_count()
    for _ in range(5):
        office.notifier.notify()
    assert threading.active_count() == before + 1 and channel.told == []
    channel.is_free.set()
    eventually(lambda: office.letters.marked == [1], what="it was told in the end")
    assert channel.told == [[1]]


def test_a_store_that_is_away_is_asked_again(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    """Neither that nor a defect ends the keeper."""
    office.letters.open = [1]
    office.letters.raises = [StoreUnavailableError("the database is away"), ValueError("a defect")]
    office.passes(3)
    assert office.channels[0].told == [[1]]
    assert "who is told of dead letters can't be seen to now: the database is away" in caplog.messages[0]


def test_while_it_waits_to_try_again_nothing_is_asked(office: Office) -> None:
    """A pass every two seconds costs the database nothing then."""
    office.letters.open, office.channels[0].failures = [1], 1
    office.passes(4)
    assert office.letters.asked == 1
