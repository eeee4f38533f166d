"""The contract of leases, in memory and in Valkey alike; what only Valkey has comes after it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from redis import Redis

from agentq.adapters.memory_leases import MemoryLeases
from agentq.adapters.redis.client import redis_client
from agentq.adapters.redis.leases import SURVEY_MAX, RedisLeases
from agentq.adapters.redis.nudges import NOTES_MAX, RedisNudges
from agentq.domain.errors import ConfigurationError, LeasesUnavailableError
from agentq.domain.model import StepRef
from agentq.ports.leases import DeathNote, LeaseAnswer, Leases, LeaseView, Tally
from tests.support.valkey import ValkeyServer

ANN, BOB = "host/boot/11-1/ann", "host/boot/22-2/bob"
LONG = 60.0
SHORT = 0.05
SOON = 2.0
NOBODY = LeaseView(owner=None, started_attempt=None)


def suppressed(tally: Tally | None) -> int:
    assert tally is not None
    return tally.suppressed


def step(attempt: int = 1, number: int = 1) -> StepRef:
    return StepRef(run_id="run-1", number=number, attempt=attempt)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@dataclass(frozen=True)
class Subject:
    """Leases of either kind, and how their world is moved. A survey's lease time is SHORT here."""

    leases: Leases
    pass_time: Callable[[float], None]
    flush: Callable[[], None]


@pytest.fixture(params=["memory", "valkey"])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "memory":
        clock = [0.0]
        memory = MemoryLeases(lease_seconds=SHORT, elapsed_seconds=lambda: clock[0])
        return Subject(memory, lambda seconds: clock.__setitem__(0, clock[0] + seconds), memory.flush)
    server: ValkeyServer = request.getfixturevalue("server")
    server.flush()
    leases = RedisLeases(redis_client(server.url), prefix="agentq", deployment="d1", lease_seconds=SHORT)
    # Lease times are the server's own clock, which a test can't turn: here time really passes.
    return Subject(leases, time.sleep, server.flush)


