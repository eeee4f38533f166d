"""Read the delivery ledger of a run: its audit log from SQL, and what Redis has counted, if it can be asked."""

from agentq.domain.errors import LeasesUnavailableError
from agentq.domain.ledger import Counted, Held, Ledger, ledger_of
from agentq.domain.model import Run
from agentq.ports.leases import Leases
from agentq.ports.runs import RunStore
from agentq.ports.world import Clock


def read_ledger(run_id: str, *, runs: RunStore, leases: Leases, clock: Clock) -> Ledger:
    """The ledger as it is now; without Redis it says what SQL knows. Raises NotFoundError."""
    began = clock.elapsed_seconds()
    run = runs.run(run_id)
    return ledger_of(run, runs.events(run_id), _counted(run, leases, clock, began))


def _counted(run: Run, leases: Leases, clock: Clock, began: float) -> Counted | None:
    try:
        survey = leases.survey([step.ref for step in run.steps])
    except LeasesUnavailableError:
        return None
    assert run.age_seconds is not None
    age_seconds = run.age_seconds + clock.elapsed_seconds() - began  # Older than that it can't be by now.
    by_number = {step.number: view for step, view in zip(run.steps, survey.views, strict=True)}
    return Counted(
        covers_run=survey.counted_seconds >= age_seconds,
        suppressed={number: view.suppressed for number, view in by_number.items()},
        held={
            number: Held(attempt=view.started_attempt, worker=view.owner, seconds=view.started_seconds)
            for number, view in by_number.items()
            if view.owner is not None and view.started_attempt is not None
        },
    )
