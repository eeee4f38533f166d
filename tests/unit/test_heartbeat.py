"""Leases that are held: renewed, never shortened, noticed when lost, and given back whatever happens."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agentq.adapters.memory_leases import MemoryLeases
from agentq.domain.errors import LeasesUnavailableError, StoreUnavailableError
from agentq.domain.model import StepRef
from agentq.ports.leases import LeaseView
from agentq.services.heartbeat import Heartbeat
from tests.support.fakes import FakeClock, ScriptedLeases, ScriptedSteps
from tests.support.stage import Stage
from tests.support.waiting import eventually

LEASE_SECONDS = 15.0
AWAY = LeasesUnavailableError("Redis is away")
NOBODY = LeaseView(owner=None, started_attempt=None)


class Heart:
    """A heartbeat over leases in memory; the test beats it."""

    def __init__(self, stage: Stage) -> None:
        self.clock = FakeClock()
        self.memory = MemoryLeases(lease_seconds=LEASE_SECONDS, elapsed_seconds=self.clock.elapsed_seconds)
        self.leases = ScriptedLeases(self.memory)
        self.steps = ScriptedSteps(stage.steps)
        self.heartbeat = Heartbeat(self.leases, self.steps, self.clock, LEASE_SECONDS)
        self.run_id = stage.queued()
        self.ref = StepRef(run_id=self.run_id, number=1, attempt=1)

    def beat(self, *, after_seconds: float = LEASE_SECONDS / 3) -> None:
        self.clock.now += after_seconds
        self.heartbeat.beat()

    def holder(self, *, in_seconds: float = 0) -> str | None:
        """Who will hold the lease then, if nobody beats."""
        self.clock.now += in_seconds
        owner = self.leases.view(self.ref).owner
        self.clock.now -= in_seconds
        return owner


@pytest.fixture
def heart(stage: Stage) -> Iterator[Heart]:
    heart = Heart(stage)
    yield heart
    heart.clock.end()


def test_a_lease_is_held_and_given_back(heart: Heart) -> None:
    """Lease and mark go: that is what tells a clean exit from a death."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None and lease.owner == "me"
        assert heart.holder() == "me"
    assert heart.leases.view(heart.ref) == NOBODY
    assert not heart.heartbeat.beat(), "nothing is held any more"


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1), StoreUnavailableError("away")])
def test_it_is_given_back_whatever_happens_inside(heart: Heart, error: BaseException) -> None:
    """Only a death leaves the mark behind."""
    with pytest.raises(type(error)), heart.heartbeat.hold(heart.ref, "me"):
        raise error
    assert heart.leases.view(heart.ref) == NOBODY


def test_who_can_not_have_it_holds_nothing(heart: Heart) -> None:
    """And gives nothing back: it is another's."""
    heart.memory.acquire(heart.ref, "another", LEASE_SECONDS)
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is None
        assert not heart.heartbeat.beat()
    assert heart.holder() == "another"


def test_a_started_attempt_is_not_started_again(heart: Heart) -> None:
    """Its lease ran out, its mark stands: whoever died over it is charged first."""
    heart.memory.acquire(heart.ref, "dead", LEASE_SECONDS)
    heart.clock.now += 2 * LEASE_SECONDS
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is None


def test_without_redis_nothing_is_held(heart: Heart) -> None:
    """The caller leaves the step as it is."""
    heart.leases.script.fail("acquire", AWAY)
    with pytest.raises(LeasesUnavailableError), heart.heartbeat.hold(heart.ref, "me"):
        pytest.fail("without a lease")


def test_a_lost_reply_leaves_no_mark(heart: Heart) -> None:
    """The lease was taken, the answer never came: left behind, it would be charged as a crash."""
    heart.leases.script.lose_reply("acquire", AWAY)
    with pytest.raises(LeasesUnavailableError), heart.heartbeat.hold(heart.ref, "me"):
        pytest.fail("without an answer")
    assert heart.leases.view(heart.ref) == NOBODY


def test_a_beat_renews(heart: Heart) -> None:
    """For as long as the attempt runs."""
    with heart.heartbeat.hold(heart.ref, "me"):
        for _ in range(10):
            heart.beat()
        assert heart.holder(in_seconds=LEASE_SECONDS - 1) == "me"
        assert heart.holder(in_seconds=LEASE_SECONDS + 1) is None


