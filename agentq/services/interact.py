"""Drive a run in the caller's own process, through the same spine as a worker, so that a person sees it happen."""

import logging
from collections.abc import Callable, Iterator

from agentq.domain.errors import RefusedError, StoreUnavailableError
from agentq.domain.model import Run, RunMode, Step, StepRef, StepState
from agentq.ports.runs import NewRun, RunStore
from agentq.ports.world import Clock
from agentq.services.execute import StepExecutor
from agentq.services.heartbeat import Heartbeat
from agentq.services.reap import session_ref

logger = logging.getLogger(__name__)

WAIT_SECONDS_MAX = 0.2


class Interaction:
    """Runs whose steps are never published: no worker takes them up, and if this process dies the keeper fails them."""

    def __init__(
        self,
        *,
        executor: StepExecutor,
        runs: RunStore,
        heartbeat: Heartbeat,
        clock: Clock,
        new_owner: Callable[[], str],
        patience_seconds: float,
    ) -> None:
        """`patience_seconds`: how long a database that is away is waited for."""
        self._executor = executor
        self._runs = runs
        self._heartbeat = heartbeat
        self._clock = clock
        self._new_owner = new_owner
        self._patience_seconds = patience_seconds

    def drive(self, new_run: NewRun, see: Callable[[Run], None] = lambda run: None) -> Run:
        """Store the run, execute it to its end and return it. `see` is shown the run after every step.

        Raises LeasesUnavailableError before anything is stored when no lease can be had, StoreUnavailableError when the
        database stays away: the keeper fails the run then.
        """
        assert new_run.mode is RunMode.INTERACTIVE
        with self._heartbeat.hold(session_ref(new_run.id), self._new_owner()) as session:
            if session is None:
                raise RefusedError(f"run {new_run.id} is driven by another process")
            self._runs.add([new_run])
            while not (run := self._look(new_run.id)).status.is_terminal:
                see(run)
                if not self._execute_due(run):
                    self._clock.sleep(WAIT_SECONDS_MAX)
            see(run)
            return run

    def _look(self, run_id: str) -> Run:
        gives_up_at = self._clock.elapsed_seconds() + self._patience_seconds
        while True:
            try:
                return self._runs.run(run_id)
            except StoreUnavailableError as error:
                if self._clock.elapsed_seconds() >= gives_up_at:
                    raise
                logger.warning("waiting for the database run=%s: %s", run_id, error)
                self._clock.sleep(WAIT_SECONDS_MAX)

    def _execute_due(self, run: Run) -> bool:
        """Execute what is available and due; False: nothing was."""
        executed = [self._executor.execute(ref) for ref in _available(run.steps)]
        return any(one.agent is not None for one in executed)


def _available(steps: tuple[Step, ...]) -> Iterator[StepRef]:
    return (step.ref for step in steps if step.state is StepState.AVAILABLE)
