"""One run in a world that a test moves: the real spine, stores, leases and keeper, stopped at every call they make."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Event

from sqlalchemy import RowMapping, delete

from agentq.adapters.memory_leases import MemoryLeases
from agentq.adapters.sql.deciding import SqlDecisionStore
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.keeping import SqlKeeperStore
from agentq.adapters.sql.runs import SqlRunStore
from agentq.adapters.sql.schema import dead_letters, events, runs, steps
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.agents import Agent, Registry
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import (
    AgentqError,
    BrokerUnavailableError,
    LeasesUnavailableError,
    RefusedError,
    StoreUnavailableError,
)
from agentq.domain.failures import FailureClassifier
from agentq.domain.function_model import FunctionModel
from agentq.domain.loop import assistant_message, steps_for
from agentq.domain.model import Decision, Json, ModelReply, RunStatus, StepRef, ToolCall
from agentq.domain.outcomes import Recorded, Turn
from agentq.domain.retry import Budgets, RetryPolicy
from agentq.domain.tools import ToolContext, tool
from agentq.ports import (
    DeathNote,
    DecisionStore,
    Dispatcher,
    KeeperStore,
    Leases,
    NewRun,
    Ruling,
    RunStore,
    Settlement,
    StepStore,
)
from agentq.services.dispatch import dispatch
from agentq.services.execute import Limits, Models, StepExecutor
from agentq.services.heartbeat import Heartbeat
from agentq.services.reap import Reaper
from tests.support.gates import Actor, Order, Stop, gated, this_actor
from tests.support.invariants import Picture, World, broken_invariants, take_picture
from tests.support.simulated_world import EPOCH, Broker, Place, Receiver, Request, Time

RUN = "run"
SCRIPTS = (("look",), ("tag",), ("pay",), ("die",), ("look", "look"), ("pay", "pay"), ("look", "tag", "pay"))
CANCELS = (False, False, True)  # Most runs are to come further than that.
LEASE_SECONDS, DEADLINE_SECONDS, SETTLES_SECONDS = 15.0, 30.0, 10.0
TAG_DEADLINE_SECONDS = 5.0  # One is shorter than a lease.
CRASHES_MAX, TRIES_MAX, REPLAYS_MAX = 2, 3, 2
DRAIN_ROUNDS_MAX = 40
WORLD = "World"
# Calls between which nothing that others do makes a difference: a keeper makes them in one go.
UNINTERESTING = {"take_due", "backlog", "is_drained", "in_flight", "runs_without_open_step", "interactive_runs"}
# Changes whose statement may still wait in the database when its sender has lost the connection.
STATEMENTS = {"fence", "take_back", "settle", "hand_back"}
# Answers that may get old before their receiver acts on them.
HOLDABLE = {"load", "fence", "renew", "survey", "in_flight"}

READ, KEYED, PLAIN = ToolEffect.READ_ONLY, ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE


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
    reaper_steps: StepStore | None = None  # None: as the workers'.
    heartbeat: type[Heartbeat] = Heartbeat
    ends_calls: bool = True  # At its deadline a caller is ended by the kernel's timer.
    waits_for_lost_statements: bool = True  # A statement that is sent again comes after the one that was lost.


def real_parts(database: Database, time: Time) -> Parts:
    budgets = Budgets(tries_max=TRIES_MAX, crashes_max=CRASHES_MAX, backoff_seconds=1.0, patience_seconds=3600.0)
    return Parts(
        database=database,
        time=time,
        steps=SqlStepStore(database),
        runs=SqlRunStore(database),
        keeping=SqlKeeperStore(database),
        decisions=SqlDecisionStore(database),
        leases=MemoryLeases(lease_seconds=LEASE_SECONDS, elapsed_seconds=lambda: time.now),
        policy=RetryPolicy(FailureClassifier(), budgets),
    )


@dataclass(frozen=True, slots=True)
class Move:
    """Something that may happen now. `weight`: how likely, beside the others."""

    name: str
    do: Callable[[], object]
    weight: int = 4

    def __repr__(self) -> str:
        return self.name


class Broken(AssertionError):
    """What must hold doesn't; the message tells what happened before."""


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


