"""Starting a run with the recorded results of another one, which stays as it was."""

from typing import Any

from sqlalchemy import bindparam, insert, literal, select

from agentq.adapters.sql.change import Change
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.planning import run_and_now
from agentq.adapters.sql.schema import runs, steps
from agentq.domain.errors import AlreadyDecidedError
from agentq.domain.events import EventKind
from agentq.domain.lifecycle import RunChange, StepChange, run_after, step_after
from agentq.domain.model import NewStep, RunMode, Step, StepKind
from agentq.domain.replay import Copying, Recorded, steps_of_copy
from agentq.domain.times import time_text
from agentq.ports.dispatch import Wakeup

_COPIED = ("kind", "batch", "tool", "call_id", "arguments", "effect", "deadline_seconds", "result", "is_error")
_copy_steps = insert(steps).from_select(
    ["run_id", "number", "state", "finished_at", *_COPIED],
    select(
        bindparam("new_run", type_=steps.c.run_id.type),
        steps.c.number,
        literal(step_after(StepChange.COPY, None).value),
        bindparam("now", type_=steps.c.finished_at.type),
        *(steps.c[name] for name in _COPIED),
    ).where(steps.c.run_id == bindparam("of_run"), steps.c.number < bindparam("from_step")),
)


def copied_already(recorded: Recorded) -> AlreadyDecidedError | None:
    """Who was first; None: nobody. The other's copy does again what this one would."""
    if not recorded.copies:
        return None
    last = recorded.copies[-1]
    return AlreadyDecidedError(
        f"{last.actor} copied run {recorded.run.id!r} at {time_text(last.at)} already, as run {last.data['to']!r}; "
        "for another one, give the digest of a plan, which shows that"
    )


def copy_run(
    change: Change, recorded: Recorded, new_run_id: str, copying: Copying, *, actor: str, reason: str
) -> tuple[Wakeup, ...]:
    """Make the new run; `change` is of the old one, and gets an event."""
    told: dict[str, Any] = {
        "from_step": copying.from_step,
        "repeat_writes": sorted(copying.repeat_writes) or None,
        "reason": clean_text(reason),
    }
    _insert_run(change, new_run_id, copying)
    names = {"new_run": new_run_id, "of_run": change.run_id, "from_step": copying.from_step, "now": change.now}
    change.connection.execute(_copy_steps, names)

    row = change.connection.execute(run_and_now, {"run_id": new_run_id}).one()
    new = Change(change.connection, row, actor=actor)
    agent = change.run["agent"]
    new.event(EventKind.RUN_ENQUEUED, agent=agent, mode=RunMode.QUEUED.value, copied_from=change.run_id, **told)
    again = steps_of_copy(recorded.run.steps, copying)
    if again[0].kind is StepKind.MODEL:
        wakeups = new.add_model_step()
    else:
        wakeups = new.add_calls([_anew(step, recorded) for step in again])
    new.write()
    change.event(EventKind.RUN_COPIED, to=new_run_id, **told)
    return wakeups


def _insert_run(change: Change, new_run_id: str, copying: Copying) -> None:
    kept = ("agent", "input", "metadata", "input_digest")
    change.connection.execute(
        insert(runs),
        {
            "id": new_run_id,
            "mode": RunMode.QUEUED.value,
            "status": run_after(RunChange.ENQUEUE, None).value,
            "created_at": change.now,
            "next_step": copying.from_step,
            "copied_from": change.run_id,
            "copied_steps": copying.from_step - 1,
            **{name: change.run[name] for name in kept},
        },
    )


def _anew(step: Step, recorded: Recorded) -> NewStep:
    return NewStep(
        kind=step.kind,
        batch=step.batch,
        tool=step.tool,
        call_id=step.call_id,
        arguments=step.arguments,
        effect=step.effect,
        deadline_seconds=step.deadline_seconds,
        error=str(step.result) if step.number in recorded.never_made else None,
    )
