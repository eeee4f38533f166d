"""Plain writes whose process died, or whose call raised: their tool's probe is asked, and believed by its rules."""

import os
import signal
from collections.abc import Iterator

import pytest

from agentq.domain.model import DeadLetterReason, RunStatus
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.fault_agents import question
from tests.support.probed_agents import SETTLES_WITHIN_SECONDS
from tests.support.receiver import Hold
from tests.support.system import System, call
from tests.support.waiting import eventually

SEEN_SECONDS = 3.0  # A death that the parent saw.
PROBES_MAX = 4


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Probes have a second to answer, and are asked four times."""
    folder = tmp_path_factory.mktemp("deployment")
    database = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
    changes = {"agents": ("tests.support.probed_agents",), "probe_deadline_seconds": 1.0, "probes_max": PROBES_MAX}
    with database as url, System(folder, url, operation_deadline_seconds=3.0, **changes) as system:
        system.keeper()
        system.workers("model", "tools")
        yield system


def kill_in_call(system: System, name: str) -> None:
    os.kill(system.receiver.wait_for(name).pid, signal.SIGKILL)


def test_happened_settles_a_dead_processes_write_at_once(system: System) -> None:
    """No person is bothered, nothing is repeated, and nobody waits for a deadline."""
    run_id = system.enqueue([call("pay", "once"), call("look", "after")])
    with system.receiver.holding("once"):
        kill_in_call(system, "once")
        eventually(lambda: system.step(run_id, 2).result is not None, seconds=SEEN_SECONDS, what="the probe settles it")
    run = system.completes(run_id)
    assert str(run.steps[1].result).startswith("once paid: ")
    assert (system.receiver.effects_of(run_id), len(system.receiver.requests("once"))) == (1, 1)
    assert [event.data["answer"] for event in system.events(run_id, "probe.answered")] == ["happened"]


def test_nothing_is_not_believed_while_the_request_is_under_way(system: System) -> None:
    """A receiver that is slow would be asked too early, and the write made a second time."""
    run_id = system.enqueue([call("pay", "slow")])
    with system.receiver.holding("slow", when=Hold.BEFORE):
        kill_in_call(system, "slow")
        system.receiver.wait_for(question("slow"))
        eventually(
            lambda: "did_not_happen" in [event.data["answer"] for event in system.events(run_id, "probe.answered")],
            what="the early look is noted",
        )
        assert system.client.status(run_id) is RunStatus.RUNNING
    system.completes(run_id)
    assert (system.receiver.effects_of(run_id), len(system.receiver.requests("slow"))) == (1, 1)


def test_a_write_that_was_never_sent_runs_again_after_its_time(system: System) -> None:
    """Only a look later than the deadline and what the receiver may still do tells that nothing will come of it."""
    run_id = system.enqueue([call("pay_once_failing", "refused")])
    system.completes(run_id)
    [requeued] = [event for event in system.client.events(run_id) if event.kind == "step.requeued"]
    [first, second] = [event for event in system.client.events(run_id) if event.kind == "fence.stamped"]
    waited_seconds = (requeued.at - first.at).total_seconds()
    assert waited_seconds > system.settings.operation_deadline_seconds + SETTLES_WITHIN_SECONDS
    assert (second.attempt, requeued.data["charge"]) == (2, "try")
    assert system.receiver.effects_of(run_id) == 1


def test_a_lost_reply_is_found_at_once(system: System) -> None:
    """The worker that lost it lives, and asks."""
    run_id = system.enqueue([call("pay_without_reply", "unheard")])
    run = system.completes(run_id, seconds=SEEN_SECONDS)
    assert str(run.steps[1].result).startswith("unheard paid")
    assert len(system.receiver.requests("unheard")) == 1


def test_a_write_that_kills_its_process_every_time_ends_as_a_dead_letter(system: System) -> None:
    """Its probe says each time that nothing happened; without a charge it would go on for ever."""
    run_id = system.enqueue([call("pay_deadly", "poison")])
    run = system.wait(run_id, seconds=60)
    assert run.dead_letter is not None and run.dead_letter.reason is DeadLetterReason.RETRIES_EXHAUSTED
    assert not run.dead_letter.outcome_unknown and run.pending_effect is None


@pytest.mark.parametrize("name", ["raises", "nonsense", "can't tell"])
def test_a_probe_that_tells_nothing_leaves_the_write_unknown(system: System, name: str) -> None:
    """A person decides; the write is not repeated, and the run is not lost."""
    run_id = system.enqueue([call("pay_somebody_vague", name)])
    with system.receiver.holding(name):
        kill_in_call(system, name)
        run = system.stops_as_unknown(run_id)
    assert run.dead_letter is not None and "its probe" in run.dead_letter.error
    assert system.receiver.effects_of(run_id) == 1


def test_a_probe_that_hangs_is_ended_and_leaves_the_write_unknown(system: System) -> None:
    """It must hold up nobody for longer than its deadline, as often as its budget says."""
    run_id = system.enqueue([call("pay", "hanging")])
    with system.receiver.holding("hanging", question("hanging")):
        kill_in_call(system, "hanging")
        run = system.stops_as_unknown(run_id)
    assert run.dead_letter is not None and "never answered" in run.dead_letter.error
    assert len(system.receiver.requests(question("hanging"))) == PROBES_MAX
    assert system.receiver.effects_of(run_id) == 1


def test_a_cancelled_write_that_happened_is_recorded_and_nothing_follows(system: System) -> None:
    """The cancel waited for the write; the probe ends it with the outcome."""
    run_id = system.enqueue([call("pay", "cancelled"), call("look", "never")])
    with system.receiver.holding("cancelled"):
        request = system.receiver.wait_for("cancelled")
        system.client.cancel(run_id, reason="wrong customer")
        os.kill(request.pid, signal.SIGKILL)
        run = system.wait(run_id, seconds=SEEN_SECONDS)
    assert run.status is RunStatus.CANCELLED
    assert str(run.steps[1].result).startswith("cancelled paid")
    assert not system.receiver.requests("never")
