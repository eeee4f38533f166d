"""The tasks for other services: enqueue, cancel and replay by name, and a nudge to the keeper."""

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from celery import Task
from celery.exceptions import Reject

from agentq.domain.decisions import signed
from agentq.domain.errors import AgentqError, StoreUnavailableError
from agentq.services.enqueue import enqueue_message
from agentq.services.replay import replay as replay_run
from agentq.tasks.app import app, settings
from agentq.tasks.wiring import wiring

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.5, 5.0
HOLD_SECONDS = 20.0  # A worker that is told to stop waits for its messages to end, and this one must not keep it.


@app.task(name="agentq.enqueue", bind=True)
def enqueue_run(self: "Task[Any, Any]", **message: Any) -> str:
    """Store the run that another service asks for; acked only when it is in SQL. Returns its id.

    Takes agent, input, and if wanted idempotency_key, run_id, metadata. Without a key the task's id is the key: a
    redelivery has the same. A refused request becomes a failed run with the reason, found by its key or id.
    """
    work = wiring()
    enqueued = _when_store_answers(
        lambda: enqueue_message(
            message,
            self.request.id,
            runs=work.runs,
            dispatcher=work.dispatcher,
            backlog_max=settings.backlog_max,
        )
    )
    return enqueued.run_id


@app.task(name="agentq.cancel", throws=(AgentqError,))
def cancel(run_id: str, reason: str = "", actor: str = "celery") -> str:
    """Cancel a run; the status after."""
    return _when_store_answers(lambda: wiring().runs.cancel(run_id, **signed(actor, reason)))


@app.task(name="agentq.replay", throws=(AgentqError,))
def replay(run_id: str, reason: str = "", actor: str = "celery") -> None:
    """Replay a dead-lettered run that has no unknown write."""
    work = wiring()
    _when_store_answers(
        lambda: replay_run(
            run_id,
            None,
            **signed(actor, reason),
            decisions=work.decisions,
            runs=work.runs,
            dispatcher=work.dispatcher,
        )
    )


@app.task(name="agentq.reap")
def reap() -> None:
    """Ask the keeper to look now."""
    wiring().nudges.nudge()


def _when_store_answers(change: Callable[[], Answer]) -> Answer:
    """Make the change; while the database is away the message waits, unacknowledged: a while here, then in its queue.

    Raises Reject to give it back.
    """
    wait_seconds, waited_seconds = WAIT_SECONDS_MIN, 0.0
    while True:
        try:
            return change()
        except StoreUnavailableError as error:
            if waited_seconds >= HOLD_SECONDS:
                raise Reject(str(error), requeue=True) from error
            logger.warning("waiting for the database: %s", error)
            time.sleep(wait_seconds)
            waited_seconds += wait_seconds
            wait_seconds = min(WAIT_SECONDS_MAX, wait_seconds * 2)
