"""Bring outcomes that were kept in files home to the database, once it takes them."""

import logging

from agentq.domain.errors import StoreUnavailableError
from agentq.ports.dispatch import Dispatcher
from agentq.ports.runs import RunStore
from agentq.ports.steps import OutcomeFiles, StepStore
from agentq.ports.world import Clock
from agentq.services.publish import publish_steps
from agentq.services.record import StepRecorder

logger = logging.getLogger(__name__)


class Healer:
    """Every keeper heals what its own machine kept, leader or not. Two at once are harmless: a settlement that is sent
    again finds itself recorded."""

    def __init__(
        self, *, files: OutcomeFiles, steps: StepStore, runs: RunStore, dispatcher: Dispatcher, clock: Clock
    ) -> None:
        self._files = files
        self._steps = steps
        self._runs = runs
        self._dispatcher = dispatcher
        self._clock = clock

    def heal(self) -> int:
        """Send each kept outcome again; whatever the database makes of it, it has it then. Returns how many it took.

        One whose run was purged is set aside."""
        healed = 0
        for outcome in self._files.pending():
            ref = outcome.settlement.ref
            recorder = StepRecorder(self._steps, self._clock, patience_seconds=0)
            if not recorder.record_step(outcome.settlement):
                logger.warning("still keeping an outcome of run=%s step=%s: %s", ref.run_id, ref.number, recorder.error)
                if isinstance(recorder.error, StoreUnavailableError):
                    break  # So it is for the others.
                continue
            settled = recorder.answer
            assert settled is not None  # It was recorded.
            if settled.run_status is None:
                self._files.set_aside(outcome, f"run {ref.run_id} isn't there any more: it was purged")
                continue
            self._files.forget(outcome)
            healed += 1
            logger.info("healed run=%s step=%s attempt=%s: %s", ref.run_id, ref.number, ref.attempt, settled.verdict)
            publish_steps(settled.wakeups, runs=self._runs, dispatcher=self._dispatcher)
        return healed
