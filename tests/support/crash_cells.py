"""The cells of the crash matrix: what kinds of step there are, which points each of them passes, what fails there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from agentq.domain.effects import ToolEffect
from agentq.domain.model import Json
from tests.support.crash_points import REMEMBERED, Fault, FaultKind, Passed, Point, Who, fired

READ, KEYED, PLAIN = ToolEffect.READ_ONLY, ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE

AT_ONCE_MAX = 24  # Most of a cell's time is waiting for leases and deadlines.


def point(call: str, *, is_after: bool = False, number: int = 2, who: Who = Who.SPINE) -> Point:
    return Point(who=who, number=number, call=call, is_after=is_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of step: a run whose step `number` is of that kind. The faults of `prefix` come before the cell's own."""

    name: str
    tool: str | None
    number: int = 2
    effect: ToolEffect = READ
    has_probe: bool = False
    prefix: tuple[Fault, ...] = ()
    is_kept: bool = False  # The points are the keeper's, with this step in its hands.
    is_slow: bool = False  # Its call outlasts a heartbeat, each time.
    is_one_delivery: bool = False  # A further one is of another kind.
    is_paused: bool = False  # Until its faults have fired.

    @property
    def is_turn(self) -> bool:
        return self.number != 2

    @property
    def script(self) -> dict[str, Json]:
        """What the run's agent is asked to do; the run's id names it to the receiver."""
        calls: list[Json] = [] if self.tool is None else [[self.tool, {} if self.tool == "vanish" else {"name": "it"}]]
        return {"turns": [calls] if calls else [], "pace": "is slow" if self.is_turn else "is quick"}


CHILD_DIES = (Fault(point=point("Tool.call", is_after=True), kind=FaultKind.KILL),)
AUDIT_REFUSES = (Fault(point=point("StepStore.settle"), kind=FaultKind.REFUSE),)

KINDS = (
    Kind(name="a turn", tool="look", number=1, is_slow=True),
    Kind(name="an answer", tool=None, number=1, is_slow=True),
    Kind(name="a read", tool="look", is_slow=True),
    Kind(name="a keyed write", tool="put", effect=KEYED, is_slow=True),
    Kind(name="a plain write", tool="pay", effect=PLAIN, is_slow=True),
    Kind(name="a plain write with a probe", tool="pay_traceably", effect=PLAIN, has_probe=True, is_slow=True),
    Kind(name="a write without a reply", tool="pay_without_reply", effect=PLAIN, has_probe=True),
    Kind(name="a write at its second try", tool="pay_at_second_try", effect=PLAIN, has_probe=True),
    Kind(name="a tool that is gone", tool="vanish"),
    Kind(name="a paused write", tool="pay_when_allowed", effect=PLAIN, is_one_delivery=True, is_paused=True),
    Kind(
        name="a fence that got old",
        tool="pay",
        effect=PLAIN,
        prefix=(Fault(point=point("StepStore.fence", is_after=True), kind=FaultKind.STALL),),
        is_one_delivery=True,
    ),
    Kind(
        name="a probe's delivery",
        tool="pay_traceably",
        effect=PLAIN,
        has_probe=True,
        prefix=CHILD_DIES,
    ),
    Kind(name="an outcome for a file", tool="pay", effect=PLAIN, prefix=AUDIT_REFUSES, is_one_delivery=True),
    Kind(name="an outcome in a file, kept", tool="pay", effect=PLAIN, prefix=AUDIT_REFUSES, is_kept=True),
    Kind(name="a dead read, kept", tool="look", prefix=CHILD_DIES, is_kept=True),
    Kind(name="a dead keyed write, kept", tool="put", effect=KEYED, prefix=CHILD_DIES, is_kept=True),
    Kind(name="a dead plain write, kept", tool="pay", effect=PLAIN, prefix=CHILD_DIES, is_kept=True),
    Kind(
        name="a dead write with a probe, kept",
        tool="pay_traceably",
        effect=PLAIN,
        has_probe=True,
        prefix=CHILD_DIES,
        is_kept=True,
    ),
    Kind(
        name="a lost message, kept",
        tool="look",
        prefix=(Fault(point=point("Leases.acquire"), kind=FaultKind.CUT),),
        is_kept=True,
    ),
    Kind(
        name="a retry, kept",
        tool="look",
        prefix=(Fault(point=point("Tool.call"), kind=FaultKind.CUT),),
        is_kept=True,
    ),
)

