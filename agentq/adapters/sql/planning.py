"""What a replay's plan is made from, read from SQL: under the run's lock, or in a snapshot of its own."""

from collections import Counter
from typing import Any

from sqlalchemy import Select, and_, bindparam, or_, select

from agentq.adapters.sql.change import Change
from agentq.adapters.sql.engine import now_plus
from agentq.adapters.sql.rows import dead_letter_from, event_from, run_from, step_from
from agentq.adapters.sql.schema import events, runs
from agentq.domain.events import EventKind
from agentq.domain.model import Event
from agentq.domain.replay import Recorded

PROBE_EVENTS = "probe."  # What the kinds of events begin with that tell of a probe.

run_and_now: Select[Any] = select(runs, now_plus().label("now")).where(runs.c.id == bindparam("run_id"))
"""A run's row as `Change` takes it, without a lock."""

_telling = (
    select(events)
    .where(
        events.c.run_id == bindparam("run_id"),
        or_(
            events.c.kind.in_(
                [EventKind.FENCE_STAMPED.value, EventKind.FENCE_TAKEN_BACK.value, EventKind.RUN_COPIED.value]
            ),
            events.c.kind.startswith(PROBE_EVENTS),
            and_(events.c.kind == EventKind.STEP_SETTLED.value, events.c.data.contains("not_called")),
        ),
    )
    .order_by(events.c.sequence)
)


def recorded_of(change: Change) -> Recorded:
    """All that is known of the run as `change` sees it; changes nothing."""
    letter = change.dead_letter()
    told = [event_from(row) for row in change.connection.execute(_telling, {"run_id": change.run_id}).mappings()]
    run = run_from(
        change.run,
        steps=[step_from(row) for row in change.steps()],
        dead_letter=None if letter is None else dead_letter_from(letter),
    )
    return Recorded(
        run=run,
        calls=_calls(told),
        probes=[event for event in told if event.kind.startswith(PROBE_EVENTS)],
        copies=[event for event in told if event.kind == EventKind.RUN_COPIED],
        never_made=frozenset(event.number for event in told if _is_never_made(event) and event.number is not None),
    )


def _calls(told: list[Event]) -> Counter[int]:
    """A fence that was taken back, or that noted that its process has no such tool, made no call."""
    made: Counter[int] = Counter()
    for event in told:
        if event.number is None:
            continue
        if event.kind == EventKind.FENCE_STAMPED and event.data.get("is_callable", True):
            made[event.number] += 1
        elif event.kind == EventKind.FENCE_TAKEN_BACK:
            made[event.number] -= 1
    return made


def _is_never_made(event: Event) -> bool:
    return event.kind == EventKind.STEP_SETTLED and event.data.get("note") == "not_called"
