"""The judge of audit logs: what an honest log looks like, and what each way to tamper with one is found by."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from agentq.domain import audit
from agentq.domain.audit import (
    AuditedRun,
    AuditFinding,
    Break,
    RecordedStep,
    judge,
    judge_deployment,
    judge_stray,
)
from agentq.domain.effects import ToolEffect
from agentq.domain.model import RunStatus
from agentq.domain.seals import LoggedEvent, Seal, digest_of
from agentq.domain.times import exact_time_text

RUN = "run-1"
AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
READ, KEYED, PLAIN = ToolEffect.READ_ONLY, ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE

Told = tuple[str, int | None, dict[str, Any]]
ENQUEUED: Told = ("run.enqueued", None, {"agent": "support"})
TURN: Told = ("step.settled", 1, {"effect": "read_only"})
STAMPED: Told = ("fence.stamped", 2, {"fence": "f1", "tool": "pay"})
PAID: Told = ("step.settled", 2, {"fence": "f1"})
ANSWERED: Told = ("step.settled", 3, {"effect": "read_only"})
COMPLETED: Told = ("run.completed", None, {})
UNKNOWN: Told = ("run.dead_lettered", 2, {"outcome_unknown": True})


def log(*told: Told) -> tuple[LoggedEvent, ...]:
    return tuple(
        LoggedEvent(
            run_id=RUN,
            sequence=sequence,
            at=AT + timedelta(seconds=sequence),
            kind=kind,
            number=number,
            attempt=None if number is None else 1,
            actor="host/boot/1-1/x",
            data=json.dumps(data),
        )
        for sequence, (kind, number, data) in enumerate(told, 1)
    )


def sealed(events: Sequence[LoggedEvent], *ends: int, events_lost: int = 0) -> tuple[Seal, ...]:
    """A seal for each of these sequence numbers."""
    seals: list[Seal] = []
    for end in ends:
        last = seals[-1] if seals else None
        after = last.sequence if last else 0
        fields: dict[str, Any] = {
            "run_id": RUN,
            "number": len(seals) + 1,
            "sequence": end,
            "events_lost": events_lost,
            "at": AT + timedelta(seconds=end),
        }
        its_events = [event for event in events if after < event.sequence <= end]
        digest = digest_of(its_events, previous=last.digest if last else None, **fields)
        seals.append(Seal(digest=digest, **fields))
    return tuple(seals)


def steps(*effects: ToolEffect) -> tuple[RecordedStep, ...]:
    return tuple(RecordedStep(number=number, effect=effect, was_made=True) for number, effect in enumerate(effects, 1))


def run_with(*told: Told, status: RunStatus, completed: tuple[RecordedStep, ...] = (), **fields: Any) -> AuditedRun:
    events = log(*told)
    ends = [event.sequence for event in events if event.kind in audit.ENDS_OF_RUNS]
    lost = fields.get("events_lost", 0)
    values = {"events_count": len(events), "events_lost": 0, "seals": sealed(events, *ends, events_lost=lost), **fields}
    return AuditedRun(id=RUN, status=status, steps=completed, events=events, **values)


PAYING = (ENQUEUED, TURN, STAMPED, PAID, ANSWERED, COMPLETED)
PAID_RUN = run_with(*PAYING, status=RunStatus.COMPLETED, completed=steps(READ, PLAIN, READ))
REPLAYED: Told = ("run.replayed", None, {"reason": "the bank is back"})
RESOLVED: Told = ("write.resolved", 2, {"fence": "f1", "decision": "did_not_happen"})

HONEST = {
    "a write that was settled": PAID_RUN,
    "a run that goes on, its write in flight": run_with(
        ENQUEUED, TURN, STAMPED, status=RunStatus.RUNNING, completed=steps(READ), fence_id="f1"
    ),
    "an unknown write with its dead letter": run_with(
        ENQUEUED, TURN, STAMPED, UNKNOWN,
        status=RunStatus.FAILED, completed=steps(READ), fence_id="f1", has_open_dead_letter=True,
    ),
    "a write that was given up as unknown": run_with(
        ENQUEUED, TURN, STAMPED, UNKNOWN, ("write.given_up", 2, {"fence": "f1"}), ("dead_letter.discarded", 2, {}),
        status=RunStatus.FAILED, completed=steps(READ),
    ),
    "a write that was ruled out, and made again by a replay": run_with(
        ENQUEUED, TURN, STAMPED, UNKNOWN, RESOLVED, REPLAYED,
        ("fence.stamped", 2, {"fence": "f2"}), ("step.settled", 2, {"fence": "f2"}), ANSWERED, COMPLETED,
        status=RunStatus.COMPLETED, completed=steps(READ, PLAIN, READ),
    ),
    "a keyed write that was requeued": run_with(
        ENQUEUED, TURN, STAMPED, ("step.requeued", 2, {"fence": "f1"}), ("fence.stamped", 2, {"fence": "f2"}),
        ("step.settled", 2, {"fence": "f2"}),
        status=RunStatus.RUNNING, completed=steps(READ, KEYED),
    ),
    "a write that was taken back": run_with(
        ENQUEUED, TURN, STAMPED, ("fence.taken_back", 2, {"fence": "f1"}), status=RunStatus.RUNNING
    ),
    "a write that failed for sure": run_with(
        ENQUEUED, TURN, STAMPED, ("run.dead_lettered", 2, {}),
        status=RunStatus.FAILED, completed=steps(READ), has_open_dead_letter=True,
    ),
    "a late outcome after a person's word": run_with(
        ENQUEUED, TURN, STAMPED, UNKNOWN, ("write.resolved", 2, {"fence": "f1", "decision": "happened"}),
        ("outcome.agreed", 2, {"fence": "f1"}),
        status=RunStatus.FAILED, completed=steps(READ, PLAIN), has_open_dead_letter=True,
    ),
    "a call that its turn refused, and a copied step": run_with(
        ENQUEUED,
        status=RunStatus.RUNNING, copied_steps=1,
        completed=(*steps(PLAIN), RecordedStep(number=2, effect=PLAIN, was_made=False)),
    ),
    "a write that never got to its call": run_with(
        ENQUEUED, TURN, ("step.settled", 2, {"is_error": True}), status=RunStatus.RUNNING, completed=steps(READ, PLAIN)
    ),
    "a read whose event was lost": run_with(
        ENQUEUED, ANSWERED, status=RunStatus.RUNNING, completed=steps(READ, READ, READ)[:1], events_lost=1
    ),
    "an end that was lost with its seal": run_with(
        ENQUEUED, TURN, status=RunStatus.COMPLETED, completed=steps(READ), events_lost=2
    ),
    "a keyed write that the log refused to end": run_with(
        ENQUEUED, TURN, STAMPED, status=RunStatus.FAILED, completed=steps(READ), events_lost=1
    ),
    "a refused run": run_with(("run.refused", None, {"error": "too large"}), status=RunStatus.FAILED),
}  # fmt: skip


@pytest.mark.parametrize("run", HONEST.values(), ids=HONEST)
def test_an_honest_log_holds(run: AuditedRun) -> None:
    """A finding that is none teaches people to look away."""
    assert judge(run).findings == ()


def without(run: AuditedRun, *sequences: int) -> AuditedRun:
    return replace(run, events=tuple(event for event in run.events if event.sequence not in sequences))


def changed(run: AuditedRun, sequence: int, **fields: Any) -> AuditedRun:
    events = tuple(replace(event, **fields) if event.sequence == sequence else event for event in run.events)
    return replace(run, events=events)


def resealed(run: AuditedRun) -> AuditedRun:
    """Whoever tampers knows how seals are made, and makes them anew."""
    return replace(run, seals=sealed(run.events, *(seal.sequence for seal in run.seals)))


UNKNOWN_RUN = HONEST["an unknown write with its dead letter"]
REPLAYED_RUN = HONEST["a write that was ruled out, and made again by a replay"]

TAMPERED: dict[str, tuple[Callable[[], AuditedRun], set[Break]]] = {
    "an event is deleted": (lambda: without(PAID_RUN, 2), {Break.GAP, Break.BROKEN_SEAL, Break.UNTOLD_RESULT}),
    "and the seals are made anew": (lambda: resealed(without(PAID_RUN, 2)), {Break.GAP, Break.UNTOLD_RESULT}),
    "the last events are deleted": (
        lambda: without(replace(PAID_RUN, seals=()), 5, 6),
        {Break.GAP, Break.UNTOLD_RESULT, Break.UNTOLD_END},
    ),
    "they are deleted, and counted down": (
        lambda: without(replace(PAID_RUN, seals=(), events_count=4), 5, 6),
        {Break.UNTOLD_RESULT, Break.UNTOLD_END},
    ),
    "the run's counter is changed": (lambda: replace(PAID_RUN, events_count=5), {Break.COUNT}),
    "events are counted as lost to hide a gap": (lambda: without(replace(PAID_RUN, events_lost=1), 5), {
        Break.GAP, Break.BROKEN_SEAL,
    }),
    "losses that a seal knows of are counted down": (
        lambda: replace(HONEST["a refused run"], seals=sealed(HONEST["a refused run"].events, 1, events_lost=2)),
        {Break.COUNT},
    ),
    "an actor is changed": (lambda: changed(PAID_RUN, 4, actor="mallory"), {Break.BROKEN_SEAL}),
    "a time is changed": (lambda: changed(PAID_RUN, 4, at=AT), {Break.BROKEN_SEAL}),
    "data is no JSON any more": (lambda: changed(PAID_RUN, 1, data="{"), {Break.UNREADABLE, Break.BROKEN_SEAL}),
    "data is no object": (lambda: changed(PAID_RUN, 1, data="[1]"), {Break.UNREADABLE, Break.BROKEN_SEAL}),
    "a fence becomes something else": (
        lambda: resealed(changed(PAID_RUN, 3, kind="step.parked")),
        {Break.UNANNOUNCED_WRITE},
    ),
    "the end of a write becomes something else": (
        lambda: resealed(changed(PAID_RUN, 4, kind="step.parked")),
        {Break.UNTOLD_RESULT, Break.WRITE_WITHOUT_END},
    ),
    "a write was stamped over one without an end": (
        lambda: resealed(changed(REPLAYED_RUN, 5, kind="step.parked")),
        {Break.WRITE_WITHOUT_END},
    ),
    "the standing fence is taken off the run": (lambda: replace(UNKNOWN_RUN, fence_id=None), {Break.WRITE_WITHOUT_END}),
    "a fence is put on the run": (
        lambda: replace(PAID_RUN, fence_id="f9"),
        {Break.UNTOLD_FENCE, Break.HIDDEN_UNKNOWN},
    ),
    "the dead letter of an unknown write is deleted": (
        lambda: replace(UNKNOWN_RUN, has_open_dead_letter=False),
        {Break.HIDDEN_UNKNOWN},
    ),
    "a result is put on a step": (
        lambda: replace(UNKNOWN_RUN, steps=steps(READ, PLAIN)),
        {Break.UNTOLD_RESULT},
    ),
    "a read's result is put there": (lambda: replace(PAID_RUN, steps=steps(READ, PLAIN, READ, READ)), {
        Break.UNTOLD_RESULT,
    }),
    "the status is changed": (lambda: replace(PAID_RUN, status=RunStatus.CANCELLED), {Break.UNTOLD_END}),
    "a seal is deleted": (lambda: replace(PAID_RUN, seals=()), {Break.UNSEALED_END}),
    "the first seal is deleted": (lambda: replace(REPLAYED_RUN, seals=REPLAYED_RUN.seals[1:]), {Break.MISSING_SEAL}),
    "the last seal is deleted": (lambda: replace(REPLAYED_RUN, seals=REPLAYED_RUN.seals[:1]), {Break.UNSEALED_END}),
    "a seal goes back": (
        lambda: replace(REPLAYED_RUN, seals=sealed(REPLAYED_RUN.events, 10, 4)),
        {Break.MISSING_SEAL},
    ),
    "a seal's digest is changed": (
        lambda: replace(PAID_RUN, seals=(replace(PAID_RUN.seals[0], digest="0" * 64),)),
        {Break.BROKEN_SEAL},
    ),
    "a seal's losses are changed": (
        lambda: replace(PAID_RUN, events_lost=3, seals=(replace(PAID_RUN.seals[0], events_lost=3),)),
        {Break.BROKEN_SEAL},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tampered", "broken"), TAMPERED.values(), ids=TAMPERED)
def test_tampering_is_found(tampered: Callable[[], AuditedRun], broken: set[Break]) -> None:
    """By what it breaks, and by nothing that it doesn't: the finding is where a person begins to look."""
    findings = judge(tampered()).findings
    assert {finding.broken for finding in findings} == broken
    assert all(finding.run_id == RUN and finding.what and finding.why for finding in findings)


