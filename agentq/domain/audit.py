"""Whether a run's audit log proves what it is there for: each write announced and ended, no line missing or changed.

Lost events (of reads, when the log refused them) take no number and are counted on the run: a gap is never one of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from agentq.domain.effects import ToolEffect
from agentq.domain.events import EventKind
from agentq.domain.model import RunStatus
from agentq.domain.seals import LoggedEvent, Seal, digest_of

# What ends the write whose fence the event names.
ENDS_OF_WRITES = (
    EventKind.STEP_SETTLED,
    EventKind.STEP_REQUEUED,
    EventKind.OUTCOME_LATE,
    EventKind.FENCE_TAKEN_BACK,
    EventKind.WRITE_RESOLVED,
    EventKind.WRITE_GIVEN_UP,
)
# What ends the write that is under way, unless it leaves it unknown: its step stopped with it.
STOPS = (EventKind.RUN_CANCELLED, EventKind.RUN_FAILED, EventKind.RUN_DEAD_LETTERED)
# What records a step's result.
RECORDS = (EventKind.STEP_SETTLED, EventKind.OUTCOME_LATE, EventKind.WRITE_RESOLVED)
ENDS_OF_RUNS: Mapping[str, RunStatus] = {
    EventKind.RUN_COMPLETED: RunStatus.COMPLETED,
    EventKind.RUN_CANCELLED: RunStatus.CANCELLED,
    EventKind.RUN_FAILED: RunStatus.FAILED,
    EventKind.RUN_DEAD_LETTERED: RunStatus.FAILED,
    EventKind.RUN_REFUSED: RunStatus.FAILED,
}


class Break(StrEnum):
    """What can be wrong with a log."""

    GAP = "gap"
    COUNT = "count"
    UNREADABLE = "unreadable"
    UNANNOUNCED_WRITE = "unannounced_write"
    WRITE_WITHOUT_END = "write_without_end"
    UNTOLD_FENCE = "untold_fence"
    HIDDEN_UNKNOWN = "hidden_unknown"
    UNTOLD_RESULT = "untold_result"
    UNTOLD_END = "untold_end"
    UNSEALED_END = "unsealed_end"
    MISSING_SEAL = "missing_seal"
    BROKEN_SEAL = "broken_seal"
    NO_RUN = "no_run"


WHY = {
    Break.GAP: "events take their numbers without a gap, lost ones take none: somebody deleted these",
    Break.COUNT: "run and log are written in one transaction: one of them was changed by itself",
    Break.UNREADABLE: "agentq writes nothing that it can't read: somebody else wrote this",
    Break.UNANNOUNCED_WRITE: "no tool that writes is called before its fence is in the log",
    Break.WRITE_WITHOUT_END: "nobody can tell from the log whether the write happened",
    Break.UNTOLD_FENCE: "a write may be under way that the log doesn't hold",
    Break.HIDDEN_UNKNOWN: "a write may have happened, and no dead letter asks a person about it",
    Break.UNTOLD_RESULT: "the run went on over a result that the log doesn't hold",
    Break.UNTOLD_END: "how the run ended isn't what the log tells",
    Break.UNSEALED_END: "each end is sealed in its own transaction: somebody deleted the seal",
    Break.MISSING_SEAL: "seals are numbered and go forward: one was deleted or changed",
    Break.BROKEN_SEAL: "the events that it seals, or the seal, were changed afterwards",
    Break.NO_RUN: "a purge takes all that a run owns: its row was deleted by itself",
}
"""Why each matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """One thing that is wrong, of one run (empty: of the deployment's log)."""

    run_id: str
    broken: Break
    what: str

    @property
    def why(self) -> str:
        return WHY[self.broken]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A completed step as the log is held against it. `was_made` is False for a call that was refused by its turn."""

    number: int
    effect: ToolEffect
    was_made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """A run, with what the log tells of it, at one moment. Steps are those that are completed; all in order."""

    id: str
    status: RunStatus
    events_count: int
    events_lost: int
    copied_steps: int = 0
    fence_id: str | None = None  # Of the one that stands.
    has_open_dead_letter: bool = False
    steps: tuple[RecordedStep, ...] = ()
    events: tuple[LoggedEvent, ...] = ()
    seals: tuple[Seal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`events_unsealed` came after the last seal: a run that goes on, or what was noted of one that has ended."""

    findings: tuple[AuditFinding, ...] = ()
    events: int = 0
    writes: int = 0
    seals: int = 0
    events_unsealed: int = 0


