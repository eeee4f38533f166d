"""What becomes of a call's outcome: results large and odd, answers that say no, an audit log that refuses."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import select

from agentq.adapters.sql.schema import steps
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, RunStatus, StepState
from tests.support.audit_log import OUTCOMES, refusing
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.system import System, call
from tests.support.waiting import eventually

RESULT_BYTES_MAX = 6_000_000
LARGE_BYTES, TOO_LARGE_BYTES = 5_000_000, 100_000_000

pytestmark = [
    pytest.mark.parametrize("deployment", ["sqlite", "postgresql"], indirect=True, scope="module"),
    pytest.mark.usefixtures("workers"),
]
for_any_write = pytest.mark.parametrize("tool", ["put", "pay"])


@pytest.fixture(scope="module")
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One that keeps results of less than the default."""
    folder = tmp_path_factory.mktemp("deployment")
    with ExitStack() as stack:
        fresh = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
        url = stack.enter_context(fresh)
        system = stack.enter_context(System(folder, url, result_bytes_max=RESULT_BYTES_MAX))
        system.keeper()
        yield system


class TestAuditLog:
    """It refuses an event, as when its disk is full."""

    @for_any_write
    def test_a_refused_fence_keeps_the_write_from_being_called(self, system: System, tool: str) -> None:
        """The run waits, at no charge, until the log takes events again."""
        name = f"{tool} without a fence"
        with refusing(system.database, "fence.stamped"):
            run_id = system.enqueue([call(tool, name)])
            eventually(lambda: republished(system, run_id), what="a worker gave up, and the keeper woke another")
            assert system.receiver.requests(name) == []
        run = system.completes(run_id)
        step = run.steps[1]
        assert (step.attempt, step.tries, step.crashes) == (1, 0, 0)
        assert (len(system.receiver.requests(name)), run.events_lost) == (1, 0)

    def test_a_refused_settle_of_a_read_is_counted_and_the_run_goes_on(self, system: System) -> None:
        """A read that nobody wrote down harms nobody."""
        with refusing(system.database, "step.settled"):
            run_id = system.enqueue([call("look", "uncounted")])
            run = system.completes(run_id)
        assert run.events_lost == 4  # Of two turns and the call, and of the run's own end.
        assert len(system.receiver.requests("uncounted")) == 1

    def test_a_refused_settle_of_a_plain_write_stops_its_run_until_the_log_takes_it(self, system: System) -> None:
        """No run goes on over a write that the log doesn't hold, and nobody makes it again. The outcome is kept."""
        run_id = system.enqueue([call("pay", "unlogged"), call("look", "after it")])
        with system.receiver.holding("unlogged"):
            system.receiver.wait_for("unlogged")
            with refusing(system.database, *OUTCOMES):
                system.receiver.release("unlogged")
                run = system.stops_as_unknown(run_id)
                assert (len(system.receiver.requests("unlogged")), system.receiver.requests("after it")) == (1, [])
        letter = run.dead_letter
        assert letter is not None and "AuditPersistenceFailedException" in letter.error
        assert (letter.reason, letter.failure_class) == (DeadLetterReason.NOT_RETRYABLE, FailureClass.UNKNOWN)
        system.eventually_completes(run_id)
        assert (len(system.receiver.requests("unlogged")), len(system.receiver.requests("after it"))) == (1, 1)

    def test_a_refused_settle_of_a_keyed_write_stops_its_run_too(self, system: System) -> None:
        """That it may be made again doesn't make it less of a write."""
        run_id = system.enqueue([call("put", "unlogged key")])
        with system.receiver.holding("unlogged key"):
            system.receiver.wait_for("unlogged key")
            with refusing(system.database, *OUTCOMES):
                system.receiver.release("unlogged key")
                run = system.wait(run_id)
        assert run.dead_letter is not None and "AuditPersistenceFailedException" in run.dead_letter.error
        assert (run.dead_letter.reason, run.dead_letter.outcome_unknown) == (DeadLetterReason.NOT_RETRYABLE, False)
        assert run.steps[1].may_have_happened
        system.eventually_completes(run_id)
        assert len(system.receiver.requests("unlogged key")) == 1


class TestResult:
    """A result is kept as the same text by both databases, or not at all."""

    @pytest.mark.parametrize("tool", ["look_at_much", "pay_for_much"])
    def test_a_large_one_is_kept_and_messages_stay_small(self, system: System, tool: str) -> None:
        """NUL and NaN are cleaned on the way, because one of the databases takes neither."""
        run_id = system.enqueue([call(tool, f"large {tool}", size_bytes=LARGE_BYTES)])
        run = system.completes(run_id)
        result = run.steps[1].result
        assert isinstance(result, dict) and not run.steps[1].is_error
        assert result["text"] == "nul: \N{REPLACEMENT CHARACTER}" + "x" * LARGE_BYTES
        assert result["number"] is None
        with system.valkey.client() as client:
            assert client.info("memory")["used_memory_peak"] < LARGE_BYTES

    def test_a_read_that_brings_too_much_has_an_error_result(self, system: System) -> None:
        """The model may ask for less."""
        run_id = system.enqueue([call("look_at_much", "too much", size_bytes=TOO_LARGE_BYTES)])
        step = system.completes(run_id).steps[1]
        assert step.is_error and "the limit is 6000000" in str(step.result)

    def test_a_write_that_brings_too_much_has_happened(self, system: System) -> None:
        """An error result would have the model ask for it again."""
        run_id = system.enqueue([call("pay_for_much", "too much for it", size_bytes=TOO_LARGE_BYTES)])
        step = system.completes(run_id).steps[1]
        assert not step.is_error and "the call was made and succeeded; its result was not kept" in str(step.result)
        assert system.receiver.effects_of(run_id) == 1


class TestAnswer:
    """A service says no to a write, or nobody knows what it said."""

    def test_a_definite_no_is_an_error_result(self, system: System) -> None:
        """The model tells the customer; nobody has to look."""
        run_id = system.enqueue([call("charge", "blocked card", is_rejected=True)])
        run = system.completes(run_id)
        assert run.steps[1].is_error and run.output == "the card is blocked"
        assert run.pending_effect is None
        assert system.receiver.effects_of(run_id) == 0

    def test_no_answer_is_an_unknown_write(self, system: System) -> None:
        """It took effect, as it happens: an error result would have been a lie."""
        run_id = system.enqueue([call("charge", "silent card", is_rejected=False)])
        run = system.stops_as_unknown(run_id)
        assert (run.status, run.steps[1].state) == (RunStatus.FAILED, StepState.DEAD_LETTERED)
        assert system.receiver.effects_of(run_id) == 1
        system.client.replay(run_id, happened="charged", reason="the receiver has it")
        assert system.completes(run_id).output == "charged"
        assert system.receiver.effects_of(run_id) == 1


def republished(system: System, run_id: str) -> int:
    """How often the keeper woke the run's first call anew."""
    with system.database.reading() as connection:
        of_call = select(steps.c.republished).where(steps.c.run_id == run_id, steps.c.number == 2)
        return connection.execute(of_call).scalar_one_or_none() or 0
