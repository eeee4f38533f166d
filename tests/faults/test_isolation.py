"""A turn that kills its process takes all turns in it along: which of them it was shows when they run alone."""

from collections.abc import Iterator

import pytest

from agentq.domain.model import DeadLetterReason
from tests.support.databases import fresh_postgresql
from tests.support.poison_agents import POISON
from tests.support.system import AGENT, System

INNOCENTS = 99


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("deployment")
    changes = {"agents": ("tests.support.poison_agents",), "model_concurrency": INNOCENTS + 6}
    with fresh_postgresql() as url, System(folder, url, **changes) as system:
        system.keeper()
        yield system


def test_a_poison_turn_ends_as_a_dead_letter_and_all_beside_it_complete(system: System) -> None:
    """Charged for it, a hundred runs would be dead-lettered for the fault of one."""
    shared, _ = system.workers("model", "isolated")
    with system.receiver.holding("innocent"):
        innocents = [system.enqueue(asks=["innocent"]) for _ in range(INNOCENTS)]
        system.receiver.wait_for("innocent", INNOCENTS)
        poison = system.client.enqueue(AGENT, POISON)
        system.receiver.wait_for(POISON)
        shared.wait()
    shared.start()
    run = system.wait(poison, seconds=60)
    assert run.dead_letter is not None and run.dead_letter.reason is DeadLetterReason.RETRIES_EXHAUSTED
    # In the process that it shared, and as often as its budget says in its own.
    assert len(system.receiver.requests(POISON)) == 1 + system.settings.crashes_max
    for run_id in innocents:
        system.completes(run_id, seconds=60)
        assert system.step(run_id, 1).crashes == 0