def judge(run: AuditedRun) -> Judged:
    """All that is wrong with the run's log, and how much was looked at."""
    told = [_Told(event) for event in run.events]
    found = [
        *_in_sequence(run.events, run.events_count),
        *_in_counts(run),
        *((Break.UNREADABLE, f"event {each.sequence} has no JSON object") for each in told if each.data is None),
        *_in_writes(run, told),
        *_in_results(run, told),
        *_in_end(run, told),
        *_in_seals(run),
    ]
    sealed = max((seal.sequence for seal in run.seals), default=0)
    return Judged(
        findings=tuple(AuditFinding(run_id=run.id, broken=broken, what=what) for broken, what in found),
        events=len(told),
        writes=sum(each.kind == EventKind.FENCE_STAMPED for each in told),
        seals=len(run.seals),
        events_unsealed=sum(each.sequence > sealed for each in told),
    )


def judge_deployment(events: Sequence[LoggedEvent]) -> Judged:
    """The log of what is done to the deployment: it has no run, no counter, and no end to be sealed at."""
    last = events[-1].sequence if events else 0
    found = _in_sequence(events, last)
    findings = tuple(AuditFinding(run_id="", broken=broken, what=what) for broken, what in found)
    return Judged(findings=findings, events=len(events), events_unsealed=len(events))


def judge_stray(run_id: str) -> AuditFinding:
    """Of events or seals that belong to no run."""
    return AuditFinding(run_id=run_id, broken=Break.NO_RUN, what="there are events or seals of it, and no run")


def judge_unreadable(run_id: str) -> AuditFinding:
    """Of a run (empty: of the deployment's log) with a row that holds what no column of its kind holds."""
    return AuditFinding(run_id=run_id, broken=Break.UNREADABLE, what="a row of it can't be read, so it is not judged")


_Found = Iterator[tuple[Break, str]]


class _Told:
    """An event with its data read; None where there is no reading it."""

    __slots__ = ("data", "kind", "number", "sequence")

    def __init__(self, event: LoggedEvent) -> None:
        self.kind, self.number, self.sequence = event.kind, event.number, event.sequence
        self.data: dict[str, Any] | None = None
        try:
            data = json.loads(event.data)
        except (ValueError, RecursionError):
            return
        if isinstance(data, dict):
            self.data = data

    def says(self, name: str) -> Any:
        return None if self.data is None else self.data.get(name)

    @property
    def ends_run(self) -> bool:
        return self.kind in ENDS_OF_RUNS


def _in_sequence(events: Sequence[LoggedEvent], count: int) -> _Found:
    places = [0, *(event.sequence for event in events), count + 1]
    for before, after in pairwise(places):
        if after > before + 2:
            yield Break.GAP, f"events {before + 1} to {after - 1} are missing"
        elif after == before + 2:
            yield Break.GAP, f"event {before + 1} is missing"


def _in_counts(run: AuditedRun) -> _Found:
    last = run.events[-1].sequence if run.events else 0
    if last > run.events_count:
        yield Break.COUNT, f"the run counts {run.events_count} events, its log goes to {last}"
    sealed = max((seal.events_lost for seal in run.seals), default=0)
    if sealed > run.events_lost:
        yield Break.COUNT, f"the run counts {run.events_lost} lost events, a seal {sealed}"


