"""The protocol, on the real spine, stores, leases and keeper: whatever fails and when, what is promised holds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentq.adapters.sql.engine import Database
from agentq.domain.model import RunStatus, StepRef
from tests.support.simulated_moves import ASKED_IN_VAIN, KEEP, LANDED, SENT, SHOWN, STALLED, play, walk
from tests.support.simulated_process import TAG_DEADLINE_SECONDS, real_parts
from tests.support.simulated_world import Time
from tests.support.simulation import Simulation

EXAMPLES = int(os.environ.get("PROTOCOL_EXAMPLES", "300"))  # Set, it is another walk each time; a long one: 20000.
MOVES_MAX = 70
SCRIPTS = (("look",), ("tag",), ("pay",), ("die",), ("wire",), ("look", "look"), ("pay", "pay"), ("look", "tag", "pay"))
CANCELS = (False, False, True)  # Most runs are to come further than that.
# Chance alone seldom comes as far as where two attempts, a person and a request that is under way meet.
OPENINGS = (
    (),
    SENT,
    SHOWN,
    (*SENT, "the fence's deadline passes", *KEEP),
    (*LANDED, "w0 until StepStore.settle", *STALLED, *KEEP),
    (*ASKED_IN_VAIN, "w1 ends", "the judge has the probe asked"),
    (*LANDED, "the fence's deadline passes, noted", "the fence's time to settle passes", *KEEP),
    ("w0 gets s2a1", "w0 until StepStore.fence", "! w0 stalls past its lease", *KEEP),
    ("w0 gets s2a1", "w0 until StepStore.fence", "! w0 loses the connection"),
)


@contextmanager
def simulated(
    database: Database, time: Time, *script: str, faults_max: int = 2, cancels: bool = True
) -> Iterator[Simulation]:
    simulation = Simulation(real_parts(database, time), script, faults_max=faults_max, cancels=cancels)
    try:
        yield simulation
    finally:
        simulation.end()


@pytest.mark.timeout(24 * 3600 if "PROTOCOL_EXAMPLES" in os.environ else 900)  # A broken example is made small first.
@settings(
    max_examples=EXAMPLES,
    derandomize="PROTOCOL_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    data=st.data(),
    opening=st.sampled_from(OPENINGS),
    script=st.sampled_from(SCRIPTS),
    faults_max=st.integers(0, 2),
    cancels=st.sampled_from(CANCELS),
    moves_max=st.integers(0, MOVES_MAX),
)
def test_whatever_fails_the_promises_hold_and_the_run_ends(
    database: Database,
    time: Time,
    data: st.DataObject,
    opening: tuple[str, ...],
    script: tuple[str, ...],
    faults_max: int,
    cancels: bool,
    moves_max: int,
) -> None:
    """Two workers, a keeper, a person, a broker, Redis, receivers and time, in any order, with up to two faults."""

    def pick(below: int) -> int:
        return data.draw(st.integers(0, below - 1))

    with simulated(database, time, *script, faults_max=faults_max, cancels=cancels) as simulation:
        play(simulation, *opening, skips_impossible=True)
        walk(simulation, pick, moves_max)


@pytest.mark.parametrize("script", SCRIPTS, ids="-".join)
def test_without_faults_a_run_completes_at_once(database: Database, time: Time, script: tuple[str, ...]) -> None:
    """The simulation itself is no obstacle: what it finds is found by what it does."""
    with simulated(database, time, *script, faults_max=0, cancels=False) as simulation:
        simulation.drain()
        expected = RunStatus.FAILED if "die" in script else RunStatus.COMPLETED
        assert simulation.run["status"] == expected
        writes = [number for number, name in enumerate(script, 2) if name in ("pay", "tag", "wire")]
        assert sorted(simulation.receiver.effects) == [("run", number) for number in writes]


def test_a_lost_answer_about_a_lease_is_not_charged_as_a_crash(database: Database, time: Time) -> None:
    """The lease may have been taken all the same: left behind, it would look like a process that died."""
    with simulated(database, time, "look") as simulation:
        play(simulation, "w0 gets s2a1", "! w0 loses the answer: Leases.acquire", "w0 goes on: Leases.release")
        simulation.drain()
        assert [step["crashes"] for step in simulation.picture.steps["run"]] == [0, 0, 0]


@pytest.mark.parametrize("ends", ["w0's heart: Leases.renew", "! w0's heart loses the answer: Leases.renew"])
def test_a_beat_behind_the_release_leaves_no_lease(database: Database, time: Time, ends: str) -> None:
    """It takes the missing lease again; of an attempt that was taken back, it would look like a process that died."""
    with simulated(database, time, "pay") as simulation:
        play(
            simulation,
            "w0 gets s2a1",
            "w0 goes on: Leases.acquire",
            "w0 goes on: StepStore.load",
            "w0 goes on, held: StepStore.fence",
            "the fence's deadline passes",
            "w0 goes on: StepStore.fence (answered)",
            "w0 goes on: Leases.renew",
            "w0's heart begins to beat",
            "w0 goes on: StepStore.take_back",
            "w0 goes on: Leases.release",
            ends,
        )
        simulation.drain()
        assert [step["crashes"] for step in simulation.picture.steps["run"]] == [0, 0, 0]


def test_a_short_deadline_shortens_no_lease(database: Database, time: Time) -> None:
    """The fence's deadline may pass while its holder still settles: it lives, and nothing is unknown."""
    with simulated(database, time, "tag") as simulation:
        play(
            simulation,
            "w0 gets s2a1",
            "w0 goes on: Leases.acquire",
            "w0 goes on: StepStore.load",
            "w0 goes on: StepStore.fence",
            "w0 goes on: Leases.renew",
        )
        time.now += TAG_DEADLINE_SECONDS + 1
        ref = StepRef(run_id="run", number=2, attempt=1)
        assert simulation.parts.leases.survey([ref]).views[0].owner is not None


def test_a_probe_that_a_person_has_asked_again_brings_the_run_to_its_end(database: Database, time: Time) -> None:
    """The mark that the dead process left on the attempt must not turn the question away."""
    with simulated(database, time, "wire") as simulation:
        play(simulation, *ASKED_IN_VAIN, "w1 ends")
        assert simulation.run["status"] == RunStatus.FAILED
        play(simulation, "the judge has the probe asked", *KEEP, "w0 gets s2a1", "w0 ends")
        simulation.drain()
        assert simulation.run["status"] == RunStatus.COMPLETED
        assert simulation.receiver.effects["run", 2] == 1
