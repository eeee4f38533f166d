"""Keep the system going: dispatch what is due and reap what nobody holds, until told to stop."""

import logging
import threading
from collections.abc import Callable, Mapping

from agentq.domain.errors import AgentqError
from agentq.ports.dispatch import Dispatcher
from agentq.ports.keeping import KeeperStore
from agentq.ports.leases import Nudges
from agentq.ports.runs import RunStore
from agentq.services.dispatch import dispatch
from agentq.services.heal import Healer
from agentq.services.notify import Notifier
from agentq.services.reap import Reaper

logger = logging.getLogger(__name__)

LEADER_LEASES = 2  # Intervals that a silent leader stays one: two that lead are harmless, none costs recovery time.
SEE_AGENTS_SECONDS = 20.0


class Keeper:
    """One process of these is enough; more are harmless, and take over when the leading one dies."""

    def __init__(
        self,
        *,
        reaper: Reaper,
        keeping: KeeperStore,
        runs: RunStore,
        dispatcher: Dispatcher,
        nudges: Nudges,
        owner: str,
        interval_seconds: float,
        backlog_max: int,
        elapsed_seconds: Callable[[], float],
        serves: Mapping[str, int],
        healer: Healer | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        """`serves`: the agents of the worker that this keeper runs beside, with the largest input of each. `healer`:
        of the outcomes that this machine kept. `notifier`: None where nobody is to be told of dead letters."""
        self._reaper = reaper
        self._keeping = keeping
        self._runs = runs
        self._dispatcher = dispatcher
        self._nudges = nudges
        self._owner = owner
        self._interval_seconds = interval_seconds
        self._backlog_max = backlog_max
        self._elapsed_seconds = elapsed_seconds
        self._serves = serves
        self._healer = healer
        self._notifier = notifier
        self._seen_at: float | None = None

    def keep(self, stop: threading.Event) -> None:
        """Until `stop` is set. A database or Redis that is away is waited for; each pass starts from what is stored."""
        while not stop.is_set():
            try:
                self._pass(stop)
            except AgentqError as error:
                logger.warning("kept nothing this time: %s", error)
                stop.wait(self._interval_seconds)
            except Exception:
                # A defect over one run must not keep the others waiting for ever.
                logger.exception("a pass of the keeper failed")
                stop.wait(self._interval_seconds)

    def _pass(self, stop: threading.Event) -> None:
        self._see_agents()
        if self._healer is not None:
            self._healer.heal()
        lead_seconds = self._interval_seconds * LEADER_LEASES
        if self._notifier is not None and self._nudges.lead_telling(self._owner, lead_seconds):
            self._notifier.notify()
        if not self._nudges.lead(self._owner, lead_seconds):
            stop.wait(self._interval_seconds)
            return
        self._reaper.bury(self._nudges.wait(self._interval_seconds))
        dispatch(self._keeping, self._runs, self._dispatcher, backlog_max=self._backlog_max)
        self._reaper.reap()

    def _see_agents(self) -> None:
        now = self._elapsed_seconds()
        if self._serves and (self._seen_at is None or now - self._seen_at > SEE_AGENTS_SECONDS):
            self._keeping.see_agents(self._serves)
            self._seen_at = now