def _in_writes(run: AuditedRun, told: Sequence[_Told]) -> _Found:
    stamped: dict[str, _Told] = {}
    standing: _Told | None = None  # One at a time: a second fence is refused while one stands.
    unended: list[_Told] = []
    for event in told:
        fence = event.says("fence")
        if event.kind == EventKind.FENCE_STAMPED:
            if standing is not None:
                unended.append(standing)
            standing = stamped[str(fence)] = event
            continue
        if fence is not None and str(fence) not in stamped:
            yield Break.UNANNOUNCED_WRITE, f"event {event.sequence} ({event.kind}) names a fence that was never stamped"
        is_its_end = event.kind in ENDS_OF_WRITES and standing is not None and fence == standing.says("fence")
        if is_its_end or (event.kind in STOPS and not event.says("outcome_unknown")):
            standing = None
    if run.fence_id is not None and run.fence_id not in stamped:
        yield Break.UNTOLD_FENCE, "a fence stands that was never stamped in the log"
    if run.fence_id is not None and run.status.is_terminal and not run.has_open_dead_letter:
        yield Break.HIDDEN_UNKNOWN, f"it is {run.status} over a write in doubt, without an open dead letter"
    if standing is not None and standing.says("fence") != run.fence_id:
        unended.append(standing)
    if len(unended) > run.events_lost:  # A write that the log refused to end stopped its run, and was counted.
        for event in unended:
            yield Break.WRITE_WITHOUT_END, f"the write of step {event.number} (event {event.sequence}) has no end"


def _in_results(run: AuditedRun, told: Sequence[_Told]) -> _Found:
    stamped = {event.number for event in told if event.kind == EventKind.FENCE_STAMPED}
    recorded = {event.number: event for event in told if _records(event)}
    untold = []
    for step in run.steps:
        if not step.was_made or step.number <= run.copied_steps:
            continue
        event = recorded.get(step.number)
        if event is None and step.effect.is_write:
            yield Break.UNTOLD_RESULT, f"step {step.number} is a write with a result that no event tells of"
        elif event is None:
            untold.append(step.number)
        elif step.effect.is_write and step.number not in stamped and not event.says("is_error"):
            yield Break.UNANNOUNCED_WRITE, f"the write of step {step.number} was recorded, and no fence was stamped"
    if len(untold) > run.events_lost:
        for number in untold:
            yield Break.UNTOLD_RESULT, f"step {number} has a result that no event tells of"


def _records(event: _Told) -> bool:
    return event.kind in RECORDS and event.says("decision") in (None, "happened")


def _in_end(run: AuditedRun, told: Sequence[_Told]) -> _Found:
    last = next((event for event in reversed(told) if event.ends_run), None)
    if run.status.is_terminal and not run.events_lost and (last is None or ENDS_OF_RUNS[last.kind] is not run.status):
        tells = "tells of no end" if last is None else f"tells of {last.kind} last"
        yield Break.UNTOLD_END, f"it is {run.status}, and its log {tells}"
    sealed = max((seal.sequence for seal in run.seals), default=0)
    if last is not None and last.sequence > sealed:
        yield Break.UNSEALED_END, f"the end at event {last.sequence} has no seal"


def _in_seals(run: AuditedRun) -> _Found:
    expected = list(range(1, len(run.seals) + 1))
    if [seal.number for seal in run.seals] != expected:
        yield Break.MISSING_SEAL, f"its seals are not numbered 1 to {len(expected)}"
        return  # Each is made over the one before: nothing can be said of the others.
    before: Seal | None = None
    for seal in run.seals:
        after = 0 if before is None else before.sequence
        if seal.sequence < after:
            yield Break.MISSING_SEAL, f"seal {seal.number} ends at event {seal.sequence}, the one before at {after}"
        digest = digest_of(
            (event for event in run.events if after < event.sequence <= seal.sequence),
            run_id=run.id,
            number=seal.number,
            sequence=seal.sequence,
            events_lost=seal.events_lost,
            at=seal.at,
            previous=None if before is None else before.digest,
        )
        if digest != seal.digest:
            yield Break.BROKEN_SEAL, f"seal {seal.number} doesn't match events {after + 1} to {seal.sequence}"
        before = seal
