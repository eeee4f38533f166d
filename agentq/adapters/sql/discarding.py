"""Giving a dead letter up for good, because a person wants it."""

from sqlalchemy import bindparam, select

from agentq.adapters.sql.change import NO_FENCE, Change
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.rows import fence_from
from agentq.adapters.sql.schema import dead_letters
from agentq.domain.errors import AgentqError, AlreadyDecidedError, RefusedError
from agentq.domain.events import EventKind
from agentq.domain.times import time_text

DISCARDED = "discarded"  # What a dead letter is closed as that was given up.

_last_discard = (
    select(dead_letters.c.closed_by, dead_letters.c.closed_at)
    .where(dead_letters.c.run_id == bindparam("run_id"), dead_letters.c.closed_as == DISCARDED)
    .order_by(dead_letters.c.id.desc())
    .limit(1)
)


def refusal_to_discard(change: Change) -> AgentqError | None:
    """Why there is nothing to give up; None: there is."""
    if change.dead_letter() is not None:
        return None
    discarded = discarded_already(change)
    if discarded is not None:
        return discarded
    return RefusedError(f"run {change.run_id!r} is {change.status} and no dead letter: there is nothing to give up")


def discarded_already(change: Change) -> AlreadyDecidedError | None:
    """Who gave the run up and when; None: nobody."""
    last = change.connection.execute(_last_discard, {"run_id": change.run_id}).one_or_none()
    if last is None:
        return None
    return AlreadyDecidedError(
        f"run {change.run_id!r} was given up: {last.closed_by} discarded it at {time_text(last.closed_at)}; "
        "a copy from one of its steps can be run"
    )


def discard(change: Change, *, reason: str) -> None:
    """The dead letter is closed, and a write in doubt written down as that; nothing refuses."""
    fence = fence_from(change.run)
    if fence is not None:
        # It blocks nothing any more, since the run is over; that nobody knows stays written on the step.
        if fence.is_callable:
            change.change_step(fence.number, may_have_happened=True)
        change.set(**NO_FENCE)
        change.event(
            EventKind.WRITE_GIVEN_UP,
            fence.number,
            fence.attempt,
            fence=fence.id,
            tool=fence.tool,
            reason=clean_text(reason),
        )
    letter = change.dead_letter()
    assert letter is not None
    change.close_dead_letter(DISCARDED)
    change.event(EventKind.DEAD_LETTER_DISCARDED, letter["number"], reason=clean_text(reason))
    if change.run["cancel_requested"]:
        change.cancel()  # It only waited for this write.
