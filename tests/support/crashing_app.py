"""A worker or keeper that fails where a plan says: `python -m tests.support.crashing_app worker tools`.

It is the real command: only the wiring that it works with puts a proxy around each port, tool, probe and model.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import agentq.bootstrap
from agentq.domain.agents import Registry
from agentq.domain.errors import AuditRefusedError
from agentq.domain.model import StepRef
from agentq.domain.tools import Tool
from tests.support.crash_points import FAULTY_PORTS, PLANS_FOLDER, FaultKind, Plans, Point, Who, points_of

ROLE = "CRASHING_ROLE"  # An environment variable, for agents that differ by role.


class _Here(threading.local):
    ref: StepRef | None = None  # The attempt that this thread has, or asked for, last.


class Failing:
    """Passes points, and fails at those that a plan names."""

    def __init__(self, plans: Plans, *, is_keeper: bool) -> None:
        self._plans = plans
        self._is_keeper = is_keeper
        self._here = _Here()
        self._lock = threading.Lock()

    def proxy(self, protocol: Any, unavailable: type[Exception], real: Any) -> Any:
        """`real` with every call of the protocol between two points; the rest of it as it is."""
        methods = {
            call.rpartition(".")[2]: self.between_points(call, unavailable, getattr(real, call.rpartition(".")[2]))
            for call in points_of(protocol)
        }
        return _Proxy(real, methods)

    def between_points(self, call: str, unavailable: type[Exception], function: Callable[..., Any]) -> Any:
        @wraps(function)
        def pass_both(*arguments: Any, **named: Any) -> Any:
            refs = list(_refs_in([*arguments, *named.values()]))
            if call == "Leases.acquire":
                self._here.ref = refs[0]
            self._pass(call, refs, unavailable, is_after=False)
            answer = function(*arguments, **named)
            self._pass(call, [*refs, *_refs_in(answer)], unavailable, is_after=True)
            return answer

        return pass_both

    def _pass(self, call: str, refs: Sequence[StepRef], unavailable: type[Exception], *, is_after: bool) -> None:
        for run_id, number, who in self._concerned(refs):
            point = Point(who=who, number=number, call=call, is_after=is_after)
            with self._lock:
                kind = self._plans.pass_point(run_id, point)
            if kind is not None:
                _fail(kind, unavailable(f"{call} is away"))

    def _concerned(self, refs: Sequence[StepRef]) -> Iterator[tuple[str, int, Who]]:
        """The steps that a call is about; a call of the keeper that names none is about all that it is watched over."""
        if self._is_keeper:
            watched = self._plans.of_keeper()
            named = {ref.run_id for ref in refs}
            yield from ((run_id, 0, Who.KEEPER) for run_id in watched if not refs or run_id in named)
            return
        if threading.current_thread().name == "agentq-heartbeat":
            yield from ((ref.run_id, ref.number, Who.HEART) for ref in refs[:1])
        elif self._here.ref is not None:
            yield self._here.ref.run_id, self._here.ref.number, Who.SPINE


class _Proxy:
    def __init__(self, real: Any, methods: dict[str, Any]) -> None:
        self._real = real
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class CrashingWiring(agentq.bootstrap.Wiring):
    failing: ClassVar[Failing]  # One for the process and its forked children: they inherit the registry too.

    def __getattribute__(self, name: str) -> Any:
        """A port is put behind its proxy when it is first made."""
        faulty = FAULTY_PORTS.get(name)
        if faulty is None or name in super().__getattribute__("__dict__"):
            return super().__getattribute__(name)
        protocol, unavailable = faulty
        self.__dict__[name] = proxy = self.failing.proxy(protocol, unavailable, super().__getattribute__(name))
        return proxy

    @cached_property
    def registry(self) -> Registry:
        agents = super().registry.agents()
        return Registry([replace(agent, tools=[self._faulty(tool) for tool in agent.tools]) for agent in agents])

    def _faulty(self, tool: Tool) -> Tool:
        def between(call: str, function: Callable[..., Any]) -> Any:
            return self.failing.between_points(call, ConnectionResetError, function)

        probes = [replace(probe, function=between("Tool.ask", probe.function)) for probe in tool._probes]
        return replace(tool, function=between("Tool.call", tool.function), _probes=probes)


def _refs_in(value: Any) -> Iterator[StepRef]:
    """The attempts that a call names, in whatever it is given or answers."""
    if isinstance(value, StepRef):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _refs_in(each)
    elif isinstance(ref := getattr(value, "ref", None), StepRef):
        yield ref
    elif value is not None:
        yield from _refs_in(getattr(value, "wakeup", getattr(value, "settlement", None)))


def _fail(kind: FaultKind, away: Exception) -> None:
    match kind:
        case FaultKind.KILL:
            _end(os.getpid())
        case FaultKind.KILL_WORKER:
            _end(os.getppid())
        case FaultKind.STALL:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.CUT:
            raise away
        case FaultKind.REFUSE:
            raise AuditRefusedError("the table of events is full")


def _end(pid: int) -> NoReturn:
    os.kill(pid, signal.SIGKILL)
    while True:
        signal.pause()  # A pool's child dies with its worker.


def main() -> None:
    os.environ[ROLE] = sys.argv[-1]
    CrashingWiring.failing = Failing(Plans(Path(PLANS_FOLDER).absolute()), is_keeper=sys.argv[-1] == "keeper")
    agentq.bootstrap.Wiring = CrashingWiring  # type: ignore[misc]
    from agentq.cli.main import main as agentq_main

    agentq_main()


if __name__ == "__main__":
    main()
