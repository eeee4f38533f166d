"""The general settle: under the run's lock, decide whether the change fits, and make it."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

from sqlalchemy import RowMapping, bindparam, select

from agentq.adapters.sql.change import NO_FENCE, Change, leaves_doubt
from agentq.adapters.sql.codec import clean_text
from agentq.adapters.sql.late import carry_on, record_result, ruling_of, settle_late
from agentq.adapters.sql.rows import fence_from, wakeup_from
from agentq.adapters.sql.schema import steps
from agentq.domain.effects import ToolEffect
from agentq.domain.events import EventKind
from agentq.domain.model import Charge, StepRef, StepState
from agentq.domain.outcomes import Recorded, Retried, Stopped
from agentq.domain.probes import ProbeVerdict
from agentq.ports.dispatch import Wakeup
from agentq.ports.steps import FenceRequest, Settled, Settlement, Verdict

_OPENED_AT = select(steps).where(
    steps.c.run_id == bindparam("run_id"),
    steps.c.state == StepState.AVAILABLE.value,
    steps.c.dispatched_at == bindparam("at"),
)


def settle_under_lock(change: Change, settlement: Settlement) -> Settled:
    """See `StepStore.settle`; writes the change if it makes one."""
    ref, owner = settlement.ref, settlement.owner
    step = change.step(ref.number)
    if step is None:
        return Settled(verdict=Verdict.MOVED_ON, run_status=change.status)
    if _is_settled_by(owner, step, ref):
        return Settled(verdict=Verdict.ALREADY, wakeups=_opened_by(change, step), run_status=change.status)
    fits = is_up(change, step, ref) and fence_of(change, ref.number) == settlement.fence_id
    is_ruled_out = settlement.probe is not None and settlement.probe.verdict is ProbeVerdict.DID_NOT_HAPPEN
    if fits and is_ruled_out and _looked_too_early(change, settlement):
        return Settled(verdict=Verdict.REFUSED, run_status=change.status)
    _note_probe(change, settlement)
    match settlement.change:
        case Recorded() as recorded if fits:
            return _record(change, settlement, recorded)
        case Recorded() as recorded if settlement.effect.is_write and settlement.fence_id is not None:
            return settle_late(change, step, settlement, recorded)
        case Retried() if is_up(change, step, ref) and _forbids_requeue(change, ref.number) and not is_ruled_out:
            return Settled(verdict=Verdict.REFUSED, run_status=change.status)
        case Retried() as retried if fits:
            return _requeue(change, step, settlement, retried)
        case Stopped() as stopped if fits:
            return _stop(change, step, settlement, stopped)
        case _:
            return Settled(verdict=Verdict.MOVED_ON, run_status=change.status)


def is_up(change: Change, step: RowMapping, ref: StepRef) -> bool:
    """The attempt is the one that may run now, in a run that is active."""
    return change.is_active and step["state"] == StepState.AVAILABLE and step["attempt"] == ref.attempt


def fence_of(change: Change, number: int) -> str | None:
    """The id of the fence that stands for that step."""
    fence_id: str | None = change.run["pending_effect_id"]
    return fence_id if change.run["pending_effect_number"] == number else None


def _record(change: Change, settlement: Settlement, recorded: Recorded) -> Settled:
    number, attempt = settlement.ref.number, settlement.ref.attempt
    record_result(change, number, settlement, recorded, **_counted(settlement))
    if settlement.fence_id is not None:
        change.set(**NO_FENCE)
    change.event(EventKind.STEP_SETTLED, number, attempt, **settled_data(settlement, recorded))
    wakeups = carry_on(change, recorded)
    change.write()
    return Settled(verdict=Verdict.APPLIED, wakeups=wakeups, run_status=change.status)


def _requeue(change: Change, step: RowMapping, settlement: Settlement, retried: Retried) -> Settled:
    number, attempt = settlement.ref.number, settlement.ref.attempt
    due_at = change.now + timedelta(seconds=retried.due_in_seconds)
    fence = None if settlement.fence_id is None else fence_from(change.run)
    if retried.waits_for_fence and fence is not None:
        due_at = max(due_at, fence.deadline_at + timedelta(seconds=fence.settles_within_seconds or 0))
    is_due = due_at <= change.now
    values: dict[str, Any] = {
        "attempt": attempt + 1,
        "due_at": due_at,
        "dispatched_at": change.now if is_due else None,
        "republished": 0,
        "handed_back_since": None,
        "parked_since": None,
        "is_isolated": bool(step["is_isolated"]) or retried.is_isolated,  # A suspect stays one.
        "settled_by": clean_text(settlement.owner),
        **_charged(retried.charge, step, change),
        **_counted(settlement),
        **ruling_of(settlement, change),
    }
    if fence is not None:
        values["may_have_happened"] = _is_in_doubt(step, settlement, change)
        change.set(**NO_FENCE)
    change.change_step(number, **values)
    change.event(
        EventKind.STEP_REQUEUED,
        number,
        attempt,
        charge=retried.charge.value,
        failure_class=retried.failure_class and retried.failure_class.value,
        error=clean_text(retried.error),
        due_in_seconds=round((due_at - change.now).total_seconds(), 3),
        fence=settlement.fence_id,
        **held_data(settlement),
    )
    if change.run["cancel_requested"]:
        change.cancel()
    else:
        change.start()
    change.write()
    is_woken = is_due and change.is_active
    wakeup = wakeup_from(cast(RowMapping, {**step, **values, "agent": change.run["agent"]}))
    return Settled(verdict=Verdict.APPLIED, wakeups=(wakeup,) if is_woken else (), run_status=change.status)


def _counted(settlement: Settlement) -> dict[str, Any]:
    """Deliveries that came to nothing; what was known before stays where this settlement doesn't know."""
    return {} if settlement.suppressed is None else {"suppressed": settlement.suppressed}


