"""A database that goes away, or loses a reply, at each point of a step: nothing is done twice, charged, or lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from agentq.domain.model import RunStatus, StepRef, StepState
from agentq.services.enqueue import new_run_id
from tests.support.locks import wait_for_waiters
from tests.support.proxy import Loss, PostgresProxy
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess

# What the statements carry beside the run's id. Their own text is sent only until they are prepared.
FENCE, TURN, DEAD_LETTER, REQUEUED = '"is_callable"', '"tool_calls"', "NOT_RETRYABLE", "step.requeued"
COMMIT = "COMMIT"
PATIENCE_SECONDS = 3.0

for_any_tool = pytest.mark.parametrize("tool", ["look", "put", "pay"])
for_any_write = pytest.mark.parametrize("tool", ["put", "pay"])


@pytest.fixture(scope="module")
def deployment(proxy: PostgresProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Workers and keeper reach the database through the proxy, the test does not."""
    with System(
        tmp_path_factory.mktemp("deployment"), proxy.server_url, settle_patience_seconds=PATIENCE_SECONDS
    ) as it:
        it.workers("model", "tools", database_url=proxy.url)
        keeper = KeeperProcess(replace(it.settings, database_url=proxy.url), it.folder)
        it.processes.append(keeper)
        keeper.start()
        keeper.wait_ready()  # One that begins while the database is away gives up.
        yield it


@pytest.fixture
def system(system: System, proxy: PostgresProxy) -> Iterator[System]:
    yield system
    proxy.come_back()


class TestAway:
    """It can't be reached for a while."""

    def test_before_a_read_begins_costs_the_read_nothing(self, system: System, proxy: PostgresProxy) -> None:
        """A database blink fails no run that only reads."""
        run_id = new_run_id()
        trap = proxy.trap(TURN, run_id, loss=Loss.OF_THE_REST, goes_away=True)
        system.enqueue([call("look", "early read")], run_id=run_id)
        trap.wait()
        proxy.wait_for_refusals(1)  # The step's message was there at once, and its worker found nobody.
        proxy.come_back()
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests("early read")) == 1

    @for_any_write
    def test_before_the_fence_keeps_the_write_from_being_called(
        self, system: System, proxy: PostgresProxy, tool: str
    ) -> None:
        """Nothing was stamped, so nothing may happen; and nothing is spent for it."""
        name = f"{tool} before the fence"
        run_id = new_run_id()
        trap = proxy.trap(FENCE, run_id, loss=Loss.OF_STATEMENT, goes_away=True)
        system.enqueue([call(tool, name)], run_id=run_id)
        trap.wait()
        proxy.wait_for_refusals(2)
        assert system.receiver.requests(name) == []
        proxy.come_back()
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests(name)) == 1

    @for_any_write
    def test_between_fence_and_call_the_outcome_is_kept_until_it_is_back(
        self, system: System, proxy: PostgresProxy, tool: str
    ) -> None:
        """The write is made, and its record waits."""
        name = f"{tool} after the fence"
        run_id = new_run_id()
        trap = proxy.trap(FENCE, run_id, loss=Loss.OF_THE_REST, goes_away=True)
        system.enqueue([call(tool, name)], run_id=run_id)
        trap.wait()
        system.receiver.wait_for(name)
        proxy.wait_for_refusals(2)
        proxy.come_back()
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests(name)) == 1

    @for_any_tool
    def test_during_the_settle_the_outcome_is_recorded_later(
        self, system: System, proxy: PostgresProxy, tool: str
    ) -> None:
        """Recording again isn't calling again."""
        name = f"{tool} settled late"
        run_id = system.enqueue([call(tool, name)])
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            proxy.go_away()
        proxy.wait_for_refusals(2)
        proxy.come_back()
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests(name)) == 1

    def test_for_longer_than_a_fence_lasts_the_fence_is_taken_back(self, system: System, proxy: PostgresProxy) -> None:
        """Its time is over before the worker knows that it stands: calling now would be calling without a deadline."""
        run_id = new_run_id()
        trap = proxy.trap(FENCE, run_id, loss=Loss.OF_REPLY, goes_away=True)
        system.enqueue([call("pay", "old fence")], run_id=run_id)
        trap.wait()
        fence = system.client.get(run_id).pending_effect
        assert fence is not None
        eventually(lambda: datetime.now(UTC) > fence.deadline_at)
        assert system.receiver.requests("old fence") == []
        proxy.come_back()
        system.completes(run_id)
        assert len(system.events(run_id, "fence.taken_back")) == 1
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests("old fence")) == 1

    def test_for_longer_than_the_patience_a_read_is_dropped_and_done_again(
        self, system: System, proxy: PostgresProxy
    ) -> None:
        """Asking twice is harmless, and no fault of the step: it is charged nothing."""
        run_id = system.enqueue([call("look", "forgotten")])
        with system.receiver.holding("forgotten"):
            system.receiver.wait_for("forgotten")
            proxy.go_away()
        let_go_of(system, run_id)
        proxy.come_back()
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests("forgotten")) == 2

    @for_any_write
    def test_for_longer_than_the_patience_the_outcome_of_a_write_is_kept_and_healed(
        self, system: System, proxy: PostgresProxy, tool: str
    ) -> None:
        """It waits in a file, and the run goes on when the database is back; a person has nothing to do with it."""
        name = f"{tool} unrecorded"
        run_id = system.enqueue([call(tool, name), call("look", f"after {name}")])
        with system.receiver.holding(name):
            system.receiver.wait_for(name)
            proxy.go_away()
        let_go_of(system, run_id)
        proxy.come_back()
        system.eventually_completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests(name)) == len(system.receiver.requests(f"after {name}")) == 1