def test_every_kind_of_finding_is_found_by_a_test() -> None:
    """A kind that nothing finds would be a promise of the list alone."""
    assert set(Break) == {*set().union(*(broken for _, broken in TAMPERED.values())), judge_stray(RUN).broken}


def test_it_counts_what_it_looked_at() -> None:
    """ "Everything holds" means as much as was looked at."""
    run = run_with(*PAYING, ("outcome.agreed", 2, {"fence": "f1"}), status=RunStatus.COMPLETED)
    judged = judge(run)
    assert (judged.events, judged.writes, judged.seals, judged.events_unsealed) == (7, 1, 1, 1)


def test_several_missing_events_are_one_finding() -> None:
    """A log that lost a thousand lines in a row is told in one."""
    (finding,) = judge(run_with(*[ENQUEUED] * 9, status=RunStatus.RUNNING, events_count=12)).findings
    assert (finding.broken, finding.what) == (Break.GAP, "events 10 to 12 are missing")


def test_the_deployment_s_log_has_no_gaps_either() -> None:
    """Who paused a tool and when is told there, and nowhere else."""
    pauses = log(*[("tool.paused", None, {})] * 3)
    assert judge_deployment(pauses).findings == judge_deployment(()).findings == ()
    assert judge_deployment((pauses[0], pauses[2])).findings == (
        AuditFinding(run_id="", broken=Break.GAP, what="event 2 is missing"),
    )


