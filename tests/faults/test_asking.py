"""Plain writes in doubt whose probe a person has asked again: workers ask, and go by its answer."""

import os
import signal
from collections.abc import Iterator

import pytest

from agentq.domain.model import RunStatus
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.fault_agents import question
from tests.support.system import System, call


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Probes have a second to answer, and are asked twice."""
    folder = tmp_path_factory.mktemp("deployment")
    database = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
    changes = {"agents": ("tests.support.probed_agents",), "probe_deadline_seconds": 1.0, "probes_max": 2}
    with database as url, System(folder, url, operation_deadline_seconds=3.0, **changes) as system:
        system.keeper()
        system.workers("model", "tools")
        yield system


def test_a_person_has_it_asked_again_when_the_receiver_answers_again(system: System) -> None:
    """One was done and one was not: whoever asks needn't know which. The last prober's mark turns no question away."""
    done = system.enqueue([call("pay", "done"), call("look", "after")])
    with system.receiver.holding("done", question("done"), question("not done")):
        os.kill(system.receiver.wait_for("done").pid, signal.SIGKILL)
        not_done = system.enqueue([call("pay_once_failing", "not done")])
        for run_id in (done, not_done):
            system.stops_as_unknown(run_id)

    for run_id in (done, not_done):
        system.client.resolve_by_probe(run_id, actor="ann", reason="it answers again")

    assert str(system.eventually_completes(done).steps[1].result).startswith("done paid: ")
    assert system.eventually_completes(not_done).steps[1].attempt == 2
    assert [system.receiver.effects_of(run_id) for run_id in (done, not_done)] == [1, 1]
    assert len(system.receiver.requests("done")) == 1
    assert [event.actor for event in system.events(done, "probe.requested")] == ["ann"]


def test_what_the_probe_still_can_t_tell_waits_for_a_person_again(system: System) -> None:
    """Asking costs nothing: the fence stood all the while, and the person's own word is taken as before."""
    run_id = system.enqueue([call("pay_somebody_vague", "can't tell")])
    with system.receiver.holding("can't tell"):
        os.kill(system.receiver.wait_for("can't tell").pid, signal.SIGKILL)
        first = system.stops_as_unknown(run_id).dead_letter
    system.client.resolve_by_probe(run_id)
    second = system.stops_as_unknown(run_id).dead_letter
    assert first is not None and second is not None and second.id > first.id
    system.client.resolve(run_id, happened="can't tell paid: 1", reason="seen in the ledger")
    system.client.replay(run_id)
    assert system.eventually_completes(run_id).status is RunStatus.COMPLETED
    assert system.receiver.effects_of(run_id) == 1
