"""One run in a world that a test moves: the real spine, stores, leases and keeper, stopped at every call they make."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import RowMapping, delete, insert, select

from agentq.adapters.sql.schema import dead_letters, events, purging, runs, seals, steps
from agentq.domain.decisions import Ruling
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import (
    AgentqError,
    BrokerUnavailableError,
    LeasesUnavailableError,
    RefusedError,
    StoreUnavailableError,
)
from agentq.domain.loop import assistant_message, steps_for
from agentq.domain.model import Decision, ModelReply, RunStatus, StepRef, ToolCall
from agentq.domain.outcomes import Recorded, Turn
from agentq.ports.dispatch import Dispatcher
from agentq.ports.keeping import KeeperStore
from agentq.ports.leases import DeathNote, Leases
from agentq.ports.runs import NewRun
from agentq.ports.steps import Settlement, StepStore
from agentq.services.dispatch import dispatch
from agentq.services.reap import Reaper
from tests.support.gates import Actor, Order, Stop, gated
from tests.support.invariants import Picture, World, broken_audit, broken_invariants, take_picture
from tests.support.simulated_process import (
    AGENT,
    CRASHES_MAX,
    LEASE_SECONDS,
    LIMITS,
    RUN,
    SETTLES_SECONDS,
    WORLD,
    Parts,
    Process,
)
from tests.support.simulated_world import EPOCH, Broker, Place, Receiver, Request, Time

REPLAYS_MAX = 2
ASKS_MAX = 2
DRAIN_ROUNDS_MAX = 40
# Calls between which nothing that others do makes a difference: a keeper makes them in one go.
UNINTERESTING = {"take_due", "backlog", "is_drained", "in_flight", "runs_without_open_step", "interactive_runs"}
# Changes whose statement may still wait in the database when its sender has lost the connection.
STATEMENTS = {"fence", "take_back", "settle", "hand_back"}


class Broken(AssertionError):
    """What must hold doesn't; the message tells what happened before."""


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
    deaths: Counter[int] = field(default_factory=Counter)  # Of processes that had started an attempt, by step.
    stalls: int = 0  # ... or were silent past their lease, which looks the same.
    trouble: bool = False  # A process died, or a call raised, over a fence.
    replays: int = 0
    asks: int = 0  # A person had the probe asked so often.
    lies: int = 0


