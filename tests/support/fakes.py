"""Fakes of the ports, for tests of the services: a clock that tests own, a store that fails on demand, a broker."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from agentq.domain.agents import Agent
from agentq.domain.errors import BrokerUnavailableError
from agentq.domain.model import ModelReply, StepKind, StepRef
from agentq.domain.pauses import Pause
from agentq.ports.dispatch import Wakeup
from agentq.ports.leases import Acquired, Leases, LeaseSurvey, LeaseView, Tally
from agentq.ports.steps import FenceRequest, FenceVerdict, Loaded, NextProbe, Settled, Settlement, StepStore

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class FakeClock:
    """Time passes when the test's own thread sleeps. Others, such as a heartbeat's, sleep until `end`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.chance = 0.5
        self.slept: list[float] = []
        self._thread = threading.get_ident()
        self._ended = threading.Event()

    def elapsed_seconds(self) -> float:
        return self.now

    def random(self) -> float:
        return self.chance

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            self._ended.wait()
            return
        self.slept.append(seconds)
        self.now += seconds

    def end(self) -> None:
        self._ended.set()


class FakeCallLimit:
    """Notes how long each call may take, and whether one is under way. `when_set` is called once a limit is set."""

    def __init__(self, *, can_end_calls: bool = True) -> None:
        self.can_end_calls = can_end_calls
        self.limits: list[float] = []
        self.is_set = False
        self.when_set: Callable[[], object] = lambda: None

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        self.limits.append(seconds)
        self.is_set = True
        self.when_set()
        try:
            yield
        finally:
            self.is_set = False


class RecordingDispatcher:
    """A broker that takes everything, unless it is away, and shows the backlog that the test gives it."""

    def __init__(self, *, backlog: int = 0) -> None:
        self.published: list[Wakeup] = []
        self.models_waiting = backlog
        self.drained = False
        self.is_away = False

    @property
    def numbers(self) -> list[int]:
        return [wakeup.ref.number for wakeup in self.published]

    def publish(self, wakeups: Sequence[Wakeup]) -> None:
        self._answer()
        self.published += wakeups

    def backlog(self) -> Mapping[StepKind, int]:
        self._answer()
        return {StepKind.MODEL: self.models_waiting, StepKind.TOOL: 0}

    def is_drained(self) -> bool:
        self._answer()
        return self.drained

    def _answer(self) -> None:
        if self.is_away:
            raise BrokerUnavailableError("the broker is away")


class ScriptedModels:
    """Replies in the order given; one that is an exception is raised."""

    def __init__(self, *replies: ModelReply | BaseException) -> None:
        self.replies = list(replies)
        self.conversations: list[list[dict[str, object]]] = []

    def complete(self, agent: Agent, messages: list[dict[str, object]]) -> ModelReply:
        self.conversations.append(messages)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply


class Script:
    """Which calls of an adapter fail, in the order told; the others are made. `before` is called before each."""

    def __init__(self) -> None:
        self._failures: defaultdict[str, list[tuple[Exception, bool]]] = defaultdict(list)
        self.calls: list[str] = []
        self.before: dict[str, Callable[[], object]] = {}

    def fail(self, method: str, *errors: Exception) -> None:
        """The next calls of the method raise these, and nothing is changed."""
        self._failures[method] += [(error, False) for error in errors]

    def lose_reply(self, method: str, error: Exception) -> None:
        """A call of the method is made, and raises."""
        self._failures[method].append((error, True))

    def end(self) -> None:
        """From now on everything works."""
        self._failures.clear()

    def play(self, method: Callable[_Given, _Answer], *arguments: _Given.args, **named: _Given.kwargs) -> _Answer:
        name = method.__name__
        self.calls.append(name)
        self.before.get(name, lambda: None)()
        error, is_made = self._failures[name].pop(0) if self._failures[name] else (None, True)
        if error is not None and not is_made:
            raise error
        answer = method(*arguments, **named)
        if error is not None:
            raise error
        return answer


class ScriptedSteps:
    """A real StepStore behind a script; keeps what it was asked to fence and to settle."""

    def __init__(self, real: StepStore) -> None:
        self._real = real
        self.script = Script()
        self.settlements: list[Settlement] = []
        self.fences: list[FenceRequest] = []

    def load(self, ref: StepRef) -> Loaded | None:
        return self.script.play(self._real.load, ref)

    def fence(self, request: FenceRequest) -> FenceVerdict:
        self.fences.append(request)
        return self.script.play(self._real.fence, request)

    def take_back(self, ref: StepRef, fence_id: str, owner: str) -> bool:
        return self.script.play(self._real.take_back, ref, fence_id, owner)

    def hand_back(self, ref: StepRef, *, due_in_seconds: float, why: str, owner: str = "agentq") -> bool:
        return self.script.play(self._real.hand_back, ref, due_in_seconds=due_in_seconds, why=why, owner=owner)

    def park(self, ref: StepRef) -> bool:
        return self.script.play(self._real.park, ref)

    def pauses(self) -> tuple[Pause, ...]:
        return self.script.play(self._real.pauses)

    def ask_again(self, request: NextProbe) -> bool:
        return self.script.play(self._real.ask_again, request)

    def settle(self, settlement: Settlement) -> Settled:
        self.settlements.append(settlement)
        return self.script.play(self._real.settle, settlement)

    def beat(self, ref: StepRef) -> bool:
        return self.script.play(self._real.beat, ref)


class ScriptedLeases:
    """Real leases behind a script; keeps for how long they were to be renewed."""

    def __init__(self, real: Leases) -> None:
        self._real = real
        self.script = Script()
        self.renewed_seconds: list[float] = []

    def acquire(self, ref: StepRef, owner: str, seconds: float) -> Acquired:
        return self.script.play(self._real.acquire, ref, owner, seconds)

    def renew(self, ref: StepRef, owner: str, seconds: float) -> Tally | None:
        self.renewed_seconds.append(seconds)
        return self.script.play(self._real.renew, ref, owner, seconds)

    def release(self, ref: StepRef, owner: str, *, is_suppressed: bool = False) -> None:
        self.script.play(self._real.release, ref, owner, is_suppressed=is_suppressed)

    def survey(self, refs: Sequence[StepRef]) -> LeaseSurvey:
        return self.script.play(self._real.survey, refs)

    def bury(self, ref: StepRef, process: str) -> bool:
        return self.script.play(self._real.bury, ref, process)

    def unmark(self, ref: StepRef) -> bool:
        return self.script.play(self._real.unmark, ref)

    def view(self, ref: StepRef) -> LeaseView:
        """What anybody would see of that step now."""
        return self._real.survey([ref]).views[0]