class TestLeases:
    def test_an_attempt_is_held_by_one(self, subject: Subject) -> None:
        """Two deliveries of one message must not both execute it."""
        assert subject.leases.acquire(step(), ANN, LONG).answer is LeaseAnswer.HELD
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    def test_an_attempt_starts_once(self, subject: Subject) -> None:
        """A dead worker's message, delivered again, starts nothing: only the requeue charges the crash."""
        subject.leases.acquire(step(), ANN, SHORT)
        subject.pass_time(2 * SHORT)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.ALREADY_STARTED

    def test_not_even_its_owner_starts_an_attempt_twice(self, subject: Subject) -> None:
        """A delivery that comes again to the same process must not slip through."""
        subject.leases.acquire(step(), ANN, LONG)
        assert subject.leases.acquire(step(), ANN, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    def test_a_clean_release_lets_the_attempt_start_again(self, subject: Subject) -> None:
        """A hand-back, a take-back or a store that is away costs no attempt."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.leases.release(step(), ANN)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD

    def test_who_leaves_cleanly_after_the_lease_ran_out_takes_the_mark_off(self, subject: Subject) -> None:
        """It was slow, not dead: no crash is to be charged."""
        subject.leases.acquire(step(), ANN, SHORT)
        subject.pass_time(2 * SHORT)
        subject.leases.release(step(), ANN)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD

    def test_only_the_owner_releases(self, subject: Subject) -> None:
        """A worker that lost its lease must not end its successor's."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.leases.release(step(), BOB)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    def test_a_higher_attempt_takes_the_lease_over(self, subject: Subject) -> None:
        """After the requeue the old attempt is history, even if its process still breathes."""
        subject.leases.acquire(step(1), ANN, LONG)
        assert subject.leases.acquire(step(2), BOB, LONG).answer is LeaseAnswer.HELD
        assert not subject.leases.renew(step(1), ANN, LONG)
        assert subject.leases.survey([step()]).views == (LeaseView(owner=BOB, started_attempt=2),)

    def test_a_lower_attempt_is_refused(self, subject: Subject) -> None:
        """A message that waited through a requeue comes too late, held or not."""
        subject.leases.acquire(step(2), ANN, SHORT)
        assert subject.leases.acquire(step(1), BOB, LONG).answer is LeaseAnswer.HELD_BY_OTHER
        subject.pass_time(2 * SHORT)
        assert subject.leases.acquire(step(1), BOB, LONG).answer is LeaseAnswer.ALREADY_STARTED

    def test_a_renewed_lease_is_held_on(self, subject: Subject) -> None:
        """The heartbeat is what tells a slow worker from a dead one."""
        subject.leases.acquire(step(), ANN, SHORT)
        assert subject.leases.renew(step(), ANN, LONG)
        subject.pass_time(2 * SHORT)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    def test_a_renewal_never_shortens(self, subject: Subject) -> None:
        """A beat that was sent before the lease was extended to a write's deadline may arrive after that."""
        subject.leases.acquire(step(), ANN, SHORT)
        subject.leases.renew(step(), ANN, LONG)
        assert subject.leases.renew(step(), ANN, SHORT)
        subject.pass_time(2 * SHORT)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    def test_a_missing_lease_is_taken_again(self, subject: Subject) -> None:
        """A flushed Redis costs time, not runs."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.flush()
        assert subject.leases.renew(step(), ANN, LONG)
        assert subject.leases.survey([step()]).views == (LeaseView(owner=ANN, started_attempt=1),)

    def test_a_lease_that_ran_out_is_taken_again(self, subject: Subject) -> None:
        """A worker that held its breath too long goes on, unless somebody else began."""
        subject.leases.acquire(step(), ANN, SHORT)
        subject.pass_time(2 * SHORT)
        assert subject.leases.renew(step(), ANN, LONG)

    def test_a_lease_that_another_took_after_a_flush_is_lost(self, subject: Subject) -> None:
        """Held by another is lost, though the attempt is the same."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.flush()
        subject.leases.acquire(step(), BOB, LONG)
        assert not subject.leases.renew(step(), ANN, LONG)

    def test_a_missing_lease_is_not_taken_over_the_mark_of_a_newer_attempt(self, subject: Subject) -> None:
        """The newer attempt may have died over its write: the older one must not begin its own."""
        subject.leases.acquire(step(1), ANN, LONG)
        subject.leases.acquire(step(2), BOB, SHORT)
        subject.pass_time(2 * SHORT)
        assert not subject.leases.renew(step(1), ANN, LONG)

    def test_a_missing_lease_is_taken_over_the_dead_of_the_same_attempt(self, subject: Subject) -> None:
        """Who still lives has it; the dead one can't come back."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.flush()
        subject.leases.acquire(step(), BOB, SHORT)
        subject.pass_time(2 * SHORT)
        assert subject.leases.renew(step(), ANN, LONG)

    def test_a_survey_tells_the_held_from_the_dead_and_the_unknown(self, subject: Subject) -> None:
        """Died, lost and at work are three different verdicts."""
        subject.leases.acquire(step(number=1), ANN, LONG)
        subject.leases.acquire(step(number=2), BOB, SHORT)
        subject.pass_time(2 * SHORT)
        survey = subject.leases.survey([step(number=number) for number in (1, 2, 3)])
        assert survey.views == (
            LeaseView(owner=ANN, started_attempt=1),
            LeaseView(owner=None, started_attempt=1),
            NOBODY,
        )

    def test_a_survey_is_trusted_after_a_lease_time_only(self, subject: Subject) -> None:
        """After a flush a living holder needs a heartbeat to be seen again."""
        assert not subject.leases.survey([]).is_trustworthy
        subject.pass_time(2 * SHORT)
        assert subject.leases.survey([]).is_trustworthy
        subject.flush()
        assert not subject.leases.survey([]).is_trustworthy
        subject.pass_time(2 * SHORT)
        assert subject.leases.survey([]).is_trustworthy

    def test_a_survey_of_many_keeps_their_order(self, subject: Subject) -> None:
        """However many rounds it takes."""
        numbers = range(SURVEY_MAX + 2)
        for number in (0, SURVEY_MAX - 1, SURVEY_MAX, SURVEY_MAX + 1):
            subject.leases.acquire(step(number=number), f"{ANN}{number}", LONG)
        views = subject.leases.survey([step(number=number) for number in numbers]).views
        held = {number: view.owner for number, view in enumerate(views) if view.owner}
        assert len(views) == len(numbers)
        assert held == {n: f"{ANN}{n}" for n in (0, SURVEY_MAX - 1, SURVEY_MAX, SURVEY_MAX + 1)}

    def test_the_dead_are_buried_and_their_mark_stays(self, subject: Subject) -> None:
        """The parent saw its child die: no need to wait for the lease, but the crash is to be charged."""
        subject.leases.acquire(step(), ANN, LONG)
        assert subject.leases.bury(step(), "host/boot/11-1/")
        assert subject.leases.survey([step()]).views == (LeaseView(owner=None, started_attempt=1),)
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.ALREADY_STARTED
        assert subject.leases.acquire(step(2), BOB, LONG).answer is LeaseAnswer.HELD

    def test_the_living_are_not_buried(self, subject: Subject) -> None:
        """A note that comes late must not end the next attempt's lease."""
        assert not subject.leases.bury(step(), "host/boot/11-1/")
        subject.leases.acquire(step(), BOB, LONG)
        assert not subject.leases.bury(step(), "host/boot/11-1/")
        assert subject.leases.acquire(step(), ANN, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    def test_an_attempt_that_was_lost_may_be_let_start_again(self, subject: Subject) -> None:
        """Under a standing fence a dead call's attempt starts once more, as a question about it."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.leases.bury(step(), ANN)
        assert subject.leases.unmark(step())
        assert subject.leases.unmark(step())
        assert subject.leases.acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD

    def test_neither_the_living_nor_another_attempt_loses_its_mark(self, subject: Subject) -> None:
        """Or it would start a second time, and its crash would be forgotten."""
        subject.leases.acquire(step(2), ANN, LONG)
        assert not subject.leases.unmark(step(2))
        subject.leases.bury(step(2), ANN)
        assert not subject.leases.unmark(step(1))
        assert subject.leases.acquire(step(2), BOB, LONG).answer is LeaseAnswer.ALREADY_STARTED

    def test_a_survey_says_who_started_an_attempt_and_when(self, subject: Subject) -> None:
        """Of a dead reader nothing is written anywhere else."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.pass_time(SHORT)
        subject.leases.renew(step(), ANN, LONG)
        subject.leases.bury(step(), ANN)
        [view] = subject.leases.survey([step()]).views
        assert view.started_by == ANN
        assert view.started_seconds is not None and SHORT <= view.started_seconds < SOON

    def test_who_takes_a_missing_lease_again_leaves_open_when_the_attempt_began(self, subject: Subject) -> None:
        """A time that is too late would be worse than none."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.flush()
        subject.leases.renew(step(), ANN, LONG)
        [view] = subject.leases.survey([step()]).views
        assert (view.started_by, view.started_seconds) == (ANN, None)


class TestSuppressedDeliveries:
    """How often a step was delivered in vain, and whether that can be known."""

    def test_they_are_counted_per_step_over_all_attempts(self, subject: Subject) -> None:
        """Who asks why a step doesn't move finds out that it was delivered, and how often."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.leases.acquire(step(), BOB, LONG)
        assert subject.leases.acquire(step(), BOB, LONG).tally.suppressed == 2
        assert suppressed(subject.leases.renew(step(), ANN, LONG)) == 2
        assert subject.leases.acquire(step(2), BOB, LONG).tally.suppressed == 2
        assert subject.leases.acquire(step(number=2), BOB, LONG).tally.suppressed == 0
        assert [view.suppressed for view in subject.leases.survey([step(), step(number=2)]).views] == [2, 0]

    def test_one_that_found_nothing_to_do_is_counted_when_it_is_given_back(self, subject: Subject) -> None:
        """It costs no call of its own, and doesn't take anybody's lease off."""
        subject.leases.acquire(step(), ANN, LONG)
        subject.leases.release(step(), ANN, is_suppressed=True)
        assert subject.leases.acquire(step(), ANN, LONG).tally.suppressed == 1
        subject.leases.release(step(), BOB, is_suppressed=True)
        assert suppressed(subject.leases.renew(step(), ANN, LONG)) == 2
        subject.leases.release(step(), ANN)
        assert subject.leases.survey([step()]).views[0].suppressed == 2

    def test_for_how_long_all_were_counted_begins_anew_with_a_flush(self, subject: Subject) -> None:
        """What was counted before is lost, and nobody may take the rest for the whole."""
        subject.leases.survey([])
        subject.pass_time(SHORT)
        tally = subject.leases.acquire(step(), ANN, LONG).tally
        assert SHORT <= tally.counted_seconds < SOON
        subject.flush()
        for _ in range(2):
            tally_after = subject.leases.renew(step(), ANN, LONG)
            assert tally_after is not None and tally_after.counted_seconds < SHORT
            assert subject.leases.survey([]).counted_seconds < SHORT

    def test_before_anybody_marked_the_server_nothing_is_known(self, subject: Subject) -> None:
        """Whatever a count says: since when, nobody knows."""
        assert subject.leases.acquire(step(), ANN, LONG).tally.counted_seconds < LONG


class TestRedisLeases:
    def make(self, url: str, deployment: str = "d1", prefix: str = "agentq") -> RedisLeases:
        client = redis_client(url, timeout_seconds=0.5)
        return RedisLeases(client, prefix=prefix, deployment=deployment, lease_seconds=SHORT)

    @pytest.fixture(autouse=True)
    def _flushed(self, server: ValkeyServer) -> None:
        server.flush()

    def test_each_call_is_one_round_trip(self, server: ValkeyServer) -> None:
        """Two round trips are a read step's whole budget."""
        leases = self.make(server.url)
        calls: list[Callable[[], object]] = [
            lambda: leases.acquire(step(), ANN, LONG),
            lambda: leases.renew(step(), ANN, LONG),
            lambda: leases.bury(step(), BOB),
            lambda: leases.unmark(step()),
            lambda: leases.survey([step(number=number) for number in range(500)]),
            lambda: leases.release(step(), ANN),
        ]
        for call in calls:
            call()  # From here on the server knows the scripts.
        with server.client() as client:
            before = _scripts_run(client)
            for call in calls:
                call()
            assert _scripts_run(client) - before == len(calls)

    def test_a_restarted_server_is_not_trusted_at_once(self) -> None:
        """Its file may be older than its last leases, and the marker with it."""
        with ValkeyServer(is_durable=True) as server:
            leases = self.make(server.url)
            leases.survey([])
            time.sleep(2 * SHORT)
            assert leases.survey([]).is_trustworthy
            server.restart()
            assert not self.make(server.url).survey([]).is_trustworthy

    def test_another_deployment_on_the_same_keys_is_refused(self, server: ValkeyServer) -> None:
        """Two databases with one Redis would reap each other's steps."""
        self.make(server.url, "d1").claim_deployment()
        self.make(server.url, "d1").claim_deployment()
        with pytest.raises(ConfigurationError, match=r"belong to deployment 'd1'.*AGENTQ_KEY_PREFIX"):
            self.make(server.url, "d2").claim_deployment()
        self.make(server.url, "d2", prefix="other").claim_deployment()

    def test_whose_the_keys_are_can_be_asked_without_claiming_them(self, server: ValkeyServer) -> None:
        """Who only looks must not decide whose they are."""
        assert not self.make(server.url, "d1").check_claim()
        self.make(server.url, "d2").claim_deployment()
        assert self.make(server.url, "d2").check_claim()
        with pytest.raises(ConfigurationError, match=r"belong to deployment 'd2'"):
            self.make(server.url, "d1").check_claim()

    def test_deployments_have_leases_of_their_own(self, server: ValkeyServer) -> None:
        """Even where nobody claimed anything."""
        self.make(server.url, "d1").acquire(step(), ANN, LONG)
        assert self.make(server.url, "d2").acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD

    def test_a_count_is_not_vouched_for_longer_than_it_is_kept(self, server: ValkeyServer) -> None:
        """An older one may have been forgotten in between."""
        client = redis_client(server.url, timeout_seconds=0.5)
        leases = RedisLeases(client, prefix="agentq", deployment="d1", lease_seconds=SHORT, mark_seconds=0.5)
        leases.survey([])
        with server.client() as raw:
            since, server_id = raw.get("agentq:d1:leases-since").split()
            raw.set("agentq:d1:leases-since", f"{int(since) - 1_000_000} {server_id}")
        assert leases.acquire(step(), ANN, LONG).tally.counted_seconds == 0.5
        assert leases.survey([]).counted_seconds == 0.5

    def test_a_restarted_server_vouches_for_nothing_before(self) -> None:
        """Its counts may be older than its marker says: the first call that it gets again must notice, not a keeper."""
        with ValkeyServer(is_durable=True) as server:
            self.make(server.url).survey([])
            time.sleep(2 * SHORT)
            assert self.make(server.url).acquire(step(), ANN, LONG).tally.counted_seconds >= 2 * SHORT
            server.restart()
            tally = self.make(server.url).renew(step(), ANN, LONG)
            assert tally is not None and tally.counted_seconds < SHORT

    def test_a_socket_works_as_well(self, server: ValkeyServer) -> None:
        """The embedded default has no port."""
        assert self.make(server.socket_url).acquire(step(), ANN, LONG).answer is LeaseAnswer.HELD
        assert self.make(server.url).acquire(step(), BOB, LONG).answer is LeaseAnswer.HELD_BY_OTHER

    @pytest.mark.parametrize("trouble", ["away", "hung", "full"])
    def test_trouble_is_neither_held_nor_lost(self, trouble: str) -> None:
        """Can't reach Redis must not look like an answer, and must not take long."""
        with ValkeyServer() as server:
            leases = self.make(server.url)
            leases.acquire(step(), ANN, LONG)
            if trouble == "away":
                server.stop()
            elif trouble == "hung":
                server.pause()
            else:
                with server.client() as client:
                    client.config_set("maxmemory", "1")
            began = time.monotonic()
            with pytest.raises(LeasesUnavailableError):
                leases.renew(step(), ANN, LONG)
            assert time.monotonic() - began < SOON

    def test_it_goes_on_when_the_server_is_back(self) -> None:
        """The next heartbeat must find its way, with a server that has lost the scripts too."""
        with ValkeyServer() as server:
            leases = self.make(server.url)
            leases.acquire(step(), ANN, LONG)
            server.restart()
            assert leases.renew(step(), ANN, LONG)


class TestRedisNudges:
    @pytest.fixture
    def nudges(self, server: ValkeyServer) -> RedisNudges:
        server.flush()
        return RedisNudges(redis_client(server.url), prefix="agentq", deployment="d1")

    def note(self, number: int = 1) -> DeathNote:
        return DeathNote(ref=step(number=number), process="host/boot/11-1/")

    def test_notes_come_once_each(self, nudges: RedisNudges) -> None:
        """The keeper acts on a death at once, and only one time."""
        nudges.leave_note(self.note(1))
        nudges.leave_note(self.note(2))
        nudges.leave_note(self.note(2))
        assert set(nudges.wait(5)) == {self.note(1), self.note(2)}
        assert nudges.wait(SHORT) == []

    def test_a_nudge_ends_the_wait(self, nudges: RedisNudges) -> None:
        """It needs no note."""
        nudges.nudge()
        nudges.nudge()
        began = time.monotonic()
        assert nudges.wait(5) == []
        assert time.monotonic() - began < 1

    def test_a_nudge_pushes_no_note_out(self, nudges: RedisNudges) -> None:
        """Nudges are many, notes are few."""
        nudges.leave_note(self.note())
        for _ in range(NOTES_MAX):
            nudges.nudge()
        assert nudges.wait(5) == [self.note()]

    def test_notes_that_nobody_reads_are_bounded(self, nudges: RedisNudges, server: ValkeyServer) -> None:
        """No keeper for a day must not fill Redis."""
        for number in range(NOTES_MAX + 5):
            nudges.leave_note(self.note(number))
        with server.client() as client:
            assert client.llen("agentq:d1:nudges") == NOTES_MAX

    def test_a_note_of_another_version_is_left_out(self, nudges: RedisNudges, server: ValkeyServer) -> None:
        """A rolling deploy must not stop the keeper."""
        with server.client() as client:
            client.lpush("agentq:d1:nudges", '{"kind": "of the next version"}', "no JSON")
        nudges.leave_note(self.note())
        assert nudges.wait(5) == [self.note()]

    def test_one_keeper_leads_until_it_is_silent(self, nudges: RedisNudges) -> None:
        """Two do the same work twice, none does none."""
        assert nudges.lead("ann", LONG)
        assert not nudges.lead("bob", LONG)
        assert nudges.lead("ann", SHORT)
        time.sleep(2 * SHORT)
        assert nudges.lead("bob", LONG)
        assert not nudges.lead("ann", SHORT)

    def test_telling_people_is_an_office_of_its_own(self, nudges: RedisNudges) -> None:
        """The leader may not know how to tell anybody; of those that do, one tells, or people hear it twice."""
        assert nudges.lead("ann", LONG)
        assert nudges.lead_telling("bob", LONG)
        assert not nudges.lead_telling("ann", LONG)
        leader = nudges.leader()
        assert leader is not None and leader.owner == "ann"

    def test_it_is_known_who_leads_and_for_how_long(self, nudges: RedisNudges) -> None:
        """A leader that changes all the time has a reason."""
        assert nudges.leader() is None
        nudges.lead("ann", LONG)
        time.sleep(SHORT)
        nudges.lead("ann", LONG)
        leader = nudges.leader()
        assert leader is not None and leader.owner == "ann"
        assert leader.seconds is not None and SHORT <= leader.seconds < LONG

    def test_without_redis_a_wait_is_a_wait(self) -> None:
        """A keeper must not spin while Redis is away."""
        with ValkeyServer() as server:
            nudges = RedisNudges(redis_client(server.url), prefix="agentq", deployment="d1")
            server.stop()
            nudges.leave_note(self.note())
            nudges.nudge()
            began = time.monotonic()
            assert nudges.wait(4 * SHORT) == []
            assert 4 * SHORT <= time.monotonic() - began < SOON
            with pytest.raises(LeasesUnavailableError):
                nudges.lead("ann", LONG)


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("http://localhost", "'http' is not a kind of Redis"),
            ("localhost:6379", "not a kind of Redis"),
            ("redis://localhost:port", "redis:// URL can't be read"),
            ("redis://localhost/queue", "can't be read"),
            ("redis://one;redis://two", "names one server"),
            ("redis://:secret@localhost?max=3", "takes no 'max'"),
        ],
    )
    def test_a_wrong_url_is_named_without_its_password(self, url: str, problem: str) -> None:
        """One clear line, and nothing to hide from a log."""
        with pytest.raises(ConfigurationError, match=problem) as caught:
            redis_client(url)
        assert "secret" not in str(caught.value)


def _scripts_run(client: Redis) -> int:
    stats: Any = client.info("commandstats")
    return sum(entry["calls"] for name, entry in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))
