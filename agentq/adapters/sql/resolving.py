"""A person's answer to an unknown write: it happened, or it did not."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, select

from agentq.adapters.sql.asking import refusal_while_active
from agentq.adapters.sql.change import NO_FENCE, Change
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.discarding import discarded_already
from agentq.adapters.sql.rows import fence_from
from agentq.adapters.sql.schema import steps
from agentq.domain.decisions import Ruling
from agentq.domain.errors import AgentqError, AlreadyDecidedError, InvalidInputError, TooEarlyError
from agentq.domain.events import EventKind
from agentq.domain.lifecycle import StepChange, step_after
from agentq.domain.model import Decision, Fence, StepState
from agentq.domain.times import time_text

_last_ruling = (
    select(steps.c.number, steps.c.ruling, steps.c.ruled_by, steps.c.ruled_at)
    .where(steps.c.run_id == bindparam("run_id"), steps.c.ruling.is_not(None))
    .order_by(steps.c.ruled_at.desc())
    .limit(1)
)


def refusal_to_resolve(change: Change, ruling: Ruling) -> AgentqError | None:
    """Why that answer isn't taken; None: it is."""
    fence = fence_from(change.run)
    if fence is None:
        return nothing_in_doubt(change)
    if change.is_active:
        return refusal_while_active(change, fence)
    if ruling.decision is Decision.DID_NOT_HAPPEN:
        return _refusal_of_look(fence, ruling.looked_at, now=change.now)
    return None


def nothing_in_doubt(change: Change) -> AlreadyDecidedError:
    """No fence stands: who was first, as far as anybody was."""
    discarded = discarded_already(change)
    if discarded is not None:
        return discarded
    last = change.connection.execute(_last_ruling, {"run_id": change.run_id}).one_or_none()
    if last is None:
        return AlreadyDecidedError(f"no write of run {change.run_id!r} is in doubt")
    return AlreadyDecidedError(
        f"no write of run {change.run_id!r} is in doubt: {last.ruled_by} decided at {time_text(last.ruled_at)} "
        f"that step {last.number} {Decision(last.ruling).value.replace('_', ' ')}"
    )


def resolve(change: Change, ruling: Ruling, *, reason: str) -> None:
    """The answer is recorded and the fence cleared; nothing refuses. The run stays as it is until it is replayed."""
    fence = fence_from(change.run)
    assert fence is not None
    has_happened = ruling.decision is Decision.HAPPENED
    values: dict[str, Any] = {"ruling": ruling.decision.value, "ruled_by": change.actor, "ruled_at": change.now}
    if has_happened:
        values |= {
            "state": step_after(StepChange.RESOLVE, StepState.DEAD_LETTERED).value,
            "result": encode(ruling.result),
            "is_error": False,
            "may_have_happened": False,
            "finished_at": change.now,
        }
    change.change_step(fence.number, **values)
    change.set(**NO_FENCE)
    change.answer_dead_letter()
    change.event(
        EventKind.WRITE_RESOLVED,
        fence.number,
        fence.attempt,
        decision=ruling.decision.value,
        fence=fence.id,
        tool=fence.tool,
        looked_at=None if ruling.looked_at is None else time_text(ruling.looked_at),
        reason=clean_text(reason),
    )
    if change.run["cancel_requested"]:
        change.cancel()  # It only waited for this write.


def _refusal_of_look(fence: Fence, looked_at: datetime | None, *, now: datetime) -> AgentqError | None:
    """Before the deadline the caller, and for `settles_within` after it the receiver, may still be at work: a look then
    says nothing, however late its answer is given."""
    looked = now if looked_at is None else looked_at
    if looked > now:
        return InvalidInputError(
            f"looked_at is {time_text(looked)}, which is to come: by the database it is {time_text(now)}"
        )
    not_before = fence.deadline_at + timedelta(seconds=fence.settles_within_seconds or 0)
    if looked > not_before:
        return None
    wait_seconds = (not_before - now).total_seconds()
    advice = f"wait {wait_seconds:.0f} s, then look again" if wait_seconds > 0 else "look again"
    return TooEarlyError(
        f"a look at {time_text(looked)} is too early: {fence.tool!r} may have acted until {time_text(not_before)}; "
        f"{advice}",
        not_before,
    )
