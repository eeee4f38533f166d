"""A worker process of a simulation: the real spine and heartbeat over gated ports, in threads that obey a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from agentq.adapters.memory_leases import MemoryLeases
from agentq.adapters.sql.deciding import SqlDecisionStore
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.keeping import SqlKeeperStore
from agentq.adapters.sql.runs import SqlRunStore
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.agents import Agent, Registry
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import (
    BrokerUnavailableError,
    LeasesUnavailableError,
    StoreUnavailableError,
)
from agentq.domain.failures import FailureClassifier
from agentq.domain.function_model import FunctionModel
from agentq.domain.model import Json, ModelReply, StepRef
from agentq.domain.probes import ProbeAnswer
from agentq.domain.retry import Budgets, RetryPolicy
from agentq.domain.tools import ToolContext, tool
from agentq.ports.deciding import DecisionStore
from agentq.ports.dispatch import Dispatcher
from agentq.ports.keeping import KeeperStore
from agentq.ports.leases import Leases
from agentq.ports.runs import RunStore
from agentq.ports.steps import StepStore
from agentq.ports.world import Models
from agentq.services.execute import Limits, StepExecutor
from agentq.services.heartbeat import Heartbeat
from tests.support.gates import Actor, Observer, Order, Stop, gated, this_actor
from tests.support.simulated_world import Broker, Receiver, Request, Time

RUN = "run"
WORLD = "World"
LEASE_SECONDS, DEADLINE_SECONDS, SETTLES_SECONDS = 15.0, 30.0, 10.0
TAG_DEADLINE_SECONDS = 5.0  # One is shorter than a lease.
CRASHES_MAX, TRIES_MAX = 2, 3


def _itself(store: StepStore) -> StepStore:
    return store


@dataclass(slots=True)
class Parts:
    """What a simulation is made of; a test may put something else in."""

    database: Database
    time: Time
    steps: StepStore
    runs: RunStore
    keeping: KeeperStore
    decisions: DecisionStore
    leases: Leases
    policy: RetryPolicy
    flush: Callable[[], None]  # Redis forgets everything.
    reaper_steps: StepStore | None = None  # None: as the workers'.
    worker_steps: Callable[[StepStore], StepStore] = _itself  # What a worker makes of the store it is given.
    heartbeat: type[Heartbeat] = Heartbeat
    executor: type[StepExecutor] = StepExecutor
    ends_calls: bool = True  # At its deadline a caller is ended by the kernel's timer.
    waits_for_lost_statements: bool = True  # A statement that is sent again comes after the one that was lost.


def real_parts(database: Database, time: Time) -> Parts:
    budgets = Budgets(tries_max=TRIES_MAX, crashes_max=CRASHES_MAX, backoff_seconds=1.0, patience_seconds=3600.0)
    leases = MemoryLeases(lease_seconds=LEASE_SECONDS, elapsed_seconds=lambda: time.now)
    return Parts(
        database=database,
        time=time,
        steps=SqlStepStore(database),
        runs=SqlRunStore(database),
        keeping=SqlKeeperStore(database),
        decisions=SqlDecisionStore(database),
        leases=leases,
        flush=leases.flush,
        policy=RetryPolicy(FailureClassifier(), budgets),
    )


# --- Tools ----------------------------------------------------------------------------------------------------------


@tool
def look(context: ToolContext) -> Json:
    """Read the world."""
    _process().stop("read")
    return "seen"


@tool
def die(context: ToolContext) -> Json:
    """Kill whoever tries it."""
    _process().stop("die")
    return None


@tool(effect=ToolEffect.IDEMPOTENT_WRITE, deadline=TAG_DEADLINE_SECONDS, settles_within=SETTLES_SECONDS)
def tag(context: ToolContext) -> Json:
    return _process().write(context, key=context.idempotency_key)


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, deadline=DEADLINE_SECONDS, settles_within=SETTLES_SECONDS)
def pay(context: ToolContext) -> Json:
    return _process().write(context, key=None)


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, deadline=DEADLINE_SECONDS, settles_within=SETTLES_SECONDS)
def wire(context: ToolContext) -> Json:
    """Pay, where the receiver can be asked."""
    return _process().write(context, key=None)


@wire.probe
def ask_about_wire(context: ToolContext) -> ProbeAnswer:
    return _process().ask(context)


AGENT = Agent(name="agent", model=FunctionModel(lambda messages, tools: "done"), tools=[look, die, tag, pay, wire])
REGISTRY = Registry([AGENT])
LIMITS = Limits(
    operation_deadline_seconds=DEADLINE_SECONDS,
    settle_patience_seconds=60.0,
    hand_back_seconds=60.0,
    result_bytes_max=1_000_000,
    turns_max=10,
    probe_deadline_seconds=10.0,
    probes_max=2,
)


class AnsweringModels:
    """Each turn after the first is the answer."""

    def complete(self, agent: Agent, messages: list[dict[str, object]]) -> ModelReply:
        return ModelReply(text="done")


# --- Processes ------------------------------------------------------------------------------------------------------


class ProcessClock:
    """A process's clock. Threads that aren't ordered about sleep until the process has ended."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.has_ended = Event()

    def elapsed_seconds(self) -> float:
        return self._time.now

    def random(self) -> float:
        return 0.5

    def sleep(self, seconds: float) -> None:
        actor = this_actor()
        if actor is None:
            self.has_ended.wait()
        else:
            actor.stop_at(Stop("Clock", "sleep"))


