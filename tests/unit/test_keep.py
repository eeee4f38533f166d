"""The keeper's loop: who leads, in what order it works, and what it survives."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from agentq.domain.errors import BrokerUnavailableError, LeasesUnavailableError, StoreUnavailableError
from agentq.domain.model import StepRef
from agentq.ports.dispatch import Wakeup
from agentq.ports.keeping import KeeperStore
from agentq.ports.leases import DeathNote, Nudges
from agentq.ports.runs import RunStore
from agentq.services.keep import LEADER_LEASES, SEE_AGENTS_SECONDS, Keeper
from agentq.services.notify import Notifier
from agentq.services.reap import Reaper
from tests.support.fakes import FakeClock, RecordingDispatcher

INTERVAL_SECONDS = 2.0
NOTE = DeathNote(ref=StepRef(run_id="r", number=2, attempt=1), process="host/boot/9-")


class Day:
    """All that a keeper works with: keeps what it did, in order, and stops it after so many passes."""

    def __init__(self, *, passes: int = 1, serves: Mapping[str, int] | None = None, notifies: bool = False) -> None:
        self.did: list[object] = []
        self.leads = self.leads_telling = True
        self.raises: dict[str, list[Exception]] = {}
        self.clock = FakeClock()
        self.stop = Stop(passes, self.clock)
        everything: Any = self
        self.keeper = Keeper(
            reaper=cast(Reaper, everything),
            keeping=cast(KeeperStore, everything),
            runs=cast(RunStore, everything),
            dispatcher=RecordingDispatcher(),
            nudges=cast(Nudges, everything),
            owner="me",
            interval_seconds=INTERVAL_SECONDS,
            backlog_max=10,
            elapsed_seconds=self.clock.elapsed_seconds,
            serves=serves or {},
            notifier=cast(Notifier, everything) if notifies else None,
        )

    def keep(self) -> list[object]:
        self.keeper.keep(cast(threading.Event, self.stop))
        return self.did

    # --- What the keeper asks for

    def lead(self, owner: str, seconds: float) -> bool:
        self._do("lead")
        assert (owner, seconds) == ("me", INTERVAL_SECONDS * LEADER_LEASES)
        return self.leads

    def lead_telling(self, owner: str, seconds: float) -> bool:
        self._do("lead telling")
        assert (owner, seconds) == ("me", INTERVAL_SECONDS * LEADER_LEASES)
        return self.leads_telling

    def notify(self) -> None:
        self._do("notify")

    def wait(self, seconds: float) -> list[DeathNote]:
        self._do("wait")
        self.stop.wait(seconds)
        return [NOTE]

    def bury(self, notes: Sequence[DeathNote]) -> None:
        self._do(f"bury {len(notes)}")

    def take_due(self, limit: int, *, first_steps: bool) -> list[Wakeup]:
        self._do("take first steps" if first_steps else "take due")
        return []

    def reap(self) -> None:
        self._do("reap")

    def see_agents(self, agents: Mapping[str, int]) -> None:
        self._do("see agents")

    def _do(self, what: str) -> None:
        self.did.append(what)
        if self.raises.get(what):
            raise self.raises[what].pop(0)


class Stop:
    """An event that is set after so many waits; time passes while it is waited for."""

    def __init__(self, waits: int, clock: FakeClock) -> None:
        self._left = waits
        self._clock = clock

    def is_set(self) -> bool:
        return self._left <= 0

    def wait(self, seconds: float) -> None:
        self._clock.now += seconds
        self._left -= 1


PASS = ["lead", "wait", "bury 1", "take due", "take first steps", "reap"]


def test_a_pass_acts_on_deaths_first_then_dispatches_then_reaps() -> None:
    """Whoever waits longest for a person's eyes comes first."""
    assert Day().keep() == PASS


def test_it_goes_on_until_it_is_stopped() -> None:
    """Every pass starts from what is stored."""
    assert Day(passes=3).keep() == PASS * 3


def test_who_does_not_lead_does_nothing() -> None:
    """It waits for the leader to fall silent."""
    day = Day(passes=3)
    day.leads = False
    assert day.keep() == ["lead"] * 3


@pytest.mark.parametrize(
    ("leads", "leads_telling", "did"),
    [
        (False, True, ["lead telling", "notify", "lead"]),
        (True, False, ["lead telling", *PASS]),
        (True, True, ["lead telling", "notify", *PASS]),
    ],
)
def test_people_are_told_by_a_keeper_that_can_whoever_leads(leads: bool, leads_telling: bool, did: list[str]) -> None:
    """The keeper beside a worker may lead, and only the one apart be told how to notify: nobody would ever hear."""
    day = Day(notifies=True)
    day.leads, day.leads_telling = leads, leads_telling
    assert day.keep() == did


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailableError("the database is away"),
        LeasesUnavailableError("Redis is away"),
        BrokerUnavailableError("the broker is away"),
        ValueError("a defect"),
    ],
)
@pytest.mark.parametrize("where", ["lead", "wait", "bury 1", "take due", "reap"])
def test_trouble_ends_a_pass_and_no_more(where: str, error: Exception) -> None:
    """It waits an interval, then begins anew: a server that is away must not make it spin, nor end it."""
    day = Day(passes=3)
    day.raises[where] = [error]
    began = day.clock.now
    assert day.keep()[-len(PASS) :] == PASS
    assert day.clock.now - began >= 2 * INTERVAL_SECONDS


def test_agents_are_seen_now_and_then() -> None:
    """So that a client can tell an unknown agent from one that no worker serves right now."""
    passes = int(2.5 * SEE_AGENTS_SECONDS / INTERVAL_SECONDS)
    did = Day(passes=passes, serves={"support": 1000}).keep()
    assert did.count("see agents") == 3
    assert did[0] == "see agents"


def test_agents_are_seen_by_those_who_do_not_lead_too() -> None:
    """Each keeper speaks for the worker beside it."""
    day = Day(serves={"support": 1000})
    day.leads = False
    assert day.keep() == ["see agents", "lead"]


def test_a_keeper_alone_serves_nobody() -> None:
    """It says nothing about agents."""
    assert "see agents" not in Day(passes=2).keep()
