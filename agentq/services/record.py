"""Record what became of a step, through lost replies and a database that blinks."""

import logging
from collections.abc import Callable
from dataclasses import replace

from agentq.domain.errors import AuditRefusedError, StoreRefusedError, StoreUnavailableError
from agentq.domain.outcomes import Join, Recorded
from agentq.ports.steps import Settled, Settlement, StepStore
from agentq.ports.world import Clock

logger = logging.getLogger(__name__)

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.1, 2.0


class StepRecorder:
    """Records one step. After `record_step` returned True, `answer` says what the settle did."""

    def __init__(self, store: StepStore, clock: Clock, *, patience_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._patience_seconds = patience_seconds
        self.answer: Settled | None = None
        self.error: Exception | None = None

    def record_step(self, settlement: Settlement, *, still_useful: Callable[[], bool] = lambda: True) -> bool:
        """Never throws. True: result and events are stored, now or by an earlier try of this settlement.

        False: the store failed, `error` says how. Recording again isn't writing again, so it is tried for
        `patience_seconds`, for a read only while `still_useful`. What only reads is stored without its audit event
        rather than not at all; a call's result that the database refuses is replaced by a notice.
        """
        deadline = self._clock.elapsed_seconds() + self._patience_seconds
        wait_seconds = WAIT_SECONDS_MIN
        while True:
            try:
                self.answer = self._store.settle(settlement)
                return True
            except AuditRefusedError as error:
                self.error = error
                if settlement.effect.is_write or not settlement.with_events:
                    return False
                logger.warning("settling without its audit event run=%s: %s", settlement.ref.run_id, error)
                settlement = replace(settlement, with_events=False)
            except StoreRefusedError as error:
                self.error = error
                smaller = without_result(settlement, str(error))
                if smaller is None:
                    return False
                logger.warning("settling without its result run=%s: %s", settlement.ref.run_id, error)
                settlement = smaller
            except StoreUnavailableError as error:
                self.error = error
                is_over = self._clock.elapsed_seconds() + wait_seconds > deadline
                if is_over or not (settlement.effect.is_write or still_useful()):
                    return False
                self._clock.sleep(wait_seconds)
                wait_seconds = min(WAIT_SECONDS_MAX, wait_seconds * 2)
            except Exception as error:  # A defect of the store must not lose what the caller holds.
                logger.exception("couldn't settle run=%s step=%s", settlement.ref.run_id, settlement.ref.number)
                self.error = error
                return False


RESULT_NOT_KEPT = "result_not_kept"


def without_result(settlement: Settlement, why: str) -> Settlement | None:
    """The same settlement with a notice for the call's result; None when there is nothing to leave out.

    A write happened, and the model must know that; a read becomes an error result. A model turn is nothing without its
    message.
    """
    change = settlement.change
    if not isinstance(change, Recorded) or not isinstance(change.then, Join) or change.note == RESULT_NOT_KEPT:
        return None
    return replace(settlement, change=not_kept(change, why, is_write=settlement.effect.is_write))


def not_kept(change: Recorded, why: str, *, is_write: bool) -> Recorded:
    """The change with a notice for its result, which can't be stored."""
    notice = f"the call was made and succeeded; its result was not kept: {why}" if is_write else f"no result: {why}"
    return replace(change, result=notice, is_error=not is_write, note=RESULT_NOT_KEPT)