class Surroundings(Observer, Protocol):
    """What a process finds around it."""

    parts: Parts
    broker: Broker
    receiver: Receiver

    def receiver_ends_at(self, process: "Process") -> float:
        """Until when a request that it sends now may be acted on."""
        ...


class Process:
    """A worker process: executes one delivery after the other until it dies."""

    def __init__(self, surroundings: Surroundings, name: str, pid: int) -> None:
        self.name = name
        self.prefix = f"host/boot/{pid}-"
        self.ref: StepRef | None = None
        self.work: Actor | None = None
        self.beat: Actor | None = None
        self.ends_at: float | None = None
        self.request: Request | None = None
        self.is_asked_in_vain = False
        self._surroundings = surroundings
        self._deliveries = 0
        parts = surroundings.parts
        store = parts.worker_steps(gated(StepStore, parts.steps, StoreUnavailableError, surroundings))
        leases = gated(Leases, parts.leases, LeasesUnavailableError, surroundings)
        self._clock = ProcessClock(parts.time)
        self.heartbeat = parts.heartbeat(leases, store, self._clock, LEASE_SECONDS)
        self._executor = parts.executor(
            store=store,
            heartbeat=self.heartbeat,
            registry=REGISTRY,
            models=gated(Models, AnsweringModels(), None, surroundings),
            policy=parts.policy,
            clock=self._clock,
            call_limit=self,
            limits=LIMITS,
            new_owner=self._new_owner,
            dispatcher=gated(Dispatcher, surroundings.broker, BrokerUnavailableError, surroundings),
        )

    @property
    def is_working(self) -> bool:
        return self.work is not None and not self.work.is_over

    @property
    def has_started(self) -> bool:
        return self.work is not None and "acquire" in self.work.passed

    @property
    def has_fenced(self) -> bool:
        return self.work is not None and "fence" in self.work.passed

    def receive(self, ref: StepRef) -> None:
        self.ref = ref
        self.request = None
        self.is_asked_in_vain = False
        self.work = Actor(self.name, lambda: self._executor.execute(ref))
        _processes[self.work] = self

    def forget_work(self) -> None:
        """It is done with its message, or dead."""
        if self.work is not None:
            _processes.pop(self.work, None)
        self.ref = self.work = None

    def begin_beat(self) -> None:
        self.beat = Actor(f"{self.name}'s heart", self.heartbeat.beat)

    def end(self) -> None:
        for actor in (self.work, self.beat):
            if actor is not None:
                actor.kill()
        self._clock.has_ended.set()

    def _new_owner(self) -> str:
        self._deliveries += 1
        return f"{self.prefix}1/{self._deliveries}"

    # --- in the thread that works

    @property
    def can_end_calls(self) -> bool:
        return True

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        self.ends_at = self._surroundings.parts.time.now + seconds
        try:
            yield
        finally:
            self.ends_at = None

    def stop(self, method: str) -> None:
        """Stop before something that happens outside."""
        actor = this_actor()
        assert actor is not None
        if actor.stop_at(Stop(WORLD, method)) is Order.RAISE:
            raise ConnectionResetError(f"reset before {method}")

    def write(self, context: ToolContext, *, key: str | None) -> Json:
        self.stop("send")
        ends_at = self._surroundings.receiver_ends_at(self)
        request = Request(run_id=context.run_id, number=context.step, key=key, ends_at=ends_at)
        self.request = self._surroundings.receiver.send(request)
        self.stop("reply")
        return {"receipt": context.step}

    def ask(self, context: ToolContext) -> ProbeAnswer:
        self.stop("ask")
        if self.is_asked_in_vain:
            return ProbeAnswer.cant_tell()
        has_happened = self._surroundings.receiver.effects[context.run_id, context.step] > 0
        return ProbeAnswer.happened({"receipt": context.step}) if has_happened else ProbeAnswer.did_not_happen()


def _process() -> Process:
    actor = this_actor()
    assert actor is not None
    return _processes[actor]


_processes: dict[Actor, Process] = {}