def _charged(charge: Charge, step: RowMapping, change: Change) -> dict[str, Any]:
    match charge:
        case Charge.NOTHING:
            return {}
        case Charge.TRY:
            return {"tries": step["tries"] + 1}
        case Charge.CRASH:
            return {"crashes": step["crashes"] + 1}
        case Charge.PATIENCE:
            return {"throttled_since": step["throttled_since"] or change.now}


def _stop(change: Change, step: RowMapping, settlement: Settlement, stopped: Stopped) -> Settled:
    number, attempt = settlement.ref.number, settlement.ref.attempt
    is_unknown = stopped.outcome_unknown and settlement.fence_id is not None
    is_cancelled = bool(change.run["cancel_requested"]) and not is_unknown
    ends_fence = settlement.fence_id is not None and not is_unknown
    change.change_step(
        number,
        state=StepState.CLOSED.value if is_cancelled else StepState.DEAD_LETTERED.value,
        settled_by=clean_text(settlement.owner),
        finished_at=change.now,
        may_have_happened=_is_in_doubt(step, settlement, change) if ends_fence else bool(step["may_have_happened"]),
        **_counted(settlement),
        **({} if is_unknown else ruling_of(settlement, change)),
    )
    if is_cancelled:
        change.cancel()
    else:
        change.stop(number, attempt, replace(stopped, outcome_unknown=is_unknown), **held_data(settlement))
    change.write()
    return Settled(verdict=Verdict.APPLIED, run_status=change.status)


def _note_probe(change: Change, settlement: Settlement) -> None:
    """Stored with the change that follows from it."""
    if settlement.probe is not None:
        number, attempt, answer = settlement.ref.number, settlement.ref.attempt, settlement.probe.verdict.value
        change.event(EventKind.PROBE_ANSWERED, number, attempt, fence=settlement.fence_id, answer=answer)


def _looked_too_early(change: Change, settlement: Settlement) -> bool:
    """Nothing was seen, but what was looked for may have come after the look."""
    fence = fence_from(change.run)
    is_known = not (isinstance(settlement.change, Stopped) and settlement.change.outcome_unknown)
    return (
        is_known
        and fence is not None
        and settlement.probe is not None
        and not fence.is_over_by(settlement.probe.looked_after)
    )


def _is_in_doubt(step: RowMapping, settlement: Settlement, change: Change) -> bool:
    """A keyed write may have happened, in this attempt or in an earlier one: its key makes them one."""
    if ruling_of(settlement, change):
        return False
    return bool(step["may_have_happened"]) or leaves_doubt(change.run)


def _forbids_requeue(change: Change, number: int) -> bool:
    """A plain write may be in flight: nobody may open another attempt before it is decided."""
    is_plain = change.run["pending_effect_effect"] == ToolEffect.NON_IDEMPOTENT_WRITE
    return fence_of(change, number) is not None and is_plain and bool(change.run["pending_effect_is_callable"])


def _is_settled_by(owner: str, step: RowMapping, ref: StepRef) -> bool:
    """That owner's settlement of that attempt was applied before: it ended the step, or opened the next attempt."""
    if step["settled_by"] != clean_text(owner):
        return False
    is_ended = step["state"] not in (StepState.AVAILABLE, StepState.WAITING)
    return is_ended or bool(step["attempt"] == ref.attempt + 1)


def _opened_by(change: Change, step: RowMapping) -> tuple[Wakeup, ...]:
    """What the settle that ended (or requeued) the step opened, as far as it still waits: the same moment is on it."""
    if not change.is_active:
        return ()
    if step["state"] == StepState.AVAILABLE:
        rows = [step] if step["dispatched_at"] is not None else []
    else:
        names = {"run_id": change.run_id, "at": step["finished_at"]}
        rows = list(change.connection.execute(_OPENED_AT, names).mappings())
    return tuple(wakeup_from(cast(RowMapping, {**row, "agent": change.run["agent"]})) for row in rows)


def fence_data(request: FenceRequest) -> dict[str, Any]:
    return {
        "fence": request.id,
        "tool": clean_text(request.tool),
        "effect": request.effect.value,
        "is_callable": request.is_callable,
    }


def settled_data(settlement: Settlement, recorded: Recorded) -> dict[str, Any]:
    data: dict[str, Any] = {"effect": settlement.effect.value}
    if settlement.fence_id is not None:
        data["fence"] = settlement.fence_id
    if recorded.is_error:
        data["is_error"] = True
    if recorded.note is not None:
        data["note"] = recorded.note
    return {**data, **held_data(settlement)}


def held_data(settlement: Settlement) -> dict[str, Any]:
    """Who had the attempt and for how long, where neither the event's actor nor its fence's own event says so."""
    data: dict[str, Any] = {}
    if settlement.held_by is not None:
        data["worker"] = clean_text(settlement.held_by)
    if settlement.fence_id is None and settlement.held_seconds is not None:
        data["seconds"] = round(settlement.held_seconds, 3)
    return data
