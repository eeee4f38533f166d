"""Feed the broker with what is due: retries at once, new runs as their queue drains."""

import logging

from agentq.domain.errors import BrokerUnavailableError
from agentq.domain.model import StepKind
from agentq.ports.dispatch import Dispatcher, Wakeup
from agentq.ports.keeping import KeeperStore
from agentq.ports.runs import RunStore

logger = logging.getLogger(__name__)

BATCH_MAX = 500


def dispatch(keeping: KeeperStore, runs: RunStore, dispatcher: Dispatcher, *, backlog_max: int) -> int:
    """Publish what is due; returns how many steps were published.

    Retries and delayed steps go out whatever the backlog; first steps of new runs only into the room that is left. What
    can't be published stays due.
    """
    published = _publish(keeping.take_due(BATCH_MAX, first_steps=False), runs, dispatcher)
    room = backlog_max - dispatcher.backlog().get(StepKind.MODEL, 0)
    if room > 0:
        published += _publish(keeping.take_due(min(room, BATCH_MAX), first_steps=True), runs, dispatcher)
    return published


def _publish(wakeups: list[Wakeup], runs: RunStore, dispatcher: Dispatcher) -> int:
    if not wakeups:
        return 0
    try:
        dispatcher.publish(wakeups)
    except BrokerUnavailableError:
        runs.undispatch([wakeup.ref for wakeup in wakeups])
        raise
    return len(wakeups)