@dataclass(slots=True)
class Simulation:
    """A run whose first turn asked for the tools of `script`. `make` makes a move and checks that the promises hold."""

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
            connection.execute(insert(purging).from_select(["run_id"], select(runs.c.id)))
            for table in (dead_letters, seals, events, steps, runs, purging):
                connection.execute(delete(table))
        parts.leases.survey([])
        parts.time.now += LEASE_SECONDS + 1  # Redis has been up for a while.
        parts.runs.add([NewRun(id=RUN, agent=AGENT.name, input="order 17")])
        calls = tuple(ToolCall(id=f"call-{n}", name=name, arguments={}) for n, name in enumerate(self.script))
        turn = Recorded(
            result=assistant_message(ModelReply(tool_calls=calls)), then=Turn(calls=steps_for(AGENT, calls))
        )
        ref = StepRef(run_id=RUN, number=1, attempt=1)
        settled = parts.steps.settle(
            Settlement(ref=ref, owner="host/boot/0-0/0", effect=ToolEffect.READ_ONLY, change=turn)
        )
        self.broker.publish(list(settled.wakeups))
        self.processes = [self._new_process("w0"), self._new_process("w1")]
        self._reaper = Reaper(
            keeping=gated(KeeperStore, parts.keeping, StoreUnavailableError, self),
            steps=gated(StepStore, parts.reaper_steps or parts.steps, StoreUnavailableError, self),
            leases=gated(Leases, parts.leases, LeasesUnavailableError, self),
            dispatcher=gated(Dispatcher, self.broker, BrokerUnavailableError, self),
            policy=parts.policy,
            probes_max=LIMITS.probes_max,
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
        is_busy = any(process.is_working for process in self.processes) or self.keeps or bool(self.waiting)
        in_doubt = self.run["pending_effect_id"] is not None
        return not (self.is_active or is_busy or in_doubt or self.broker.messages or self.may_replay)

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

    def may_go_on(self, process: Process) -> bool:
        work = process.work
        assert work is not None and work.at is not None
        if work.at == Stop(WORLD, "reply"):
            return process.request is not None and process.request.place is Place.LANDED
        waits = any(each.actor is work for each in self.waiting) and self.parts.waits_for_lost_statements
        return not (work.at.method in STATEMENTS and waits)

    @property
    def may_replay(self) -> bool:
        run = self.run
        can_go_on = run["status"] == RunStatus.FAILED and run["pending_effect_id"] is None
        return can_go_on and not run["cancel_requested"] and self.tally.replays < REPLAYS_MAX

    @property
    def may_have_probe_asked(self) -> bool:
        run = self.run
        in_doubt = run["status"] == RunStatus.FAILED and run["pending_effect_id"] is not None
        return in_doubt and bool(run["pending_effect_has_probe"]) and self.tally.asks < ASKS_MAX

    # --- making it happen

    def make(self, name: str, do: Callable[[], object]) -> None:
        """Make the move, and check what must hold. Raises Broken."""
        self.trace.append(name)
        do()
        self._acknowledge()
        self.check()

    def _new_process(self, name: str) -> Process:
        self._pids += 1
        return Process(self, name, self._pids)

    def deliver(self, process: Process, ref: StepRef) -> None:
        self.broker.messages.remove(ref)
        self.broker.unacknowledged.append(ref)
        process.receive(ref)

    def _acknowledge(self) -> None:
        """Who is done with a message says so."""
        for process in self.processes:
            if process.work is not None and process.work.is_over and process.ref is not None:
                self._raise_error_of(process.work)
                self.broker.unacknowledged.remove(process.ref)
                process.forget_work()
        if self.keeper is not None and self.keeper.is_over:
            self._raise_error_of(self.keeper)

    def _raise_error_of(self, actor: Actor) -> None:
        if actor.error is not None:
            raise Broken(self._told(f"{actor.name} raised {actor.error!r}")) from actor.error

    def die(self, process: Process, *, noted: bool = False, redelivered: bool = False) -> None:
        """`noted`: its parent saw it. `redelivered`: the broker delivers its message again."""
        ref = process.ref
        if ref is not None:
            self.tally.deaths[ref.number] += process.has_started
        self.tally.trouble = self.tally.trouble or process.has_fenced
        process.end()
        if ref is not None:
            self.broker.unacknowledged.remove(ref)
            if redelivered:
                self.broker.messages.append(ref)
            if noted:
                self.notes.append(DeathNote(ref=ref, process=process.prefix))
        process.forget_work()
        self.processes[self.processes.index(process)] = self._new_process(process.name)

    def die_after(self, process: Process) -> None:
        assert process.work is not None
        process.work.obey(Order.DIE_AFTER)
        self.die(process, redelivered=True)

    def cut(self, process: Process) -> None:
        assert process.work is not None and process.work.at is not None
        # What isn't given back looks like the lease of a process that died.
        self.tally.stalls += process.work.at.method == "release"
        process.work.obey(Order.CUT)

    def let_raise(self, process: Process) -> None:
        assert process.work is not None
        self.tally.trouble = self.tally.trouble or process.has_fenced
        process.work.obey(Order.RAISE)

    def stall(self, process: Process) -> None:
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
                    self.die(process, noted=noted, redelivered=True)
                elif process is not stalled and process.is_working and not process.heartbeat.beat():
                    silent.add(process.name)
            for request in self.receiver.flying:
                if self.time.now >= request.ends_at:
                    self.lose(request)
        self.tally.stalls += sum(process.name in silent and process.has_started for process in self.processes)

    @property
    def keeps(self) -> bool:
        return self.keeper is not None and not self.keeper.is_over

    def begin_to_keep(self) -> None:
        self.keeper = Actor("the keeper", self._keep)
        self._skip_uninteresting()

    def keep_on(self, order: Order) -> None:
        assert self.keeper is not None
        self.keeper.obey(order)
        self._skip_uninteresting()

    def _skip_uninteresting(self) -> None:
        while self.keeps and self.keeper is not None and self.keeper.at is not None:
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

    def look(self, number: int, has_happened: bool, *, is_wrong: bool = False) -> None:
        self.seen = Look(number=number, at=self.time.moment, has_happened=has_happened, is_wrong=is_wrong)
        self.tally.faults += is_wrong

    def answer(self) -> None:
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

    def replay(self) -> None:
        self._is_stale = True
        self.tally.replays += 1
        wakeups = self.parts.decisions.replay(RUN, actor="ann", reason="go on")
        self.broker.publish(list(wakeups))

    def have_probe_asked(self) -> None:
        self._is_stale = True
        self.tally.asks += 1
        self.parts.decisions.resolve_by_probe(RUN, actor="ann", reason="it is back")

    def ask_in_vain(self, process: Process) -> None:
        assert process.work is not None
        process.is_asked_in_vain = True
        process.work.obey(Order.GO)

    def cancel(self) -> None:
        self._is_stale = True
        self.parts.runs.cancel(RUN, actor="bob", reason="wrong customer")

    def land(self, request: Request) -> None:
        self._is_stale = True
        self.receiver.land(request)

    def lose(self, request: Request) -> None:
        request.place = Place.LOST

    def run_late(self, waiting: Waiting) -> None:
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
        if self.picture.runs[0]["finished_at"] is not None:
            yield from broken_audit(self.parts.database)
        first_cancel = next((e["sequence"] for e in self._events("cancel.requested", "run.cancelled")), None)
        for event in self._events("fence.stamped"):
            if first_cancel is not None and event["sequence"] > first_cancel:
                yield "a fence was stamped after the cancel"
        for step in self.picture.steps[RUN]:
            deaths = tally.deaths[step["number"]]
            if step["crashes"] > deaths + tally.stalls:
                yield f"step {step['number']} is charged {step['crashes']} crashes, {deaths} processes died"
            # A probe that outlives its deadline ends its process too, as often as its budget says.
            questions_max = (attempts_max + tally.asks) * LIMITS.probes_max if step["tool"] == "wire" else 0
            if deaths > attempts_max + questions_max:
                yield f"step {step['number']} was started again and again: {deaths} processes died of it"
        yield from self._false_dead_letters()

    def _false_dead_letters(self) -> Iterator[str]:
        tally, fence_owner = self.tally, self.run["pending_effect_owner"]
        for letter in self.picture.dead_letters[RUN]:
            is_spent = tally.deaths[letter["number"]] + tally.stalls >= CRASHES_MAX
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
        if self.tally.lies and self.tally.trouble:
            in_hand = set(self.receiver.effects)  # Who knew better is dead: nobody can contradict the lie any more.
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
            self.run_late(waiting)
        self._finish_work()
        for _ in range(2):  # The second pass sees what the first one was too early for.
            while self.keeps:
                self.keep_on(Order.GO)
            self._acknowledge()
            self.begin_to_keep()
        while self.keeps:
            self.keep_on(Order.GO)
        for _ in range(100):
            if not self.broker.messages:
                break
            idle = next((process for process in self.processes if not process.is_working), None)
            if idle is None:
                break
            self.deliver(idle, self.broker.messages[0])
            self._finish_work()

    def _finish_work(self) -> None:
        for process in list(self.processes):
            while process.beat is not None and not process.beat.is_over:
                process.beat.obey(Order.GO)
            while process.is_working:
                work = process.work
                assert work is not None
                if process.request is not None and process.request.place is Place.FLYING:
                    self.land(process.request)
                if work.at == Stop(WORLD, "die"):
                    self.die(process, redelivered=True)
                    break
                if not self.may_go_on(process):
                    break  # It waits for an answer that doesn't come, until its deadline.
                work.obey(Order.GO)
        self._acknowledge()

    def _decide(self) -> None:
        if self.is_active:
            return
        number = self.run["pending_effect_number"]
        if self.may_have_probe_asked:
            self.have_probe_asked()
        elif number is not None:
            self.look(number, self.receiver.effects[RUN, number] > 0)
            self.answer()
        elif self.may_replay:
            self.replay()

    def end(self) -> None:
        """End all threads, whatever they wait for."""
        for process in self.processes:
            process.end()
            process.forget_work()
        if self.keeper is not None:
            self.keeper.kill()


def settled_at(run: RowMapping) -> datetime:
    """When a request under the standing fence has landed or never will."""
    deadline_at: datetime = run["pending_effect_deadline_at"]
    return deadline_at + timedelta(seconds=run["pending_effect_settles_within_seconds"] or 0)