class TestLostReply:
    """The statement was carried out, and the connection was cut before its answer arrived."""

    @for_any_write
    def test_the_worker_finds_its_own_fence_and_calls(self, system: System, proxy: PostgresProxy, tool: str) -> None:
        """Taken for somebody else's, the fence would stand for ever over a write that nobody made."""
        name = f"{tool} behind its own fence"
        run_id = new_run_id()
        trap = proxy.trap(FENCE, run_id, loss=Loss.OF_REPLY)
        system.enqueue([call(tool, name)], run_id=run_id)
        trap.wait()
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert (len(system.receiver.requests(name)), len(system.events(run_id, "fence.stamped"))) == (1, 1)

    @for_any_tool
    def test_the_worker_finds_its_own_settle_and_goes_on(self, system: System, proxy: PostgresProxy, tool: str) -> None:
        """The run's next step is woken all the same, and no outcome contradicts itself."""
        name = f"{tool} settled unheard"
        run_id = new_run_id()
        trap = proxy.trap(run_id, f"{name} ", loss=Loss.OF_REPLY)
        system.enqueue([call(tool, name)], run_id=run_id)
        trap.wait()
        assert system.step(run_id, 2).state is StepState.COMPLETED
        assert not system.completes(run_id).has_contradiction
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests(name)) == 1

    def test_a_model_turn_is_asked_one_time(self, system: System, proxy: PostgresProxy) -> None:
        """Its calls are in SQL already; asked again, the model might want others."""
        run_id = new_run_id()
        trap = proxy.trap(TURN, run_id, loss=Loss.OF_REPLY)
        system.enqueue([call("pay", "asked for once")], asks=["the turn"], run_id=run_id)
        trap.wait()
        assert len(system.completes(run_id).steps) == 3
        assert (len(system.receiver.requests("the turn")), len(system.receiver.requests("asked for once"))) == (1, 1)

    def test_a_requeue_is_charged_one_time(self, system: System, proxy: PostgresProxy) -> None:
        """Each try that isn't one brings a run nearer to its dead letter."""
        run_id = new_run_id()
        trap = proxy.trap(REQUEUED, run_id, then=COMMIT, loss=Loss.OF_REPLY)
        system.enqueue([call("look_again", "twice")], run_id=run_id)
        trap.wait()
        system.completes(run_id)
        assert spent(system, run_id) == (2, 1, 0)
        assert (len(system.receiver.requests("twice")), len(system.events(run_id, "step.requeued"))) == (2, 1)

    def test_a_run_stops_one_time(self, system: System, proxy: PostgresProxy) -> None:
        """The worker finds the dead letter that it made itself."""
        run_id = new_run_id()
        trap = proxy.trap(DEAD_LETTER, run_id, then=COMMIT, loss=Loss.OF_REPLY)
        system.enqueue([call("charge", "no answer", is_rejected=False)], run_id=run_id)
        trap.wait()
        run = system.stops_as_unknown(run_id)
        assert run.status is RunStatus.FAILED
        assert len(system.events(run_id, "run.dead_lettered")) == 1
        assert len(system.receiver.requests("no answer")) == 1