def test_two_missed_beats_lose_nothing(heart: Heart) -> None:
    """Neither held nor lost: the next beat will tell."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        heart.leases.script.fail("renew", AWAY, AWAY)
        heart.beat()
        heart.beat()
        assert not lease.is_lost and heart.holder() == "me"
        heart.beat(after_seconds=1)
        assert not lease.is_lost and heart.holder(in_seconds=LEASE_SECONDS - 1) == "me"


def test_an_extension_is_never_shortened_by_a_beat(heart: Heart) -> None:
    """A call that holds the GIL beats no more: the lease must reach to its deadline."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        assert heart.heartbeat.extend(lease, 100)
        heart.beat()
        assert heart.leases.renewed_seconds == [100, pytest.approx(95)]
        assert heart.holder(in_seconds=94) == "me"
        heart.beat(after_seconds=90)
        assert heart.leases.renewed_seconds[-1] == LEASE_SECONDS


@pytest.mark.parametrize("seconds", [0.5, 0, -3])
def test_a_short_extension_keeps_what_is_held(heart: Heart, seconds: float) -> None:
    """A deadline shorter than the lease is no reason to hold it shorter: its outcome must be settled too."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        assert heart.heartbeat.extend(lease, seconds)
        assert heart.leases.renewed_seconds == [LEASE_SECONDS]


def test_a_lost_lease_is_noticed(heart: Heart) -> None:
    """By the next beat, and by whoever wants to begin a write; once lost it stays lost."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        heart.clock.now += LEASE_SECONDS + 1
        newer = replace(heart.ref, attempt=2)
        heart.memory.acquire(newer, "another", LEASE_SECONDS)
        assert not heart.heartbeat.extend(lease, 30)
        assert lease.is_lost
        heart.memory.release(newer, "another")
        assert not heart.heartbeat.extend(lease, 30), "somebody has had it in between"


def test_giving_back_a_lost_lease_takes_nothing_away(heart: Heart) -> None:
    """It is another's now."""
    with heart.heartbeat.hold(heart.ref, "me"):
        heart.clock.now += LEASE_SECONDS + 1
        heart.memory.acquire(replace(heart.ref, attempt=2), "another", LEASE_SECONDS)
        heart.beat(after_seconds=0)
    assert heart.holder() == "another"


def test_a_missing_lease_is_taken_again(heart: Heart) -> None:
    """Redis was flushed: the holder goes on."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        heart.memory.flush()
        heart.beat()
        assert heart.holder() == "me" and not lease.is_lost


def test_a_missing_lease_is_not_taken_over_a_newer_attempts_mark(heart: Heart) -> None:
    """That attempt was started and died: its mark says so to the keeper."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        heart.memory.flush()
        heart.memory.acquire(replace(heart.ref, attempt=2), "dead", LEASE_SECONDS)
        heart.clock.now += 2 * LEASE_SECONDS
        heart.beat(after_seconds=0)
        assert lease.is_lost
    assert heart.leases.view(heart.ref) == LeaseView(owner=None, started_attempt=2)


def test_without_an_answer_no_write_begins(heart: Heart) -> None:
    """Whether the lease reaches to the deadline isn't known."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        heart.leases.script.fail("renew", AWAY)
        assert not heart.heartbeat.extend(lease, 30)
        assert not lease.is_lost


def test_a_cancel_is_heard(stage: Stage, heart: Heart) -> None:
    """A long call looks at it now and then."""
    with heart.heartbeat.hold(heart.ref, "me") as lease:
        assert lease is not None
        heart.beat()
        assert not lease.is_cancel_requested
        stage.runs.cancel(heart.run_id, actor="ann", reason="no")
        heart.beat()
        assert lease.is_cancel_requested


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), TypeError("a defect")])
def test_no_trouble_over_one_lease_ends_the_others(stage: Stage, heart: Heart, error: Exception) -> None:
    """One thread keeps them all: if it ended, every step of the process would look dead."""
    other = StepRef(run_id=stage.queued(), number=1, attempt=1)
    with heart.heartbeat.hold(heart.ref, "me"), heart.heartbeat.hold(other, "me too"):
        heart.steps.script.fail("beat", error)
        heart.beat()
        assert heart.leases.renewed_seconds == [LEASE_SECONDS, LEASE_SECONDS]


def test_the_lease_of_a_session_is_no_steps(heart: Heart) -> None:
    """An interactive caller's: there is no step 0 to ask the store about."""
    with heart.heartbeat.hold(replace(heart.ref, number=0), "me"):
        heart.beat()
    assert heart.steps.script.calls == []


