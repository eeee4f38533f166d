"""A producer that dies on its way: `python -m tests.support.dying_producer before|after RUN_ID` kills itself before or
after the run's first step is published, when the run is stored already."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from agentq.bootstrap import Wiring
from agentq.config.settings import load_settings
from agentq.domain.model import StepKind
from agentq.ports.dispatch import Dispatcher, Wakeup
from agentq.services.enqueue import EnqueueRequest, enqueue


class LastDispatcher:
    """The last thing that its process does is to publish, or not even that."""

    def __init__(self, dispatcher: Dispatcher, *, publishes: bool) -> None:
        self._dispatcher = dispatcher
        self._publishes = publishes

    def publish(self, wakeups: Sequence[Wakeup]) -> None:
        if self._publishes:
            self._dispatcher.publish(wakeups)
        os.kill(os.getpid(), signal.SIGKILL)

    def backlog(self) -> Mapping[StepKind, int]:
        return self._dispatcher.backlog()

    def is_drained(self) -> bool:
        return self._dispatcher.is_drained()


def main() -> None:
    when, run_id = sys.argv[1:]
    work = Wiring(load_settings())
    enqueue(
        [EnqueueRequest(agent="support", input={"asks": [run_id]}, run_id=run_id)],
        runs=work.runs,
        dispatcher=LastDispatcher(work.dispatcher, publishes=when == "after"),
        backlog_max=work.settings.backlog_max,
    )


if __name__ == "__main__":
    main()
