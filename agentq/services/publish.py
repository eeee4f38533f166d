"""Wake workers for steps that are stored, and leave those that the broker can't take to the dispatcher."""

from collections.abc import Sequence
from contextlib import suppress

from agentq.domain.errors import BrokerUnavailableError, StoreUnavailableError
from agentq.domain.model import StepKind
from agentq.ports.dispatch import Dispatcher, Wakeup
from agentq.ports.runs import RunStore


def publish_within(wakeups: Sequence[Wakeup], *, runs: RunStore, dispatcher: Dispatcher, backlog_max: int) -> bool:
    """Publish steps as long as the queue of their kind is shorter than `backlog_max`. False: the broker is away."""
    if not wakeups:
        return True
    try:
        backlog = dispatcher.backlog()
    except BrokerUnavailableError:
        _leave_to_dispatcher(wakeups, runs)  # Not asked a second time: each time may take as long as its timeout.
        return False
    room = {kind: backlog_max - backlog.get(kind, 0) for kind in StepKind}
    fitting: list[Wakeup] = []
    rest: list[Wakeup] = []
    for wakeup in wakeups:
        (fitting if room[wakeup.kind] > 0 else rest).append(wakeup)
        room[wakeup.kind] -= 1
    _leave_to_dispatcher(rest, runs)
    return publish_steps(fitting, runs=runs, dispatcher=dispatcher)


def publish_steps(wakeups: Sequence[Wakeup], *, runs: RunStore, dispatcher: Dispatcher) -> bool:
    """Publish steps of runs that were going already, however long the queue is. False: the broker is away."""
    if not wakeups:
        return True
    try:
        dispatcher.publish(wakeups)
    except BrokerUnavailableError:
        _leave_to_dispatcher(wakeups, runs)  # Those that did get through are woken twice, which costs nothing.
        return False
    return True


def _leave_to_dispatcher(wakeups: Sequence[Wakeup], runs: RunStore) -> None:
    if not wakeups:
        return
    # Where the database can't take the note either, the keeper finds these steps lost and publishes them again.
    with suppress(StoreUnavailableError):
        runs.undispatch([wakeup.ref for wakeup in wakeups])
