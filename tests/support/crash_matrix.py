"""Runs cells of the crash matrix on real processes, many at once, and says what is broken in each."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sqlalchemy import select

from agentq.adapters.sql.schema import runs
from agentq.domain.errors import StoreUnavailableError
from agentq.domain.model import Run, RunStatus
from agentq.services.enqueue import new_run_id
from tests.support.crash_cells import (
    AT_ONCE_MAX,
    KINDS,
    WRITES,
    Cell,
    Kind,
    cells_of,
    may_leave_unknown,
    passed_points,
    point,
    sequences_of,
)
from tests.support.crash_points import (
    PLANS_FOLDER,
    FaultKind,
    Passed,
    Plans,
    Point,
    Who,
    fired,
)
from tests.support.invariants import World, broken_audit, broken_invariants, take_picture
from tests.support.processes import is_alive
from tests.support.system import AGENT, System
from tests.support.workers import KeeperProcess, WorkerProcess

CRASHING_APP = "tests.support.crashing_app"
ROLES = ("model", "model", "tools", "tools", "isolated")
QUICK = {
    "agents": ("tests.support.crash_agents",),
    "lease_seconds": 2.5,
    "operation_deadline_seconds": 4.0,
    "hand_back_seconds": 0.5,
    "visibility_timeout_seconds": 60.0,
    "tools_concurrency": 6,
}
STALL_SECONDS = 6.0  # Longer than a lease, and than a deadline with what settles after it, and the keeper's interval.
TRIES_MAX = 3  # Of a cell whose fault didn't come, because another's fault came in between.
LOST_SECONDS = 150.0  # A message that may wait in a queue is given 30 s, and twice that the second time.
LATE_FAULT_SECONDS = 30.0  # A fault behind a settle may come after the run's end, or never.
POLL_SECONDS = 0.1
# To be cut off from the world is a failed call, and a lease that wasn't given back looks like a death.
COSTLY = ("Tool.call", "Tool.ask", "Models.complete", "Leases.release")


@dataclass(slots=True, kw_only=True)
class Active:
    """A cell that runs."""

    cell: Cell
    run_id: str
    began: float
    tries: int
    is_paused: bool
    woken: set[int] = field(default_factory=set)  # Places in the trace of stalls that were ended.


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`fired` of the cell's faults did."""

    cell: Cell
    run_id: str
    fired: int
    seconds: float
    broken: tuple[str, ...]
    is_vacuous: bool

    def __str__(self) -> str:
        return "\n    ".join([f"{self.cell} (run {self.run_id}, {self.seconds:.0f} s)", *self.broken])