def digest(**fields: Any) -> str:
    event = {
        "run_id": RUN, "sequence": 1, "at": AT, "kind": "a",
        "number": None, "attempt": None, "actor": "b", "data": "{}",
    }  # fmt: skip
    event |= {name.removeprefix("event_"): value for name, value in fields.items() if name.startswith("event_")}
    seal = {"run_id": RUN, "number": 1, "sequence": 1, "events_lost": 0, "at": AT, "previous": None}
    seal |= {name: value for name, value in fields.items() if not name.startswith("event_")}
    return digest_of([LoggedEvent(**event)], **seal)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"event_sequence": 2},
        {"event_at": AT + timedelta(microseconds=1)},
        {"event_kind": "c"},
        {"event_number": 0},
        {"event_attempt": 0},
        {"event_actor": "a", "event_kind": "b"},
        {"event_actor": "", "event_data": "b{}"},
        {"event_actor": "-"},
        {"event_data": "{ }"},
        {"run_id": "run-2"},
        {"number": 2},
        {"sequence": 2},
        {"events_lost": 1},
        {"at": AT + timedelta(seconds=1)},
        {"previous": ""},
    ],
    ids=str,
)
def test_whatever_is_changed_changes_the_digest(fields: dict[str, Any]) -> None:
    """Nor can a part of one field move into the next: each has its length in front."""
    assert digest(**fields) != digest()


def test_a_moment_is_the_same_text_in_every_zone() -> None:
    """Two databases may give one moment in other zones, and with other precisions."""
    there = AT.astimezone(timezone(timedelta(hours=2)))
    assert exact_time_text(there) == exact_time_text(AT) == "2026-01-31T12:00:00.000000Z"
    assert digest(at=there, event_at=there) == digest()
