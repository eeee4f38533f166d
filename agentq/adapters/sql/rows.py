"""From rows to the nouns: the one place that knows which column becomes which field."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from agentq.domain.effects import ToolEffect
from agentq.domain.failures import FailureClass
from agentq.domain.model import (
    DeadLetter,
    DeadLetterReason,
    Decision,
    Event,
    Fence,
    Json,
    Run,
    RunMode,
    RunStatus,
    Step,
    StepKind,
    StepRef,
    StepState,
    Usage,
)
from agentq.domain.seals import LoggedEvent
from agentq.ports.dispatch import Wakeup


class Named(Protocol):
    """Columns by name: a row as SQLAlchemy gives it, or a plain dictionary."""

    def __getitem__(self, name: str, /) -> Any: ...


def run_from(
    row: Named, *, steps: Sequence[Step] = (), dead_letter: DeadLetter | None = None, age_seconds: float | None = None
) -> Run:
    """The run in a row of `runs`."""
    return Run(
        id=row["id"],
        agent=row["agent"],
        input=payload(row["input"]),
        status=RunStatus(row["status"]),
        mode=RunMode(row["mode"]),
        created_at=row["created_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        output=payload(row["output"]),
        error=row["error"],
        metadata=row["metadata"] or {},
        idempotency_key=row["idempotency_key"],
        cancel_requested=bool(row["cancel_requested"]),
        pending_effect=fence_from(row),
        has_contradiction=bool(row["has_contradiction"]),
        events_lost=row["events_lost"],
        copied_from=row["copied_from"],
        copied_steps=row["copied_steps"],
        dead_letter=dead_letter,
        steps=tuple(steps),
        age_seconds=age_seconds,
    )


def fence_from(row: Named) -> Fence | None:
    """The fence in a row that holds the `pending_effect` columns of `runs`; None when none stands."""
    if row["pending_effect_id"] is None:
        return None
    failure_class = row["pending_effect_failure_class"]
    return Fence(
        id=row["pending_effect_id"],
        number=row["pending_effect_number"],
        attempt=row["pending_effect_attempt"],
        tool=row["pending_effect_tool"],
        effect=ToolEffect(row["pending_effect_effect"]),
        owner=row["pending_effect_owner"],
        stamped_at=row["pending_effect_stamped_at"],
        deadline_at=row["pending_effect_deadline_at"],
        settles_within_seconds=row["pending_effect_settles_within_seconds"],
        is_callable=bool(row["pending_effect_is_callable"]),
        has_probe=bool(row["pending_effect_has_probe"]),
        probes=row["pending_effect_probes"] or 0,
        failure_class=None if failure_class is None else FailureClass(failure_class),
        error=row["pending_effect_error"],
    )


def step_from(row: Named) -> Step:
    """The step in a row of `steps`."""
    return Step(
        run_id=row["run_id"],
        number=row["number"],
        kind=StepKind(row["kind"]),
        state=StepState(row["state"]),
        attempt=row["attempt"],
        batch=row["batch"],
        tool=row["tool"],
        call_id=row["call_id"],
        arguments=payload(row["arguments"]),
        effect=ToolEffect(row["effect"]),
        deadline_seconds=row["deadline_seconds"],
        tries=row["tries"],
        crashes=row["crashes"],
        throttled_since=row["throttled_since"],
        may_have_happened=bool(row["may_have_happened"]),
        result=payload(row["result"]),
        is_error=bool(row["is_error"]),
        usage=Usage(input_tokens=row["input_tokens"], output_tokens=row["output_tokens"]),
        due_at=row["due_at"],
        dispatched_at=row["dispatched_at"],
        finished_at=row["finished_at"],
        ruling=None if row["ruling"] is None else Decision(row["ruling"]),
        ruled_by=row["ruled_by"],
        ruled_at=row["ruled_at"],
        suppressed=row["suppressed"],
    )


def wakeup_from(row: Named) -> Wakeup:
    """The wake-up call for a step; `row` holds the step's columns and its run's agent."""
    return Wakeup(
        ref=StepRef(run_id=row["run_id"], number=row["number"], attempt=row["attempt"]),
        agent=row["agent"],
        kind=StepKind(row["kind"]),
        tool=row["tool"],
        effect=ToolEffect(row["effect"]),
        deadline_seconds=row["deadline_seconds"],
        is_isolated=bool(row["is_isolated"]),
    )


def dead_letter_from(row: Named) -> DeadLetter:
    """The dead letter in a row of `dead_letters`."""
    return DeadLetter(
        id=row["id"],
        run_id=row["run_id"],
        number=row["number"],
        reason=DeadLetterReason(row["reason"]),
        failure_class=FailureClass(row["failure_class"]),
        error=row["error"],
        outcome_unknown=bool(row["outcome_unknown"]),
        created_at=row["created_at"],
        closed_at=row["closed_at"],
        closed_by=row["closed_by"],
        closed_as=row["closed_as"],
        agent=row["agent"],
        tool=row["tool"],
        fingerprint=row["fingerprint"],
    )


def event_from(row: Named) -> Event:
    """The event in a row of `events`."""
    data: dict[str, Any] = json.loads(row["data"])
    return Event(
        run_id=row["run_id"],
        sequence=row["sequence"],
        at=row["at"],
        kind=row["kind"],
        number=row["number"],
        attempt=row["attempt"],
        actor=row["actor"],
        data=data,
    )


def logged_event_from(row: Named) -> LoggedEvent:
    """The event in a row of `events`, as it is stored."""
    return LoggedEvent(
        run_id=row["run_id"],
        sequence=row["sequence"],
        at=row["at"],
        kind=row["kind"],
        number=row["number"],
        attempt=row["attempt"],
        actor=row["actor"],
        data=row["data"],
    )


def payload(text: str | None) -> Json:
    """A stored payload; None also where none is stored."""
    if text is None:
        return None
    value: Json = json.loads(text)
    return value