@tool(effect=KEYED, deadline=TAG_DEADLINE_SECONDS, settles_within=SETTLES_SECONDS)
def tag(context: ToolContext) -> Json:
    return _process().write(context, key=context.idempotency_key)


@tool(effect=PLAIN, deadline=DEADLINE_SECONDS, settles_within=SETTLES_SECONDS)
def pay(context: ToolContext) -> Json:
    return _process().write(context, key=None)


AGENT = Agent(name="agent", model=FunctionModel(lambda messages, tools: "done"), tools=[look, die, tag, pay])
REGISTRY = Registry([AGENT])
LIMITS = Limits(
    operation_deadline_seconds=DEADLINE_SECONDS,
    settle_patience_seconds=60.0,
    hand_back_seconds=60.0,
    result_bytes_max=1_000_000,
    turns_max=10,
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


class Process:
    """A worker process: executes one delivery after the other until it dies."""

    def __init__(self, simulation: "Simulation", name: str, pid: int) -> None:
        self.name = name
        self.prefix = f"host/boot/{pid}-"
        self.ref: StepRef | None = None
        self.work: Actor | None = None
        self.beat: Actor | None = None
        self.ends_at: float | None = None
        self.request: Request | None = None
        self._simulation = simulation
        self._deliveries = 0
        parts = simulation.parts
        store = gated(StepStore, parts.steps, StoreUnavailableError, simulation)
        leases = gated(Leases, parts.leases, LeasesUnavailableError, simulation)
        self._clock = ProcessClock(parts.time)
        self.heartbeat = parts.heartbeat(leases, store, self._clock, LEASE_SECONDS)
        self._executor = StepExecutor(
            store=store,
            heartbeat=self.heartbeat,
            registry=REGISTRY,
            models=gated(Models, AnsweringModels(), None, simulation),
            policy=parts.policy,
            clock=self._clock,
            call_limit=self,
            limits=LIMITS,
            new_owner=self._new_owner,
            dispatcher=gated(Dispatcher, simulation.broker, BrokerUnavailableError, simulation),
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
        self.work = Actor(self.name, lambda: self._executor.execute(ref))

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
        self.ends_at = self._simulation.time.now + seconds
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
        ends_at = self._simulation.receiver_ends_at(self)
        request = Request(run_id=context.run_id, number=context.step, key=key, ends_at=ends_at)
        self.request = self._simulation.receiver.send(request)
        self.stop("reply")
        return {"receipt": context.step}


def _process() -> Process:
    actor = this_actor()
    assert actor is not None
    return _processes[actor]


_processes: dict[Actor, Process] = {}


# --- The simulation -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a person saw of an unknown write, and when."""

    number: int
    at: datetime
    has_happened: bool
    is_wrong: bool = False


@dataclass(slots=True)
class Waiting:
    """A statement whose sender has lost its connection."""

    actor: Actor
    stop: Stop
    call: Callable[[], object]


@dataclass(slots=True)
class Tally:
    """What happened so far, as far as the invariants must know."""

    faults: int = 0
    deaths: int = 0  # Of processes that had started an attempt.
    stalls: int = 0  # ... or were silent past their lease, which looks the same.
    trouble: bool = False  # A process died, or a call raised, over a fence.
    replays: int = 0
    lies: int = 0


@dataclass(slots=True)
class Simulation:
    """A run whose first turn asked for the tools of `script`. `moves` says what may happen; `check` what must hold."""

    parts: Parts
    script: Sequence[str]
    faults_max: int = 2
    cancels: bool = True
    broker: Broker = field(default_factory=Broker)
    receiver: Receiver = field(default_factory=Receiver)
    tally: Tally = field(default_factory=Tally)
    trace: list[str] = field(default_factory=list)
    processes: list[Process] = field(init=False)
    keeper: Actor | None = None
    notes: list[DeathNote] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    seen: Look | None = None
    picture: Picture = field(init=False)
    _reaper: Reaper = field(init=False)
    _pids: int = 0
    _is_stale: bool = True

    def __post_init__(self) -> None:
        parts = self.parts
        parts.time.now = 0.0
        with parts.database.writing() as connection:
            for table in (dead_letters, events, steps, runs):
                connection.execute(delete(table))
        parts.leases.survey([])
        parts.time.now += LEASE_SECONDS + 1  # Redis has been up for a while.
        parts.runs.add([NewRun(id=RUN, agent=AGENT.name, input="order 17")])
        calls = tuple(ToolCall(id=f"call-{n}", name=name, arguments={}) for n, name in enumerate(self.script))
        turn = Recorded(
            result=assistant_message(ModelReply(tool_calls=calls)), then=Turn(calls=steps_for(AGENT, calls))
        )
        ref = StepRef(run_id=RUN, number=1, attempt=1)
        settled = parts.steps.settle(Settlement(ref=ref, owner="host/boot/0-0/0", effect=READ, change=turn))
        self.broker.publish(list(settled.wakeups))
        self.processes = [self._new_process("w0"), self._new_process("w1")]
        self._reaper = Reaper(
            keeping=gated(KeeperStore, parts.keeping, StoreUnavailableError, self),
            steps=gated(StepStore, parts.reaper_steps or parts.steps, StoreUnavailableError, self),
            leases=gated(Leases, parts.leases, LeasesUnavailableError, self),
            dispatcher=gated(Dispatcher, self.broker, BrokerUnavailableError, self),
            policy=parts.policy,
        )
        self.look_again()

    # --- what others ask

    @property
    def time(self) -> Time:
        return self.parts.time

    @property
    def run(self) -> RowMapping:
        return self.picture.runs[0]

    @property
    def is_active(self) -> bool:
        return not RunStatus(self.run["status"]).is_terminal

    @property
    def is_at_rest(self) -> bool:
        """The run has ended, and nobody is at it any more."""
        is_busy = any(process.is_working for process in self.processes) or self._keeps or bool(self.waiting)
        in_doubt = self.run["pending_effect_id"] is not None
        return not (self.is_active or is_busy or in_doubt or self.broker.messages or self._may_replay)

    def receiver_ends_at(self, process: Process) -> float:
        """Until when a request that is sent now may be acted on."""
        row = take_picture(self.parts.database).runs[0]
        if row["pending_effect_id"] is not None and row["pending_effect_owner"].startswith(process.prefix):
            return float((row["pending_effect_deadline_at"] - EPOCH).total_seconds() + SETTLES_SECONDS)
        return (self.time.now if process.ends_at is None else process.ends_at) + SETTLES_SECONDS

    def made(self, port: str, method: str) -> None:
        self.time.now += 0.001  # No two transactions have the same time.
        self._is_stale = self._is_stale or port.endswith("Store")

    def waits(self, actor: Actor, stop: Stop, call: Callable[[], object]) -> None:
        self.waiting.append(Waiting(actor, stop, call))

    # --- what may happen

    def moves(self) -> list[Move]:
        """Whatever may happen now; what gets on first."""
        may_fail = self.tally.faults < self.faults_max
        found = [move for process in self.processes for move in self._worker_moves(process)]
        found += self._keeper_moves()
        found += self._judge_moves(may_lie=may_fail)
        found += self._world_moves()
        found += self._time_moves()
        if may_fail:
            found += self._faults()
        return found

    def make(self, move: Move) -> None:
        """Make the move, and check what must hold. Raises Broken."""
        self.trace.append(move.name)
        move.do()
        self._acknowledge()
        self.check()

    def play(self, *names: str) -> None:
        """Make these moves, and check after each. A name is the beginning of a move's."""
        for name in names:
            moves = self.moves()
            move = next((move for move in moves if move.name.startswith(name)), None)
            assert move is not None, f"{name!r} can't happen now, only {moves}"
            self.make(move)

    def walk(self, choose: Callable[[list[Move]], Move], moves_max: int) -> None:
        """Make moves until the run is at rest, then bring it to its end. Raises Broken."""
        for _ in range(moves_max):
            if self.is_at_rest:
                break
            self.make(choose(self.moves()))
        self.drain()

    def _worker_moves(self, process: Process) -> Iterator[Move]:
        name, work = process.name, process.work
        if not process.is_working:
            yield from self._heart_moves(process)
            for ref in dict.fromkeys(self.broker.messages):
                yield Move(f"{name} gets {_text(ref)}", lambda ref=ref: self._deliver(process, ref), 12)  # type: ignore[misc]
            return
        assert work is not None and work.at is not None
        if work.at == Stop(WORLD, "die"):
            yield Move(f"{name} dies of the step", lambda: self._die(process, redelivered=True), 12)
            yield Move(f"{name} dies of the step, noted", lambda: self._die(process, noted=True), 4)
        elif self._may_go_on(process):
            yield Move(f"{name} goes on: {work.at}", lambda: work.obey(Order.GO), 16)
            if work.at.method in HOLDABLE and not work.at.is_answer:
                yield Move(f"{name} goes on, held: {work.at}", lambda: work.obey(Order.HOLD), 3)
        yield from self._heart_moves(process)

    def _heart_moves(self, process: Process) -> Iterator[Move]:
        beat = process.beat
        if beat is not None and not beat.is_over:
            yield Move(f"{process.name}'s heart: {beat.at}", lambda: beat.obey(Order.GO), 4)
        elif process.is_working:
            yield Move(f"{process.name}'s heart begins to beat", process.begin_beat, 2)

    def _may_go_on(self, process: Process) -> bool:
        work = process.work
        assert work is not None and work.at is not None
        if work.at == Stop(WORLD, "reply"):
            return process.request is not None and process.request.place is Place.LANDED
        waits = any(each.actor is work for each in self.waiting) and self.parts.waits_for_lost_statements
        return not (work.at.method in STATEMENTS and waits)

    def _keeper_moves(self) -> Iterator[Move]:
        if not self._keeps:
            yield Move("the keeper begins", self._begin_to_keep, 4)
            return
        keeper = self.keeper
        assert keeper is not None
        yield Move(f"the keeper goes on: {keeper.at}", lambda: self._keep_on(Order.GO), 8)

    def _judge_moves(self, *, may_lie: bool) -> Iterator[Move]:
        run = self.run
        fence, number = run["pending_effect_id"], run["pending_effect_number"]
        if self.seen is not None:
            yield Move("the judge answers", self._answer, 6)
        elif fence is not None and (run["pending_effect_effect"] == PLAIN or not self.is_active):
            has_happened = self.receiver.effects[RUN, number] > 0
            yield Move("the judge looks", lambda: self._look(number, has_happened), 3 if self.is_active else 8)
            if has_happened and may_lie and self.time.moment > _settled_at(run):
                yield Move("the judge looks, and errs", lambda: self._look(number, False, is_wrong=True), 2)
        if self._may_replay and self.tally.replays < REPLAYS_MAX:
            yield Move("the judge replays", self._replay, 8)

    @property
    def _may_replay(self) -> bool:
        run = self.run
        can_go_on = run["status"] == RunStatus.FAILED and run["pending_effect_id"] is None
        return can_go_on and not run["cancel_requested"] and self.tally.replays < REPLAYS_MAX

    def _world_moves(self) -> Iterator[Move]:
        for request in self.receiver.flying:
            yield Move(f"the request of step {request.number} lands", lambda r=request: self._land(r), 8)  # type: ignore[misc]
            yield Move(f"the request of step {request.number} is lost", lambda r=request: self._lose(r), 2)  # type: ignore[misc]
        for waiting in self.waiting:
            yield Move(f"{waiting.actor.name}'s {waiting.stop} lands", lambda w=waiting: self._run_late(w), 4)  # type: ignore[misc]
            yield Move(f"{waiting.actor.name}'s {waiting.stop} is dropped", lambda w=waiting: self.waiting.remove(w), 4)  # type: ignore[misc]
        if self.cancels and self.is_active and not self.run["cancel_requested"]:
            yield Move("cancel", self._cancel, 1)

    def _time_moves(self) -> Iterator[Move]:
        yield Move("3 seconds pass", lambda: self.pass_time(3), 2)
        yield Move("a lease's time passes", lambda: self.pass_time(LEASE_SECONDS + 1), 3)
        run, now = self.run, self.time.moment
        if run["pending_effect_id"] is None:
            return
        for what, moment in (("deadline", run["pending_effect_deadline_at"]), ("time to settle", _settled_at(run))):
            seconds = (moment - now).total_seconds() + 0.01
            if seconds > 0:
                yield Move(f"the fence's {what} passes", lambda s=seconds: self.pass_time(s), 3)  # type: ignore[misc]
                yield Move(f"the fence's {what} passes, noted", lambda s=seconds: self.pass_time(s, noted=True), 1)  # type: ignore[misc]

    def _faults(self) -> Iterator[Move]:
        for process in self.processes:
            if process.is_working:
                yield from self._worker_faults(process)
            if process.beat is not None and not process.beat.is_over:
                beat = process.beat
                for order in (Order.CUT, Order.LOSE):
                    yield self._fault(f"{process.name}'s heart {order}: {beat.at}", lambda b=beat, o=order: b.obey(o))  # type: ignore[misc]
        if self._keeps:
            assert self.keeper is not None and self.keeper.at is not None
            at = self.keeper.at
            yield self._fault(f"the keeper {Order.DIE}: {at}", lambda: self._keep_on(Order.DIE))
            if at.port != "Clock":
                yield self._fault(f"the keeper {Order.CUT}: {at}", lambda: self._keep_on(Order.CUT))
                yield self._fault(f"the keeper {Order.LOSE}: {at}", lambda: self._keep_on(Order.LOSE))
        if isinstance(self.parts.leases, MemoryLeases):
            yield self._fault("redis is flushed", self.parts.leases.flush, 2)
        for ref in dict.fromkeys(self.broker.messages):
            yield self._fault(f"the message {_text(ref)} is lost", lambda ref=ref: self.broker.messages.remove(ref))  # type: ignore[misc]
            yield self._fault(f"the message {_text(ref)} is doubled", lambda ref=ref: self.broker.messages.append(ref))  # type: ignore[misc]

    def _worker_faults(self, process: Process) -> Iterator[Move]:
        name, work = process.name, process.work
        assert work is not None and work.at is not None
        at = work.at
        yield self._fault(f"{name} is killed: {at}", lambda: self._die(process, redelivered=True), 2)
        yield self._fault(f"{name} is killed, noted: {at}", lambda: self._die(process, noted=True))
        yield self._fault(f"{name} stalls past its lease", lambda: self._stall(process), 2)
        if at.is_answer or at.port in ("Clock", "Models") or at == Stop(WORLD, "die"):
            return
        if at.port == WORLD:
            yield self._fault(f"{name}'s call raises: {at}", lambda: self._raise(process), 2)
            return
        if not self._may_go_on(process):
            return
        yield self._fault(f"{name} is killed after {at}", lambda: self._die_after(process))
        yield self._fault(f"{name} {Order.CUT}: {at}", lambda: self._cut(process))
        yield self._fault(f"{name} {Order.LOSE}: {at}", lambda: work.obey(Order.LOSE), 2)
        if at.method in STATEMENTS:
            yield self._fault(f"{name} {Order.LATER}: {at}", lambda: work.obey(Order.LATER), 2)

    def _fault(self, name: str, do: Callable[[], object], weight: int = 1) -> Move:
        def fail() -> None:
            self.tally.faults += 1
            do()

        return Move(f"! {name}", fail, weight)

    # --- making it happen

    def _new_process(self, name: str) -> Process:
        self._pids += 1
        return Process(self, name, self._pids)

    def _deliver(self, process: Process, ref: StepRef) -> None:
        self.broker.messages.remove(ref)
        self.broker.unacknowledged.append(ref)
        process.receive(ref)
        assert process.work is not None
        _processes[process.work] = process

    def _acknowledge(self) -> None:
        """Who is done with a message says so."""
        for process in self.processes:
            if process.work is not None and process.work.is_over and process.ref is not None:
                self._raise_error_of(process.work)
                self.broker.unacknowledged.remove(process.ref)
                self._forget_work(process)
        if self.keeper is not None and self.keeper.is_over:
            self._raise_error_of(self.keeper)

    def _raise_error_of(self, actor: Actor) -> None:
        if actor.error is not None:
            raise Broken(self._told(f"{actor.name} raised {actor.error!r}")) from actor.error

    def _forget_work(self, process: Process) -> None:
        if process.work is not None:
            _processes.pop(process.work, None)
        process.ref = process.work = None

    def _die(self, process: Process, *, noted: bool = False, redelivered: bool = False) -> None:
        """`noted`: its parent saw it. `redelivered`: the broker delivers its message again."""
        ref = process.ref
        self.tally.deaths += process.has_started
        self.tally.trouble = self.tally.trouble or process.has_fenced
        process.end()
        if ref is not None:
            self.broker.unacknowledged.remove(ref)
            if redelivered:
                self.broker.messages.append(ref)
            if noted:
                self.notes.append(DeathNote(ref=ref, process=process.prefix))
        self._forget_work(process)
        self.processes[self.processes.index(process)] = self._new_process(process.name)

    def _die_after(self, process: Process) -> None:
        assert process.work is not None
        process.work.obey(Order.DIE_AFTER)
        self._die(process, redelivered=True)

    def _cut(self, process: Process) -> None:
        assert process.work is not None and process.work.at is not None
        # What isn't given back looks like the lease of a process that died.
        self.tally.stalls += process.work.at.method == "release"
        process.work.obey(Order.CUT)

    def _raise(self, process: Process) -> None:
        assert process.work is not None
        self.tally.trouble = self.tally.trouble or process.has_fenced
        process.work.obey(Order.RAISE)

    def _stall(self, process: Process) -> None:
        self.tally.stalls += 1
        self.pass_time(LEASE_SECONDS + 1, stalled=process)

    def pass_time(self, seconds: float, *, stalled: Process | None = None, noted: bool = False) -> None:
        """Hearts beat meanwhile, but that of a `stalled` process. `noted`: parents see those that are ended."""
        end = self.time.now + seconds
        silent: set[str] = set()  # Who is about to give a lease back that is renewed no more.
        self._is_stale = True
        for process in self.processes:
            while process is not stalled and process.beat is not None and not process.beat.is_over:
                process.beat.obey(Order.GO)
        while self.time.now < end:
            is_idle = not any(process.is_working for process in self.processes)
            self.time.now = end if is_idle else min(end, self.time.now + LEASE_SECONDS / 3)
            for process in list(self.processes):
                if self.parts.ends_calls and process.ends_at is not None and self.time.now >= process.ends_at:
                    self._die(process, noted=noted, redelivered=True)
                elif process is not stalled and process.is_working and not process.heartbeat.beat():
                    silent.add(process.name)
            for request in self.receiver.flying:
                if self.time.now >= request.ends_at:
                    self._lose(request)
        self.tally.stalls += sum(process.name in silent and process.has_started for process in self.processes)

    @property
    def _keeps(self) -> bool:
        return self.keeper is not None and not self.keeper.is_over

    def _begin_to_keep(self) -> None:
        self.keeper = Actor("the keeper", self._keep)
        self._skip_uninteresting()

    def _keep_on(self, order: Order) -> None:
        assert self.keeper is not None
        self.keeper.obey(order)
        self._skip_uninteresting()

    def _skip_uninteresting(self) -> None:
        while self._keeps and self.keeper is not None and self.keeper.at is not None:
            if self.keeper.at.method not in UNINTERESTING:
                return
            self.keeper.obey(Order.GO)

    def _keep(self) -> None:
        notes, self.notes = self.notes, []
        reaper = self._reaper
        try:
            reaper.bury(notes)
            dispatch(reaper.keeping, self.parts.runs, reaper.dispatcher, backlog_max=100)
            reaper.reap()
        except AgentqError:
            return  # The next pass starts from what is stored.

    def _look(self, number: int, has_happened: bool, *, is_wrong: bool = False) -> None:
        self.seen = Look(number=number, at=self.time.moment, has_happened=has_happened, is_wrong=is_wrong)
        self.tally.faults += is_wrong

    def _answer(self) -> None:
        seen, self.seen = self.seen, None
        assert seen is not None
        self._is_stale = True
        if seen.has_happened:
            ruling = Ruling(decision=Decision.HAPPENED, result={"receipt": seen.number})
        else:
            ruling = Ruling(decision=Decision.DID_NOT_HAPPEN, looked_at=seen.at)
        if self.run["pending_effect_number"] not in (None, seen.number):
            return  # Another write than the one that was looked at.
        try:
            self.parts.decisions.resolve(RUN, ruling, actor="ann", reason="looked")
        except RefusedError as refusal:
            self.trace.append(f"  refused: {refusal}")
        else:
            self.tally.lies += seen.is_wrong

    def _replay(self) -> None:
        self._is_stale = True
        self.tally.replays += 1
        wakeups = self.parts.decisions.replay(RUN, actor="ann", reason="go on")
        self.broker.publish(list(wakeups))

    def _cancel(self) -> None:
        self._is_stale = True
        self.parts.runs.cancel(RUN, actor="bob", reason="wrong customer")

    def _land(self, request: Request) -> None:
        self._is_stale = True
        self.receiver.land(request)

    def _lose(self, request: Request) -> None:
        request.place = Place.LOST

    def _run_late(self, waiting: Waiting) -> None:
        self.waiting.remove(waiting)
        self._is_stale = True
        waiting.call()

    # --- what must hold

    def look_again(self) -> None:
        self.picture = take_picture(self.parts.database)
        self._is_stale = False

    def check(self) -> None:
        """Raises Broken when something doesn't hold."""
        if not self._is_stale:
            return
        self.look_again()
        broken = next(self._broken(), None)
        if broken is not None:
            raise Broken(self._told(broken))

    def _broken(self) -> Iterator[str]:
        tally = self.tally
        lives = 1 + tally.replays  # Each replay starts the budgets anew.
        attempts_max = lives * CRASHES_MAX + tally.faults
        yield from broken_invariants(self.picture, attempts_max=attempts_max, world=self._world())
        first_cancel = next((e["sequence"] for e in self._events("cancel.requested", "run.cancelled")), None)
        for event in self._events("fence.stamped"):
            if first_cancel is not None and event["sequence"] > first_cancel:
                yield "a fence was stamped after the cancel"
        for step in self.picture.steps[RUN]:
            if step["crashes"] > tally.deaths + tally.stalls:
                yield f"step {step['number']} is charged {step['crashes']} crashes, {tally.deaths} processes died"
        yield from self._false_dead_letters()

    def _false_dead_letters(self) -> Iterator[str]:
        tally, fence_owner = self.tally, self.run["pending_effect_owner"]
        is_spent = tally.deaths + tally.stalls >= CRASHES_MAX
        for letter in self.picture.dead_letters[RUN]:
            if letter["closed_at"] is not None or is_spent:
                continue
            if fence_owner is None and not self._was_resolved(letter["number"]):
                yield f"a false dead letter: the crash budget is not spent ({letter['error']})"
            is_held = any(p.is_working and (fence_owner or "-").startswith(p.prefix) for p in self.processes)
            if fence_owner is not None and not tally.trouble and not is_held:
                yield "a false dead letter: no process died and no call raised"

    def _was_resolved(self, number: int) -> bool:
        return any(event["number"] == number for event in self._events("write.resolved"))

    def _events(self, *kinds: str) -> Iterator[RowMapping]:
        return (event for event in self.picture.events[RUN] if event["kind"] in kinds)

    def _world(self) -> World:
        in_hand = {p.request.step for p in self.processes if p.is_working and p.request is not None}
        return World(effects=Counter(self.receiver.effects), in_hand=in_hand, lies=self.tally.lies)

    def _told(self, broken: str) -> str:
        return "\n  ".join([f"{', '.join(self.script)}: {broken}", *self.trace])

    # --- to the end

    def drain(self) -> None:
        """Nothing fails any more: the run must come to its end. Raises Broken."""
        for n in range(DRAIN_ROUNDS_MAX):
            self.trace.append("-- nothing fails any more" if n == 0 else "--")
            self._let_everybody_finish()
            self.check()
            if self.is_at_rest:
                return
            self._decide()
            self.check()
            self.pass_time(LEASE_SECONDS * 2 ** min(n, 6) + 1)
            self.check()
        raise Broken(self._told(f"the run is lost: it is {self.run['status']} and nothing gets it on"))

    def _let_everybody_finish(self) -> None:
        for waiting in list(self.waiting):
            self._run_late(waiting)
        self._finish_work()
        for _ in range(2):  # The second pass sees what the first one was too early for.
            while self._keeps:
                self._keep_on(Order.GO)
            self._acknowledge()
            self._begin_to_keep()
        while self._keeps:
            self._keep_on(Order.GO)
        for _ in range(100):
            if not self.broker.messages:
                break
            idle = next((process for process in self.processes if not process.is_working), None)
            if idle is None:
                break
            self._deliver(idle, self.broker.messages[0])
            self._finish_work()

    def _finish_work(self) -> None:
        for process in list(self.processes):
            while process.beat is not None and not process.beat.is_over:
                process.beat.obey(Order.GO)
            while process.is_working:
                work = process.work
                assert work is not None
                if process.request is not None and process.request.place is Place.FLYING:
                    self._land(process.request)
                if work.at == Stop(WORLD, "die"):
                    self._die(process, redelivered=True)
                    break
                if not self._may_go_on(process):
                    break  # It waits for an answer that doesn't come, until its deadline.
                work.obey(Order.GO)
        self._acknowledge()

    def _decide(self) -> None:
        if self.is_active:
            return
        number = self.run["pending_effect_number"]
        if number is not None:
            self._look(number, self.receiver.effects[RUN, number] > 0)
            self._answer()
        elif self._may_replay:
            self._replay()

    def end(self) -> None:
        """End all threads, whatever they wait for."""
        for process in self.processes:
            process.end()
            self._forget_work(process)
        if self.keeper is not None:
            self.keeper.kill()


def _text(ref: StepRef) -> str:
    return f"s{ref.number}a{ref.attempt}"


def _settled_at(run: RowMapping) -> datetime:
    deadline_at: datetime = run["pending_effect_deadline_at"]
    return deadline_at + timedelta(seconds=run["pending_effect_settles_within_seconds"] or 0)
