"""Having a tool's probe asked again about a write that is in doubt, because a person wants it."""

from typing import Any

from sqlalchemy import bindparam, select

from agentq.adapters.sql.change import Change
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.schema import dead_letters
from agentq.domain.errors import AgentqError, AlreadyDecidedError, RefusedError
from agentq.domain.events import EventKind
from agentq.domain.failures import FailureClass
from agentq.domain.lifecycle import StepChange, step_after
from agentq.domain.model import Fence, RunMode, StepState
from agentq.domain.times import time_text

ASKED = "asked"  # What a dead letter is closed as whose write's probe is asked again.

_last_asked = (
    select(dead_letters.c.closed_by, dead_letters.c.closed_at)
    .where(
        dead_letters.c.run_id == bindparam("run_id"),
        dead_letters.c.number == bindparam("number"),
        dead_letters.c.closed_as == ASKED,
        dead_letters.c.closed_at > bindparam("stamped_at"),
    )
    .order_by(dead_letters.c.id.desc())
    .limit(1)
)


def refusal_to_ask(change: Change, fence: Fence) -> AgentqError | None:
    """Why the probe can't be asked about the write under that fence; None: it can."""
    run_id = change.run_id
    if change.is_active:
        return refusal_while_active(change, fence)
    if change.run["mode"] != RunMode.QUEUED:
        return RefusedError(
            f"run {run_id!r} was driven by its caller, so no worker asks for it: look yourself, "
            "and say whether the write happened"
        )
    if not fence.has_probe:
        return RefusedError(
            f"{fence.tool!r} had no probe when step {fence.number} of run {run_id!r} called it: look yourself, "
            "and say whether the write happened"
        )
    return None


def refusal_while_active(change: Change, fence: Fence) -> AgentqError:
    """Why nothing can be decided about the write under that fence yet: its run is active."""
    names = {"run_id": change.run_id, "number": fence.number, "stamped_at": fence.stamped_at}
    last = change.connection.execute(_last_asked, names).one_or_none()
    if last is None:
        return RefusedError(
            f"step {fence.number} of run {change.run_id!r} is still being executed: "
            "its outcome is either recorded or listed as unknown soon"
        )
    return AlreadyDecidedError(
        f"the probe of {fence.tool!r} is being asked about step {fence.number} of run {change.run_id!r}: "
        f"{last.closed_by} wanted it at {time_text(last.closed_at)}"
    )


def ask_anew(change: Change, fence: Fence, *, reason: str) -> None:
    """The dead letter is withdrawn and the step due again as a question, under the same fence and attempt.

    Nobody makes its call meanwhile: the fence stands. It isn't marked as dispatched. So the keeper publishes it when
    the queue has room, and takes off the mark that a dead process left on the attempt.
    """
    letter = change.dead_letter()
    assert letter is not None
    change.close_dead_letter(ASKED)
    change.event(EventKind.DEAD_LETTER_WITHDRAWN, fence.number, fence.attempt)
    change.event(
        EventKind.PROBE_REQUESTED,
        fence.number,
        fence.attempt,
        fence=fence.id,
        tool=fence.tool,
        reason=clean_text(reason),
    )
    change.activate()
    change.reopen_closed_steps()
    change.set(open_calls=1, pending_effect_probes=0, **_how_it_failed(fence, letter))  # Writes run alone.
    change.change_step(
        fence.number,
        state=step_after(StepChange.WITHDRAW, StepState.DEAD_LETTERED).value,
        due_at=change.now,
        dispatched_at=None,
        republished=0,
        parked_since=None,
        settled_by=None,
        finished_at=None,
    )


def _how_it_failed(fence: Fence, letter: Any) -> dict[str, Any]:
    """A call that raised is charged as one, should it turn out that it did not happen; a death leaves no class."""
    if fence.error is not None or letter["failure_class"] == FailureClass.UNKNOWN:
        return {}
    return {"pending_effect_failure_class": letter["failure_class"], "pending_effect_error": letter["error"]}
