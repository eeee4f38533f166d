"""The delivery ledger: what became of every attempt at a step, and how many of its deliveries came to nothing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from agentq.domain.events import EventKind
from agentq.domain.model import Event, Run, Step, StepState

# Events of an attempt that neither begin nor end it.
MEANWHILE: Mapping[str, str] = {
    EventKind.FENCE_TAKEN_BACK: "taken back",
    EventKind.STEP_HANDED_BACK: "handed back",
    EventKind.STEP_PARKED: "parked",
    EventKind.PROBE_ANSWERED: "probed",
    EventKind.PROBE_REQUESTED: "probe requested",
    EventKind.OUTCOME_AGREED: "late outcome agreed",
    EventKind.OUTCOME_CONTRADICTED: "contradicted",
    EventKind.DEAD_LETTER_WITHDRAWN: "withdrawn",
    EventKind.DEAD_LETTER_HEALED: "healed",
    EventKind.WRITE_GIVEN_UP: "given up as unknown",
}


class AttemptEnd(StrEnum):
    """How an attempt ended. `DIED`: the process that had it did, and the step was requeued."""

    SETTLED = "settled"
    SETTLED_LATE = "settled late"
    RESOLVED = "resolved"
    REQUEUED = "requeued"
    DIED = "died"
    DEAD_LETTERED = "dead-lettered"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that was done about an attempt between its start and its end, or after it; `by` is an event's actor."""

    at: datetime
    what: str
    by: str
    told: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a step. None is what nobody wrote down, or what isn't so yet.

    `worker` had it; `ended_by` wrote its end. `told` is what the event of its end says: why, what was charged.
    `is_held`: somebody has its lease now; None: Redis doesn't say, or it has ended.
    """

    number: int
    started_at: datetime | None = None
    worker: str | None = None
    end: AttemptEnd | None = None
    ended_at: datetime | None = None
    ended_by: str | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    happenings: tuple[Happening, ...] = ()
    is_held: bool | None = None

    @property
    def seconds(self) -> float | None:
        """From its start to its end."""
        if self.started_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.started_at).total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """How many deliveries of a step came to nothing; not `is_exact`: at least so many."""

    count: int
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLedger:
    """The attempts at one step. `suppressed` None: not known."""

    number: int
    attempts: tuple[Attempt, ...]
    suppressed: Suppressed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A run with its audit log, and for each of its steps what became of its deliveries."""

    run: Run
    events: tuple[Event, ...]
    steps: tuple[StepLedger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Who has an attempt now, and for how long; None: not known."""

    attempt: int
    worker: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What Redis knows of a run's steps, by number. `covers_run`: since before the run began it counted every delivery
    that came to nothing."""

    covers_run: bool
    suppressed: Mapping[int, int]
    held: Mapping[int, Held]


def ledger_of(run: Run, events: Sequence[Event], counted: Counted | None) -> Ledger:
    """The ledger of a run, from all of its events. `counted` None: Redis doesn't say."""
    of_step: dict[int, list[Event]] = {}
    for event in events:
        if event.number is not None and event.attempt is not None:
            of_step.setdefault(event.number, []).append(event)
    return Ledger(
        run=run,
        events=tuple(events),
        steps=tuple(
            StepLedger(
                number=step.number,
                attempts=_attempts(run, step, of_step.get(step.number, []), counted),
                suppressed=_suppressed(step, counted),
            )
            for step in run.steps
        ),
    )


def _suppressed(step: Step, counted: Counted | None) -> Suppressed | None:
    """What its last settle or requeue heard is a lower bound for ever: who came later isn't in it."""
    stored, live = step.suppressed, None if counted is None else counted.suppressed.get(step.number)
    if counted is not None and counted.covers_run:
        return Suppressed(count=live or 0, is_exact=True)
    if stored is None and not live:
        return None
    return Suppressed(count=max(stored or 0, live or 0), is_exact=False)


def _attempts(run: Run, step: Step, events: Sequence[Event], counted: Counted | None) -> tuple[Attempt, ...]:
    if step.number <= run.copied_steps:
        return ()  # Its result came with the copy: nobody delivered it.
    parts: defaultdict[int, _Parts] = defaultdict(_Parts)
    for event in events:
        parts[event.attempt or 0].add(event)
    if step.state is not StepState.WAITING:
        _ = parts[step.attempt]
    held = None if counted is None else counted.held.get(step.number)
    if held is not None and held.attempt in parts and run.age_seconds is not None:
        now = run.created_at + timedelta(seconds=run.age_seconds)
        began = None if held.seconds is None else now - timedelta(seconds=held.seconds)
        parts[held.attempt].hold(held.worker, began)
    is_held = None if counted is None else held is not None
    last = max((number for number, part in parts.items() if part.has_result), default=step.attempt)
    attempts = [part.attempt(number, step, result_of=last) for number, part in sorted(parts.items())]
    return tuple(each if each.end else replace(each, is_held=is_held) for each in attempts)


class _Parts:
    """What is known of one attempt, event after event."""

    def __init__(self) -> None:
        self._started_at: datetime | None = None
        self._worker: str | None = None
        self._end: AttemptEnd | None = None
        self._ended: Event | None = None
        self._happenings: list[Happening] = []

    def hold(self, worker: str, since: datetime | None) -> None:
        self._worker = self._worker or worker
        if since is not None:
            self._start(since)

    def add(self, event: Event) -> None:
        data = event.data
        match event.kind:
            case EventKind.FENCE_STAMPED:
                self.hold(event.actor, event.at)
            case EventKind.STEP_SETTLED:
                self._finish(AttemptEnd.SETTLED, event)
            case EventKind.STEP_REQUEUED:
                is_dead = "worker" in data and _is_keeper(event.actor)
                self._finish(AttemptEnd.DIED if is_dead else AttemptEnd.REQUEUED, event)
            case EventKind.RUN_DEAD_LETTERED:
                self._finish(AttemptEnd.DEAD_LETTERED, event)
            case EventKind.RUN_FAILED:
                self._finish(AttemptEnd.FAILED, event)
            case EventKind.OUTCOME_LATE:
                self._finish(AttemptEnd.SETTLED_LATE, event)
            case EventKind.WRITE_RESOLVED:
                if data.get("decision") == "happened":
                    self._finish(AttemptEnd.RESOLVED, event)
                else:
                    self._note("resolved", event)
            case kind if kind in MEANWHILE:
                if kind == EventKind.DEAD_LETTER_WITHDRAWN:
                    self._reopen()
                self._note(MEANWHILE[kind], event)

    @property
    def has_result(self) -> bool:
        """The step's result is this attempt's."""
        return self._end in (AttemptEnd.SETTLED, AttemptEnd.SETTLED_LATE, AttemptEnd.RESOLVED)

    def attempt(self, number: int, step: Step, *, result_of: int) -> Attempt:
        """What is known of it; the step's result, if there is one, is that of attempt `result_of`."""
        end, ended = self._end, self._ended
        ended_at = None if ended is None else ended.at
        is_overtaken = step.state is StepState.COMPLETED and number != result_of
        if end is None and (number < step.attempt or is_overtaken):
            end = AttemptEnd.SUPERSEDED
        elif end is None and step.state in _ENDS:
            end, ended_at = _ENDS[step.state], step.finished_at
        return Attempt(
            number=number,
            started_at=self._started_at,
            worker=self._worker,
            end=end,
            ended_at=ended_at,
            ended_by=None if ended is None else ended.actor,
            told={} if ended is None else _reasons(ended),
            happenings=tuple(self._happenings),
        )

    def _start(self, at: datetime) -> None:
        self._started_at = at if self._started_at is None else min(self._started_at, at)

    def _finish(self, end: AttemptEnd, event: Event) -> None:
        """The last one counts: a late outcome may come behind a requeue."""
        self._reopen()
        self._end, self._ended = end, event
        if event.data.get("note") == "not_called":
            return
        if self._worker is None and end is not AttemptEnd.RESOLVED:
            self._worker = event.data.get("worker") or (None if _is_keeper(event.actor) else event.actor)
        if "seconds" in event.data:
            self._start(event.at - timedelta(seconds=event.data["seconds"]))

    def _reopen(self) -> None:
        """What looked like its end was none: it becomes one of the things that happened meanwhile."""
        if self._end is not None and self._ended is not None:
            self._note(self._end.value, self._ended)
        self._end = self._ended = None

    def _note(self, what: str, event: Event) -> None:
        self._happenings.append(Happening(at=event.at, what=what, by=event.actor, told=_reasons(event)))


_ENDS = {  # Where no event of the attempt says it: a read's may be lost, and a run's end closes without one.
    StepState.COMPLETED: AttemptEnd.SETTLED,
    StepState.DEAD_LETTERED: AttemptEnd.DEAD_LETTERED,
    StepState.CLOSED: AttemptEnd.CLOSED,
}


def _is_keeper(actor: str) -> bool:
    """A worker's own name has four parts."""
    return actor == "keeper" or (actor.startswith("keeper/") and actor.count("/") == 1)


def _reasons(event: Event) -> dict[str, Any]:
    """What an event tells that the attempt itself doesn't."""
    return {name: value for name, value in event.data.items() if name not in ("fence", "seconds", "worker", "tool")}