WRITES = tuple(kind for kind in KINDS if kind.name in ("a keyed write", "a plain write", "a plain write with a probe"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A run of that kind, and what fails on its way. `is_sequence`: what comes first may keep the rest from failing."""

    kind: Kind
    faults: tuple[Fault, ...]
    is_sequence: bool = False

    def __str__(self) -> str:
        return f"{self.kind.name}: {', then '.join(map(str, self.faults)) or 'nothing fails'}"

    @property
    def is_exclusive(self) -> bool:
        """A worker is killed with all its children: what others do in it would be lost with it."""
        return any(fault.kind is FaultKind.KILL_WORKER for fault in self.faults)

    @property
    def at_once_max(self) -> int:
        """How many such cells may run side by side: of those that need the keeper, the pause, or all workers for
        themselves few, or one would keep the other's fault from coming."""
        if self.is_exclusive or self.kind.is_paused:
            return 1
        return 2 if self.kind.is_kept else AT_ONCE_MAX


def passed_points(kind: Kind, trace: Sequence[Passed]) -> list[Point]:
    """The points that each step of the kind passes behind its prefix, in their order."""
    last = max((place for place, passed in enumerate(trace) if passed.fault is not None), default=-1)
    its = [passed.point for passed in trace[last + 1 :] if passed.fault is None and _is_of(kind, passed.point)]
    begins = [place for place, each in enumerate(its) if each == point("Leases.acquire") and place > 0]
    if kind.is_one_delivery and begins:
        its = its[: begins[0]]
    return list(dict.fromkeys(its))


def _is_of(kind: Kind, at: Point) -> bool:
    if at.call in REMEMBERED:
        return False
    match at.who:
        case Who.KEEPER:
            return kind.is_kept
        case Who.HEART:
            return kind.is_slow and at.number == kind.number and not kind.is_kept
        case Who.SPINE:
            return at.number == kind.number and not kind.is_kept


def cells_of(kind: Kind, points: Sequence[Point]) -> Iterator[Cell]:
    """Each kind of fault at each point."""
    kinds = [FaultKind.KILL, FaultKind.STALL, FaultKind.CUT]
    if not kind.is_turn and not kind.is_kept:
        kinds.append(FaultKind.KILL_WORKER)  # Of a turn, and of the keeper, the process is all that there is.
    for at, how in product(points, kinds):
        yield Cell(kind=kind, faults=(*kind.prefix, Fault(point=at, kind=how)))


def sequences_of(kind: Kind) -> Iterator[Cell]:
    """Every two faults around one write: at where it begins, is made and is recorded, then there or on its way back."""
    for first, second in product(_faults_at(AROUND_A_WRITE), _faults_at((*AROUND_A_WRITE, *ON_ITS_WAY_BACK))):
        yield Cell(kind=kind, faults=(first, second), is_sequence=True)


AROUND_A_WRITE = ("StepStore.fence", "Leases.renew", "Tool.call", "StepStore.settle")
ON_ITS_WAY_BACK = ("StepStore.take_back", "Leases.release", "Leases.acquire", "Tool.ask")


def _faults_at(calls: Sequence[str]) -> list[Fault]:
    kinds = (FaultKind.KILL, FaultKind.STALL, FaultKind.CUT)
    ways = product(calls, (False, True), kinds)
    return [Fault(point=point(call, is_after=is_after), kind=how) for call, is_after, how in ways]


def may_leave_unknown(cell: Cell, trace: Sequence[Passed]) -> bool:
    """Whether what fired is a reason for a dead letter over an unknown write: who knew what became of a call is gone,
    with the fence standing, and nobody can be asked."""
    if cell.kind.effect is not PLAIN or cell.kind.has_probe:
        return False
    for passed in fired(trace):
        assert passed.fault is not None
        its = [each.point for each in trace[: trace.index(passed)] if each.pid == passed.pid and each.fault is None]
        before = its[_last(its, point("Leases.acquire")) :]  # In this delivery.
        if _is_reason(cell.faults[passed.fault].kind, passed.point, before):
            return True
    return False


def _is_reason(how: FaultKind, at: Point, before: Sequence[Point]) -> bool:
    """`before`: what the process passed until then, this point included."""
    is_calling = before.count(point("Tool.call")) > 0 and not _has(before, "StepStore.settle")
    match how:
        case FaultKind.KILL | FaultKind.KILL_WORKER:
            may_stand = _has(before, "StepStore.fence", is_after=True)
            ends = ("StepStore.settle", "StepStore.take_back", "OutcomeFiles.keep")
            is_over = any(_has(before, end, is_after=True) for end in ends)
            return may_stand and not is_over
        case FaultKind.STALL:  # The kernel ends it when it goes on; behind its call it goes on, and settles.
            return is_calling
        case FaultKind.CUT:
            return at.call == "Tool.call" or at == point("OutcomeFiles.keep")
        case FaultKind.REFUSE:
            return False  # The outcome is kept, and heals it.


def _last(points: Sequence[Point], wanted: Point) -> int:
    return max((place for place, each in enumerate(points) if each == wanted), default=0)


def _has(before: Sequence[Point], call: str, *, is_after: bool = False) -> bool:
    return point(call, is_after=is_after) in before
