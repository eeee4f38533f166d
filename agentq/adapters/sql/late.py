"""A late outcome is never dropped: what becomes of a write's outcome whose settle no longer fits."""

import json
from datetime import timedelta
from typing import Any

from sqlalchemy import RowMapping, bindparam, select

from agentq.adapters.sql.change import NO_FENCE, Change
from agentq.adapters.sql.codec import clean_text, encode
from agentq.adapters.sql.schema import events
from agentq.domain.events import EventKind
from agentq.domain.model import Decision, RunMode, StepState
from agentq.domain.outcomes import Answer, Join, Recorded, Turn
from agentq.domain.probes import ProbeVerdict
from agentq.ports.dispatch import Wakeup
from agentq.ports.steps import Settled, Settlement, Verdict

HEALS_WITHIN = timedelta(hours=1)  # Of a dead letter: what comes later is for the person who was called for.
PROBE = "probe"  # Who ruled.
_DECISIONS = {
    ProbeVerdict.HAPPENED: Decision.HAPPENED,
    ProbeVerdict.DID_NOT_HAPPEN: Decision.DID_NOT_HAPPEN,
}

_newer_stamp = (
    select(events.c.at)
    .where(
        events.c.run_id == bindparam("run_id"),
        events.c.number == bindparam("number"),
        events.c.attempt > bindparam("attempt"),
        events.c.kind == EventKind.FENCE_STAMPED.value,
    )
    .order_by(events.c.sequence)
    .limit(1)
)
_noted = select(events.c.kind).where(
    events.c.run_id == bindparam("run_id"),
    events.c.number == bindparam("number"),
    events.c.actor == bindparam("actor"),
    events.c.kind.in_([EventKind.OUTCOME_AGREED.value, EventKind.OUTCOME_CONTRADICTED.value]),
)


def settle_late(change: Change, step: RowMapping, settlement: Settlement, recorded: Recorded) -> Settled:
    """Settle the outcome of a write that was performed under a fence, though the step moved on.

    It is the step's result if none is recorded and no other fence stands; else it is noted as agreeing, or raised as a
    contradiction. The first answer stands in any case.
    """
    fence = change.run["pending_effect_id"]
    if step["state"] == StepState.COMPLETED:
        return _note(change, settlement, agrees=_agrees(change, step, settlement, recorded))
    if fence is not None and fence != settlement.fence_id:
        # A newer attempt is at it. A keyed write's is the same write; a plain one's was started on a wrong word.
        is_harmless = recorded.is_error or not settlement.effect.is_plain_write
        return _note(change, settlement, agrees=is_harmless or _may_be_of_newer_call(change, settlement))
    if step["ruling"] == Decision.DID_NOT_HAPPEN and recorded.is_error:
        return _note(change, settlement, agrees=True)
    return _record(change, step, settlement, recorded)


def record_result(change: Change, number: int, settlement: Settlement, recorded: Recorded, **values: Any) -> None:
    """The step is completed with that result; `values` are further columns of its row."""
    change.change_step(
        number,
        state=StepState.COMPLETED.value,
        result=encode(recorded.result),
        is_error=recorded.is_error,
        input_tokens=recorded.usage.input_tokens,
        output_tokens=recorded.usage.output_tokens,
        may_have_happened=False,
        settled_by=clean_text(settlement.owner),
        finished_at=change.now,
        **values,
        **ruling_of(settlement, change),
    )


def ruling_of(settlement: Settlement, change: Change) -> dict[str, Any]:
    """A probe's word on the write, as a step keeps it; nothing without one, or when it decided nothing."""
    decision = None if settlement.probe is None else _DECISIONS.get(settlement.probe.verdict)
    if decision is None:
        return {}
    return {"ruling": decision.value, "ruled_by": PROBE, "ruled_at": change.now}


def carry_on(change: Change, recorded: Recorded) -> tuple[Wakeup, ...]:
    """What follows a result in an active run: the cancel that waited, the answer, the calls asked for, or the join."""
    if change.run["cancel_requested"]:
        change.cancel()
        return ()
    change.start()
    match recorded.then:
        case Answer(output=output):
            change.complete(encode(output))
            return ()
        case Turn(calls=calls):
            return change.add_calls(calls)
        case Join():
            return change.join()