class TestAuditTable:
    """The table of the audit log is gone or locked, and everything else is there."""

    def test_gone_before_the_fence_it_keeps_the_write_from_being_called(
        self, system: System, proxy: PostgresProxy
    ) -> None:
        """A write that the audit log can't hold is not made; and nothing is spent for it."""
        run_id = new_run_id()
        trap = proxy.trap(FENCE, run_id, loss=Loss.OF_NOTHING)
        system.enqueue([call("pay", "no table")], run_id=run_id)
        trap.wait()
        with missing_table(system):
            trap.release()
            let_go_of(system, run_id)
            assert system.receiver.requests("no table") == []
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)
        assert len(system.receiver.requests("no table")) == 1

    def test_locked_before_the_fence_it_makes_the_write_wait(self, system: System, proxy: PostgresProxy) -> None:
        """Somebody's maintenance is no failure."""
        run_id = new_run_id()
        trap = proxy.trap(FENCE, run_id, loss=Loss.OF_NOTHING)
        system.enqueue([call("pay", "locked table")], run_id=run_id)
        trap.wait()
        with locked_table(system):
            trap.release()
            wait_for_waiters(system.database)
            assert system.receiver.requests("locked table") == []
        system.completes(run_id)
        assert spent(system, run_id) == (1, 0, 0)

    def test_gone_between_fence_and_settle_it_stops_the_run_of_a_write(self, system: System) -> None:
        """No run goes on over a write that the audit log doesn't hold; and nobody makes it again."""
        run_id = system.enqueue([call("pay", "table gone"), call("look", "after it")])
        with system.receiver.holding("table gone"):
            system.receiver.wait_for("table gone")
            with missing_table(system):
                system.receiver.release("table gone")
                run = system.stops_as_unknown(run_id)
                assert run.dead_letter is not None
                assert "AuditPersistenceFailedException" in run.dead_letter.error
                assert (len(system.receiver.requests("table gone")), system.receiver.requests("after it")) == (1, [])
        system.eventually_completes(run_id)
        assert len(system.receiver.requests("table gone")) == 1

    def test_gone_it_stops_no_run_that_reads(self, system: System) -> None:
        """What the audit log lost of a read is counted on the run."""
        run_id = system.enqueue([call("look", "table gone too")])
        with system.receiver.holding("table gone too"):
            system.receiver.wait_for("table gone too")
            with missing_table(system):
                system.receiver.release("table gone too")
                run = system.completes(run_id)
        assert run.events_lost > 0
        assert len(system.receiver.requests("table gone too")) == 1

    def test_locked_for_too_long_it_is_as_good_as_gone(self, system: System) -> None:
        """A lock is waited for, but not for ever: the read's run goes on, the write's stops."""
        read_id = system.enqueue([call("look", "long lock")])
        write_id = system.enqueue([call("pay", "long locked write")])
        with system.receiver.holding("long lock", "long locked write"):
            system.receiver.wait_for("long lock")
            system.receiver.wait_for("long locked write")
            with locked_table(system):
                system.receiver.release_all()
                run = system.stops_as_unknown(write_id)
                eventually(lambda: system.client.get(read_id).events_lost, what="the read is settled without its event")
        system.completes(read_id)
        system.eventually_completes(write_id)
        assert run.dead_letter is not None and "AuditPersistenceFailedException" in run.dead_letter.error
        assert spent(system, read_id) == (1, 0, 0)
        assert len(system.receiver.requests("long lock")) == len(system.receiver.requests("long locked write")) == 1


def spent(system: System, run_id: str) -> tuple[int, int, int]:
    """Attempts, tries and crashes of the run's first call."""
    step = system.step(run_id, 2)
    return step.attempt, step.tries, step.crashes


def let_go_of(system: System, run_id: str) -> None:
    """Nobody holds the lease of the run's first call any more."""
    call_ref = StepRef(run_id=run_id, number=2, attempt=1)
    eventually(lambda: system.wiring.leases.survey([call_ref]).views[0].owner is None, what="the worker gives up")


@contextmanager
def missing_table(system: System) -> Iterator[None]:
    with system.database.writing() as connection:
        connection.execute(text("ALTER TABLE events RENAME TO events_elsewhere"))
    try:
        yield
    finally:
        with system.database.writing() as connection:
            connection.execute(text("ALTER TABLE events_elsewhere RENAME TO events"))


@contextmanager
def locked_table(system: System) -> Iterator[None]:
    with system.database.writing() as connection:
        connection.execute(text("LOCK TABLE events"))
        yield