class CrashMatrix:
    """A deployment whose workers and keepers fail by plan; those that die are started again."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._plans = Plans(system.folder / PLANS_FOLDER)
        self._results: list[Result] = []

    def start(self) -> None:
        self._plans.folder.mkdir()
        system = self._system
        processes: list[WorkerProcess | KeeperProcess] = [
            *(WorkerProcess(role, system.settings, system.folder, module=CRASHING_APP) for role in ROLES),
            *(KeeperProcess(system.settings, system.folder, module=CRASHING_APP) for _ in range(2)),
        ]
        system.processes += processes
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready(seconds=90)

    def points(self) -> dict[Kind, list[Point]]:
        """What a step of each kind passes when nothing fails but its prefix. Fails when that is broken already."""
        results = self.run(Cell(kind=kind, faults=kind.prefix) for kind in KINDS)
        broken = [str(result) for result in results if result.broken]
        assert not broken, "\n".join(broken)
        return {
            result.cell.kind: passed_points(result.cell.kind, self._plans.trace(result.run_id)) for result in results
        }

    def run(self, cells: Iterable[Cell], *, ends_at: float | None = None) -> list[Result]:
        """Run them, many at once; no new one is begun after `ends_at`."""
        waiting = [(cell, 1) for cell in cells]
        active: dict[str, Active] = {}
        results: list[Result] = []
        with self._waking(active):
            self._run(waiting, active, results, ends_at)
        self._results += results
        return results

    def check(self, results: Sequence[Result]) -> list[str]:
        """Everything that is broken, the invariants of the whole database included, each with the cell it is of."""
        cells = {result.run_id: result.cell for result in self._results}
        told = [str(result) for result in results if result.broken]
        picture = take_picture(self._system.database)
        world = World(effects=self._system.receiver.effects)
        for sentence in [*broken_invariants(picture, world=world), *broken_audit(self._system.database)]:
            cell = next((str(cell) for run_id, cell in cells.items() if run_id in sentence), "no cell")
            told.append(f"{cell}\n    {sentence}")
        return told

    # --- one cell

    def _run(
        self,
        waiting: list[tuple[Cell, int]],
        active: dict[str, Active],
        results: list[Result],
        ends_at: float | None,
    ) -> None:
        while waiting or active:
            if ends_at is not None and time.monotonic() > ends_at:
                waiting.clear()
            # A deployment on SQLite is locked for as long as a process is stopped in the middle of a transaction.
            with suppress(StoreUnavailableError):
                self._begin_those_that_fit(waiting, active)
            self._end_pauses(active.values())
            self._restart_dead()
            with suppress(StoreUnavailableError):
                for over in self._over(active):
                    result = self._judge(over)
                    del active[over.run_id]
                    if result.is_vacuous and over.tries < TRIES_MAX:
                        waiting.append((over.cell, over.tries + 1))
                    else:
                        results.append(result)
            time.sleep(POLL_SECONDS)

    def _begin_those_that_fit(self, waiting: list[tuple[Cell, int]], active: dict[str, Active]) -> None:
        for entry in list(waiting):
            if len(active) >= AT_ONCE_MAX:
                return
            cell, tries = entry
            if self._fits(cell, [each.cell for each in active.values()]):
                begun = self._begin(cell, tries)
                active[begun.run_id] = begun
                waiting.remove(entry)

    def _fits(self, cell: Cell, others: Sequence[Cell]) -> bool:
        if cell.is_exclusive:
            return not others
        alike = sum(other.at_once_max == cell.at_once_max for other in others)
        return alike < cell.at_once_max and not any(other.is_exclusive for other in others)

    def _begin(self, cell: Cell, tries: int) -> Active:
        run_id = new_run_id()
        self._plans.add(run_id, cell.faults, watches_keeper=cell.kind.is_kept)
        client = self._system.client
        if cell.kind.is_paused:
            client.pause(cell.kind.tool)
        client.enqueue(AGENT, cell.kind.script, run_id=run_id)
        return Active(cell=cell, run_id=run_id, began=time.monotonic(), tries=tries, is_paused=cell.kind.is_paused)

    def _end_pauses(self, active: Iterable[Active]) -> None:
        """Its time is over when what was to fail has failed, or there is nothing more to pass."""
        for each in active:
            trace = self._plans.trace(each.run_id) if each.is_paused else []
            has_parked = any(passed.point == point("StepStore.park", is_after=True) for passed in trace)
            if has_parked or any(fired(trace)):
                with suppress(StoreUnavailableError):
                    self._system.client.resume(each.cell.kind.tool)
                    each.is_paused = False

    def _over(self, active: dict[str, Active]) -> list[Active]:
        with self._system.database.reading() as connection:
            found = connection.execute(select(runs.c.id, runs.c.status).where(runs.c.id.in_(list(active))))
            statuses = {run_id: RunStatus(status) for run_id, status in found}
        return [active[run_id] for run_id, status in statuses.items() if self._is_over(active[run_id], status)]

    def _is_over(self, active: Active, status: RunStatus) -> bool:
        """What failed has failed, and has recovered as far as it can; from then on nothing fails over it any more."""
        is_late = time.monotonic() > active.began + LOST_SECONDS
        if is_late or self._has_ended(active, status):
            self._plans.close(active.run_id)
            return is_late or self._is_quiet(active)
        return False

    def _has_ended(self, active: Active, status: RunStatus) -> bool:
        trace = self._plans.trace(active.run_id)
        if status is RunStatus.FAILED and not may_leave_unknown(active.cell, trace):
            return False  # Shown as unknown until somebody wakes up who knows better; or broken.
        return status.is_terminal and self._is_quiet(active) and self._has_all_fired(active, trace)

    def _has_all_fired(self, active: Active, trace: Sequence[Passed]) -> bool:
        """Faults behind a settle may come after the run's end."""
        is_due = time.monotonic() < active.began + LATE_FAULT_SECONDS
        return active.cell.is_sequence or not is_due or len(list(fired(trace))) == len(active.cell.faults)

    def _is_quiet(self, active: Active) -> bool:
        """Whoever was stalled has gone on, and left the step or died."""
        trace = self._plans.trace(active.run_id)
        for place, passed in enumerate(trace):
            if passed.fault is None or active.cell.faults[passed.fault].kind is not FaultKind.STALL:
                continue
            if place not in active.woken:
                return False
            went_on = [later.point for later in trace[place:] if later.pid == passed.pid and later.fault is None]
            is_last = passed.point.call == "Leases.release" or passed.point.who is not Who.SPINE
            has_left = is_last or any(later.call == "Leases.release" for later in went_on)
            if is_alive(passed.pid) and not has_left:
                return False
        return True

    def _judge(self, active: Active) -> Result:
        trace = self._plans.trace(active.run_id)
        count = len(list(fired(trace)))
        is_vacuous = count < len(active.cell.faults) and not active.cell.is_sequence
        broken = tuple(self._broken(active, self._system.client.get(active.run_id), trace))
        return Result(
            cell=active.cell,
            run_id=active.run_id,
            fired=count,
            seconds=time.monotonic() - active.began,
            broken=(*broken, *(("its fault never came",) if is_vacuous else ())),
            is_vacuous=is_vacuous and not broken,
        )

    def _broken(self, active: Active, run: Run, trace: Sequence[Passed]) -> Iterator[str]:
        cell, receiver = active.cell, self._system.receiver
        if not run.status.is_terminal:
            steps = [(step.number, step.state.value, step.attempt) for step in run.steps]
            yield f"it is lost: {run.status} after {LOST_SECONDS:g} s, its steps are {steps}"
        if run.status not in (RunStatus.COMPLETED, RunStatus.FAILED):
            return
        if run.dead_letter is not None and not may_leave_unknown(cell, trace):
            yield f"a false dead letter: {run.dead_letter.reason}, {run.dead_letter.error}"
        if run.dead_letter is not None and not run.dead_letter.outcome_unknown:
            yield "its dead letter doesn't say that an outcome is unknown"
        requests = receiver.requests_of(run.id, "write")
        keys, effects = {request.key for request in requests}, receiver.effects_of(run.id)
        if len(keys) > 1:
            yield f"one write, and {len(keys)} keys"
        if keys == {None} and len(requests) > 1:
            yield f"a plain write was made {len(requests)} times"
        if run.status is RunStatus.COMPLETED and effects != int(cell.kind.effect.is_write):
            yield f"it is completed, and its write happened {effects} times"
        yield from self._overcharged(cell, run)

    def _overcharged(self, cell: Cell, run: Run) -> Iterator[str]:
        """What is away for a moment costs nothing."""
        is_blink = all(fault.kind is FaultKind.CUT and fault.point.call not in COSTLY for fault in cell.faults)
        for step in run.steps if is_blink else ():
            if step.crashes or (step.tries and "second try" not in cell.kind.name):
                yield f"step {step.number} was charged {step.crashes} crashes and {step.tries} tries"

    # --- processes

    @contextmanager
    def _waking(self, active: dict[str, Active]) -> Iterator[None]:
        """In a thread of its own: one that is stopped may hold the lock that everything else here waits for."""
        is_over = threading.Event()

        def wake() -> None:
            while not is_over.wait(POLL_SECONDS):
                self._wake_stalled(list(active.values()))

        thread = threading.Thread(target=wake, name="waking")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _wake_stalled(self, active: Iterable[Active]) -> None:
        for each in active:
            for place, passed in enumerate(self._plans.trace(each.run_id)):
                if passed.fault is None or each.cell.faults[passed.fault].kind is not FaultKind.STALL:
                    continue
                if place not in each.woken and time.monotonic() > passed.at + STALL_SECONDS:
                    each.woken.add(place)
                    with suppress(ProcessLookupError):
                        os.kill(passed.pid, signal.SIGCONT)

    def _restart_dead(self) -> None:
        for process in self._system.processes:
            if not process.is_running:
                process.start()


def all_cells(points: dict[Kind, list[Point]]) -> list[Cell]:
    """The whole matrix: those that others can run beside, then those that need all of it."""
    cells = [cell for kind, its in points.items() for cell in cells_of(kind, its)]
    return sorted(cells, key=lambda cell: cell.is_exclusive)


def all_sequences() -> list[Cell]:
    return [cell for kind in WRITES for cell in sequences_of(kind)]


def every_nth(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """About `count` of them, spread over all; the seed says which."""
    step = max(1, len(cells) // count)
    return list(cells[seed % step :: step])