def _record(change: Change, step: RowMapping, settlement: Settlement, recorded: Recorded) -> Settled:
    number = settlement.ref.number
    was_ruled_out = step["ruling"] == Decision.DID_NOT_HAPPEN
    change.event(
        EventKind.OUTCOME_LATE, number, settlement.ref.attempt, fence=settlement.fence_id, is_error=recorded.is_error
    )
    record_result(change, number, settlement, recorded)
    if change.run["pending_effect_id"] == settlement.fence_id:
        change.set(**NO_FENCE)
    if was_ruled_out:
        # Somebody's word was wrong. The result is used all the same, or the write would be made again.
        change.set(has_contradiction=True)
        change.event(EventKind.OUTCOME_CONTRADICTED, number, settlement.ref.attempt, fence=settlement.fence_id)
    wakeups = _carry_on_late(change, step, recorded, is_ruled=was_ruled_out)
    change.write()
    verdict = Verdict.CONTRADICTED if was_ruled_out else Verdict.LATE
    return Settled(verdict=verdict, wakeups=wakeups, run_status=change.status)


def _carry_on_late(change: Change, step: RowMapping, recorded: Recorded, *, is_ruled: bool) -> tuple[Wakeup, ...]:
    if change.is_active:
        if step["state"] == StepState.AVAILABLE:
            return carry_on(change, recorded)
        return ()  # It waits for its turn in a run that was replayed, and is found completed then.
    dead_letter = change.dead_letter()
    if dead_letter is None or dead_letter["number"] != step["number"] or is_ruled:
        return ()  # The run ended otherwise: recorded, and used if it is replayed.
    is_old = change.now - dead_letter["created_at"] > HEALS_WITHIN
    if (is_old or change.run["mode"] != RunMode.QUEUED) and not change.run["cancel_requested"]:
        # A person may be at work on it, or whoever drove the run is gone: theirs to replay, with nothing in doubt.
        change.answer_dead_letter()
        return ()
    change.close_dead_letter("late outcome")
    change.event(EventKind.DEAD_LETTER_HEALED, step["number"], step["attempt"])
    change.activate()
    if change.run["cancel_requested"]:
        change.cancel()
        return ()
    change.reopen_closed_steps()
    return change.go_on()


def _may_be_of_newer_call(change: Change, settlement: Settlement) -> bool:
    """A probe found the write, but looked when a newer attempt may have made it: the key is the same."""
    if settlement.probe is None:
        return False
    ref = settlement.ref
    names = {"run_id": ref.run_id, "number": ref.number, "attempt": ref.attempt}
    stamped_at = change.connection.execute(_newer_stamp, names).scalar_one_or_none()
    return stamped_at is not None and settlement.probe.looked_before > stamped_at


def _agrees(change: Change, step: RowMapping, settlement: Settlement, recorded: Recorded) -> bool:
    if settlement.probe is not None:
        # Who was asked says that the call of this attempt happened, as its result does.
        is_of_this = bool(step["attempt"] == settlement.ref.attempt) or _may_be_of_newer_call(change, settlement)
        return is_of_this and not step["is_error"]
    if step["ruling"] == Decision.HAPPENED and step["ruled_by"] == PROBE:
        # A probe may say it in other words than the tool.
        return not recorded.is_error
    is_same = bool(step["is_error"]) == recorded.is_error and json.loads(step["result"]) == json.loads(
        encode(recorded.result)
    )
    if step["ruling"] == Decision.HAPPENED:
        # Who says that it happened may not know its result.
        return is_same or (step["result"] == "null" and not recorded.is_error)
    if settlement.effect.is_plain_write:
        return recorded.is_error  # Another call's result is recorded: it happened twice, unless this one was refused.
    return is_same


def _note(change: Change, settlement: Settlement, *, agrees: bool) -> Settled:
    kind = EventKind.OUTCOME_AGREED if agrees else EventKind.OUTCOME_CONTRADICTED
    names = {"run_id": change.run_id, "number": settlement.ref.number, "actor": clean_text(settlement.owner)}
    noted_before = change.connection.execute(_noted, names).scalars().first()
    if noted_before is None:
        change.event(kind, settlement.ref.number, settlement.ref.attempt, fence=settlement.fence_id)
        if not agrees:
            change.set(has_contradiction=True)
        change.write()
    verdict = Verdict.AGREED if (noted_before or kind) == EventKind.OUTCOME_AGREED else Verdict.CONTRADICTED
    return Settled(verdict=verdict, run_status=change.status)