def test_two_deliveries_of_one_step_are_two_leases(heart: Heart) -> None:
    """After a flush a second delivery may get the lease; the first one's end must not stop the second's heart."""
    first = heart.heartbeat.hold(heart.ref, "first")
    first.__enter__()
    heart.memory.flush()
    with heart.heartbeat.hold(heart.ref, "second") as second:
        assert second is not None
        first.__exit__(None, None, None)
        heart.beat(after_seconds=LEASE_SECONDS - 1)
        assert heart.holder(in_seconds=LEASE_SECONDS - 1) == "second"


class BeatingClock(FakeClock):
    """Sleeps no longer than it takes to let others run."""

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        threading.Event().wait(0.001)


def test_the_thread_lives_while_something_is_held(stage: Stage) -> None:
    """An idle worker has none, and asks Redis nothing; the next lease gets a new one."""
    clock = BeatingClock()
    leases = ScriptedLeases(MemoryLeases(lease_seconds=LEASE_SECONDS))
    heartbeat = Heartbeat(leases, stage.steps, clock, LEASE_SECONDS)
    ref = StepRef(run_id=stage.queued(), number=1, attempt=1)
    for renewals in (3, 6):
        with heartbeat.hold(ref, "me"):
            eventually(lambda: len(leases.renewed_seconds) >= renewals, what="beats")  # noqa: B023 - waited for here
        eventually(lambda: not heartbeat_threads(), what="the thread's end")
        del leases.renewed_seconds[3:]
    assert set(clock.slept) == {LEASE_SECONDS / 3}


def heartbeat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "agentq-heartbeat"]


class TestSuppressedDeliveries:
    """What a holder knows of deliveries that came to nothing: the whole number, or that it isn't known."""

    AGE = 30.0  # Of the run, as it is read under the lease.

    @pytest.fixture
    def counting(self, heart: Heart) -> Heart:
        """Redis has counted since before the run began."""
        heart.memory.survey([])
        heart.clock.now += 2 * self.AGE
        return heart

    def test_it_hears_of_them_with_what_it_asks_anyway(self, counting: Heart) -> None:
        """No call more for a number that is mostly nought."""
        with counting.heartbeat.hold(counting.ref, "me") as lease:
            assert lease is not None
            assert lease.suppressed(run_age_seconds=self.AGE) == 0
            counting.memory.acquire(counting.ref, "another", LEASE_SECONDS)
            assert lease.suppressed(run_age_seconds=self.AGE) == 0, "nobody told it yet"
            counting.beat()
            assert lease.suppressed(run_age_seconds=self.AGE) == 1
            counting.memory.acquire(counting.ref, "another", LEASE_SECONDS)
            assert counting.heartbeat.extend(lease, 60)
            assert lease.suppressed(run_age_seconds=self.AGE) == 2
        assert counting.leases.script.calls == ["acquire", "renew", "renew", "release"]

    def test_after_a_flush_it_is_not_known(self, counting: Heart) -> None:
        """What came before is forgotten, however many come after; also when Redis is marked anew."""
        with counting.heartbeat.hold(counting.ref, "me") as lease:
            assert lease is not None
            counting.memory.acquire(counting.ref, "another", LEASE_SECONDS)
            counting.memory.flush()
            counting.beat()
            assert lease.suppressed(run_age_seconds=self.AGE) is None
            counting.memory.survey([])
            counting.beat()
            assert lease.suppressed(run_age_seconds=self.AGE) is None
        with counting.heartbeat.hold(counting.ref, "me") as lease:
            assert lease is not None
            assert lease.suppressed(run_age_seconds=self.AGE) is None, "neither for the next holder of that run"
            assert lease.suppressed(run_age_seconds=1.0) == 0, "but for one that began later"

    def test_one_with_nothing_to_do_is_counted_once(self, counting: Heart) -> None:
        """Also when a beat that was under way gives the lease back a second time."""
        with counting.heartbeat.hold(counting.ref, "me") as lease:
            assert lease is not None
            lease.comes_to_nothing = True
        counting.heartbeat._beat(lease)
        assert counting.memory.survey([counting.ref]).views[0].suppressed == 1
