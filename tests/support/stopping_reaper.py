"""A reaper that stops between its read and its writes: `python -m tests.support.stopping_reaper` sends itself SIGSTOP
when it knows what nobody holds, and goes on with that knowledge when it is continued. One pass."""

import os
import signal
from collections.abc import Sequence

from agentq.bootstrap import Wiring
from agentq.config.settings import load_settings
from agentq.domain.failures import FailureClassifier
from agentq.domain.model import StepRef
from agentq.domain.retry import Budgets, RetryPolicy
from agentq.ports.leases import Acquired, Leases, LeaseSurvey, Tally
from agentq.services.reap import Reaper


class StoppingLeases:
    """The answer to a survey is old when it is looked at."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey:
        survey = self._leases.survey(refs)
        os.kill(os.getpid(), signal.SIGSTOP)
        return survey

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> Acquired:
        return self._leases.acquire(ref, owner, seconds)

    def renew(self, ref: StepRef, owner: str, seconds: float) -> Tally | None:
        return self._leases.renew(ref, owner, seconds)

    def release(self, ref: StepRef, owner: str, *, is_suppressed: bool = False) -> None:
        self._leases.release(ref, owner, is_suppressed=is_suppressed)

    def bury(self, ref: StepRef, process: str) -> bool:
        return self._leases.bury(ref, process)

    def unmark(self, ref: StepRef) -> bool:
        return self._leases.unmark(ref)


def main() -> None:
    work = Wiring(load_settings())
    budgets = Budgets(
        tries_max=work.settings.tries_max,
        crashes_max=work.settings.crashes_max,
        backoff_seconds=work.settings.backoff_seconds,
        patience_seconds=work.settings.patience_seconds,
    )
    Reaper(
        keeping=work.keeping,
        steps=work.steps,
        leases=StoppingLeases(work.leases),
        dispatcher=work.dispatcher,
        policy=RetryPolicy(FailureClassifier(), budgets),
        probes_max=work.settings.probes_max,
    ).reap()


if __name__ == "__main__":
    main()
