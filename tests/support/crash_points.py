"""The points at which a process may fail: before and after each call that it makes of a port, a tool, a probe, a model.

They are found by asking the Protocols for their methods, so that a new call is a new point. What is to fail where is a
plan in a file, one for each run; what a process passed, and what failed, is written into a trace beside it.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from agentq import ports
from agentq.domain.errors import (
    BrokerUnavailableError,
    LeasesUnavailableError,
    OutcomeNotKeptError,
    StoreUnavailableError,
)
from agentq.ports.dispatch import Dispatcher
from agentq.ports.keeping import KeeperStore
from agentq.ports.leases import Leases
from agentq.ports.steps import OutcomeFiles, StepStore
from agentq.ports.world import Models

PLANS_FOLDER = "crash-plans"  # In the folder that processes run in.

# By the wiring's name for it: each port on a step's way from message to settle, and on the keeper's way over it, with
# what it raises when it can't be reached, or its answer was lost.
FAULTY_PORTS: Mapping[str, tuple[Any, type[Exception]]] = {
    "steps": (StepStore, StoreUnavailableError),
    "keeping": (KeeperStore, StoreUnavailableError),
    "leases": (Leases, LeasesUnavailableError),
    "dispatcher": (Dispatcher, BrokerUnavailableError),
    "outcome_files": (OutcomeFiles, OutcomeNotKeptError),
    "models": (Models, ConnectionResetError),
}

OTHER_PORTS = {
    "RunStore": "what clients and people ask for; a step's way doesn't lead through it",
    "DecisionStore": "people's decisions, each one transaction",
    "AuditStore": "it only reads, for people",
    "PauseStore": "people's decisions about what is not to be called for now",
    "PurgeStore": "it takes runs that are over; its own tests kill it at each statement",
    "NotificationStore": "who is told of a dead letter changes no run; a keeper that dies in between tells again",
    "Channel": "it leads out of the deployment",
    "Nudges": "hints that the keeper can do without",
    "ModelClient": "asked through Models, which is a point",
    "Clock": "it can't be away",
    "CallLimit": "it is the kernel's",
}

# A process asks now and then and remembers the answer, so that a step passes these points by chance.
REMEMBERED = ("StepStore.pauses",)

NOT_PASSED = {
    "KeeperStore.resume": "no fault leaves a run without an open step: it takes a row that somebody removed",
    "KeeperStore.fail_interactive": "its caller drives an interactive run, and no worker",
    "OutcomeFiles.set_aside": "its run was purged: that takes a person, and a month",
    "KeeperStore.see_agents": "at a keeper's start, before it leads",
}


class FaultKind(StrEnum):
    KILL = "killed"
    KILL_WORKER = "killed with its worker"
    STALL = "stopped until past every deadline"
    CUT = "cut off"  # Before: nothing is sent. After: what was sent is done, and the answer is lost.
    REFUSE = "refused for the audit log's sake"


class Who(StrEnum):
    SPINE = "spine"
    HEART = "heartbeat"
    KEEPER = "keeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Just before, or just after, the first call of that name by `who` for a step (0: for whichever)."""

    who: Who
    number: int
    call: str
    is_after: bool

    def __str__(self) -> str:
        by = "" if self.who is Who.SPINE else f"the {self.who}'s "
        return f"{'after' if self.is_after else 'before'} {by}{self.call}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Counted from the fault before it in its plan."""

    point: Point
    kind: FaultKind
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.point}{f' ({self.nth})' if self.nth > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One line of a trace. `fault` is the place in the plan of the fault that fired here, None: it was only passed."""

    point: Point
    pid: int
    at: float  # Of the machine's monotonic clock.
    fault: int | None = None


def points_of(protocol: Any) -> list[str]:
    """The calls of a port, by name."""
    methods = (name for name, member in vars(protocol).items() if callable(member) and not name.startswith("_"))
    return [f"{protocol.__name__}.{name}" for name in methods]


def all_calls() -> set[str]:
    """Every call at which something may fail."""
    of_ports = (call for protocol, _ in FAULTY_PORTS.values() for call in points_of(protocol))
    return {*of_ports, "Tool.call", "Tool.ask"}


def protocols_of_ports() -> set[str]:
    """The names of the Protocols that the core has."""
    modules = [import_module(f"{ports.__name__}.{module.name}") for module in iter_modules(ports.__path__)]
    return {
        name
        for module in modules
        for name, each in vars(module).items()
        if getattr(each, "_is_protocol", False) and each.__module__ == module.__name__
    }


@dataclass(slots=True)
class Plans:
    """The plans and traces of one deployment."""

    folder: Path
    _keeper_plans: Path = field(init=False)

    def __post_init__(self) -> None:
        self._keeper_plans = self.folder / "for the keeper"

    # --- whoever makes them

    def add(self, run_id: str, faults: Sequence[Fault], *, watches_keeper: bool) -> None:
        """Before the run is there. `watches_keeper`: what the keeper does with the run is traced too."""
        self._keeper_plans.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{run_id}.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        if watches_keeper:
            (self._keeper_plans / run_id).touch()

    def close(self, run_id: str) -> None:
        """Nothing fails any more over that run; its trace stays."""
        (self.folder / f"{run_id}.json").unlink(missing_ok=True)
        (self._keeper_plans / run_id).unlink(missing_ok=True)

    # --- whoever fails

    def of_keeper(self) -> list[str]:
        """The runs that the keeper is watched over."""
        return [path.name for path in self._keeper_plans.iterdir()] if self._keeper_plans.exists() else []

    def faults(self, run_id: str) -> list[Fault] | None:
        """None: nobody planned anything."""
        try:
            planned: list[dict[str, Any]] = json.loads((self.folder / f"{run_id}.json").read_text())
        except FileNotFoundError:
            return None
        return [
            Fault(point=_point(each["point"]), kind=FaultKind(each["kind"]), nth=int(each["nth"])) for each in planned
        ]

    def trace(self, run_id: str) -> list[Passed]:
        try:
            text = (self.folder / f"{run_id}.trace").read_text()
        except FileNotFoundError:
            return []
        whole, _, _ = text.rpartition("\n")  # Behind it is what somebody is about to write.
        return [_passed(json.loads(line)) for line in whole.splitlines()]

    def note(self, run_id: str, point: Point, fault: int | None = None) -> None:
        """In one write, so that no line stays torn whoever dies."""
        line = asdict(Passed(point=point, pid=os.getpid(), at=time.monotonic(), fault=fault))
        file = os.open(self.folder / f"{run_id}.trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)

    def pass_point(self, run_id: str, point: Point) -> FaultKind | None:
        """Note that this process passes the point; what it must do to itself here."""
        faults = self.faults(run_id)
        if faults is None:
            return None
        self.note(run_id, point)
        trace = self.trace(run_id)
        fired = [place for place, passed in enumerate(trace) if passed.fault is not None]
        if len(fired) == len(faults):
            return None
        due = faults[len(fired)]
        since = trace[fired[-1] :] if fired else trace
        passes = sum(passed.point == due.point for passed in since if passed.fault is None)
        if point != due.point or passes != due.nth:
            return None
        self.note(run_id, point, len(fired))
        return due.kind


def fired(trace: Sequence[Passed]) -> Iterator[Passed]:
    return (passed for passed in trace if passed.fault is not None)


def _passed(line: dict[str, Any]) -> Passed:
    return Passed(point=_point(line["point"]), pid=line["pid"], at=line["at"], fault=line["fault"])


def _point(given: dict[str, Any]) -> Point:
    return Point(who=Who(given["who"]), number=given["number"], call=given["call"], is_after=given["is_after"])
