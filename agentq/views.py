"""Runs, steps, events and dead letters as plain JSON: one shape for the CLI, the API and whoever reads them."""

import json
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from agentq.domain.audit import AuditFinding
from agentq.domain.ledger import Attempt, Ledger
from agentq.domain.model import DeadLetter, DeadLetterGroup, Event, Fence, Run, Step
from agentq.domain.pauses import Parked, Pause
from agentq.domain.replay import PlannedStep, ReplayPlan
from agentq.domain.seals import LoggedEvent, Seal
from agentq.domain.times import exact_time_text, time_text


def run_view(run: Run, *, with_steps: bool = True) -> dict[str, Any]:
    """A run; a list of runs leaves their steps out."""
    view: dict[str, Any] = {
        "id": run.id,
        "agent": run.agent,
        "status": run.status.value,
        "mode": run.mode.value,
        "created_at": _time(run.created_at),
        "started_at": _time(run.started_at),
        "finished_at": _time(run.finished_at),
        "input": run.input,
        "output": run.output,
        "error": run.error,
        "idempotency_key": run.idempotency_key,
        "metadata": run.metadata,
        "cancel_requested": run.cancel_requested,
        "has_contradiction": run.has_contradiction,
        "events_lost": run.events_lost,
        "copied_from": run.copied_from,
        "copied_steps": run.copied_steps,
        "pending_effect": fence_view(run.pending_effect) if run.pending_effect else None,
        "dead_letter": _dead_letter_of(run) if run.dead_letter else None,
    }
    if with_steps:
        view["steps"] = [step_view(step) for step in run.steps]
    return view


def _dead_letter_of(run: Run) -> dict[str, Any]:
    assert run.dead_letter is not None
    tool = next((step.tool for step in run.steps if step.number == run.dead_letter.number), run.dead_letter.tool)
    return dead_letter_view(
        replace(run.dead_letter, agent=run.agent, tool=tool, has_contradiction=run.has_contradiction)
    )


def step_view(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "kind": step.kind.value,
        "state": step.state.value,
        "attempt": step.attempt,
        "tool": step.tool,
        "effect": step.effect.value if step.tool else None,
        "call_id": step.call_id,
        "arguments": step.arguments,
        "result": step.result,
        "is_error": step.is_error,
        "tries": step.tries,
        "crashes": step.crashes,
        "may_have_happened": step.may_have_happened,
        "ruling": step.ruling.value if step.ruling else None,
        "ruled_by": step.ruled_by,
        "ruled_at": _time(step.ruled_at),
        "input_tokens": step.usage.input_tokens,
        "output_tokens": step.usage.output_tokens,
        "due_at": _time(step.due_at),
        "dispatched_at": _time(step.dispatched_at),
        "finished_at": _time(step.finished_at),
    }


def ledger_view(ledger: Ledger) -> dict[str, Any]:
    """A run, its steps with their attempts, and its audit log."""
    view = run_view(ledger.run)
    for step, its in zip(view["steps"], ledger.steps, strict=True):
        step["attempts"] = [_attempt_view(attempt) for attempt in its.attempts]
        step["suppressed"] = its.suppressed.count if its.suppressed else None
        step["suppressed_is_exact"] = its.suppressed is not None and its.suppressed.is_exact
    return {**view, "events": [event_view(event) for event in ledger.events]}


def _attempt_view(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "started_at": _time(attempt.started_at),
        "worker": attempt.worker,
        "is_held": attempt.is_held,
        "end": attempt.end.value if attempt.end else None,
        "ended_at": _time(attempt.ended_at),
        "ended_by": attempt.ended_by,
        "seconds": None if attempt.seconds is None else round(attempt.seconds, 3),
        "told": dict(attempt.told),
        "happenings": [
            {"at": _time(each.at), "what": each.what, "by": each.by, "told": dict(each.told)}
            for each in attempt.happenings
        ],
    }


def fence_view(fence: Fence) -> dict[str, Any]:
    return {
        "id": fence.id,
        "step": fence.number,
        "attempt": fence.attempt,
        "tool": fence.tool,
        "effect": fence.effect.value,
        "owner": fence.owner,
        "stamped_at": _time(fence.stamped_at),
        "operation_deadline": _time(fence.deadline_at),
        "settles_within_seconds": fence.settles_within_seconds,
        "is_callable": fence.is_callable,
        "has_probe": fence.has_probe,
        "probes": fence.probes,
    }


def dead_letter_view(letter: DeadLetter) -> dict[str, Any]:
    return {
        "run_id": letter.run_id,
        "agent": letter.agent,
        "step": letter.number,
        "tool": letter.tool,
        "reason": letter.reason.value,
        "failure_class": letter.failure_class.value,
        "outcome_unknown": letter.outcome_unknown,
        "has_contradiction": letter.has_contradiction,
        "error": letter.error,
        "fingerprint": letter.fingerprint,
        "created_at": _time(letter.created_at),
        "closed_at": _time(letter.closed_at),
        "closed_by": letter.closed_by,
        "closed_as": letter.closed_as,
    }


def group_view(group: DeadLetterGroup) -> dict[str, Any]:
    return {
        "tool": group.tool,
        "failure_class": group.failure_class.value,
        "reason": group.reason.value,
        "fingerprint": group.fingerprint,
        "count": group.count,
        "unknown_count": group.unknown_count,
        "contradicted_count": group.contradicted_count,
        "oldest_at": _time(group.oldest_at),
        "newest_at": _time(group.newest_at),
        "newest_run_id": group.run_id,
        "newest_error": group.error,
    }


def plan_view(plan: ReplayPlan) -> dict[str, Any]:
    copying, letter = plan.copying, plan.dead_letter
    return {
        "run_id": plan.run_id,
        "agent": plan.agent,
        "digest": plan.digest,
        "refusal": plan.refusal,
        "from_step": copying.from_step if copying else None,
        "repeat_writes": sorted(copying.repeat_writes) if copying else [],
        "tokens_again": plan.tokens_again,
        "has_contradiction": plan.has_contradiction,
        "dead_letter": dead_letter_view(letter) if letter else None,
        "copies": [event_view(event) for event in plan.copies],
        "steps": [_planned_view(step) for step in plan.steps],
        "then": plan.then,
    }


def _planned_view(step: PlannedStep) -> dict[str, Any]:
    return {
        "number": step.number,
        "kind": step.kind.value,
        "tool": step.tool,
        "effect": step.effect.value if step.tool else None,
        "fate": step.fate.value,
        "attempt": step.attempt,
        "arguments": step.arguments,
        "tokens_again": step.tokens_again,
        "may_have_happened": step.may_have_happened,
        "is_accepted": step.is_accepted,
        "fence": fence_view(step.fence) if step.fence else None,
        "probes": [event_view(event) for event in step.probes],
        "ruling": step.ruling.value if step.ruling else None,
        "ruled_by": step.ruled_by,
        "ruled_at": _time(step.ruled_at),
    }


def pause_view(pause: Pause) -> dict[str, Any]:
    return {
        "tool": pause.tool,
        "agent": pause.agent,
        "reads": pause.reads,
        "paused_at": _time(pause.paused_at),
        "paused_by": pause.paused_by,
        "reason": pause.reason,
    }


def parked_view(parked: Parked) -> dict[str, Any]:
    return {"step": parked.step.number, "tool": parked.step.tool, "pause": pause_view(parked.pause)}


def event_view(event: Event) -> dict[str, Any]:
    return {
        "run_id": event.run_id,
        "sequence": event.sequence,
        "at": _time(event.at),
        "kind": event.kind,
        "step": event.number,
        "attempt": event.attempt,
        "actor": event.actor,
        "data": {key: value.value if isinstance(value, StrEnum) else value for key, value in event.data.items()},
    }


def finding_view(finding: AuditFinding) -> dict[str, Any]:
    """`run_id` is None for the deployment's own log."""
    return {
        "run_id": finding.run_id or None,
        "kind": finding.broken.value,
        "what": finding.what,
        "why": finding.why,
    }


def audit_entry_view(entry: LoggedEvent | Seal) -> dict[str, Any]:
    """A line of an export: times to the microsecond, so that seals can be computed again from it."""
    place = {"run_id": entry.run_id, "sequence": entry.sequence, "at": exact_time_text(entry.at)}
    if isinstance(entry, Seal):
        data = {"number": entry.number, "events_lost": entry.events_lost, "digest": entry.digest}
        return {**place, "kind": "seal", "step": None, "attempt": None, "actor": None, "data": data}
    return {
        **place,
        "kind": entry.kind,
        "step": entry.number,
        "attempt": entry.attempt,
        "actor": entry.actor,
        "data": _json_or_text(entry.data),
    }


def _json_or_text(text: str) -> Any:
    """What isn't JSON was written by somebody else: shown all the same."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else time_text(moment)
