"""What may happen next in a simulation, and two ways through it: told as a story, or chosen at random."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from agentq.domain.effects import ToolEffect
from agentq.domain.model import StepRef
from tests.support.gates import Order, Stop
from tests.support.simulated_process import LEASE_SECONDS, RUN, WORLD, Process
from tests.support.simulation import REPLAYS_MAX, STATEMENTS, Simulation, settled_at

LIKINGS = (1, 0, 4, 1)
WORK = {"gets", "goes on", "dies of the step", "the judge has the probe asked"}
# Answers that may get old before their receiver acts on them.
HOLDABLE = {"load", "fence", "renew", "survey", "in_flight"}

# Beginnings of stories, as `play` knows them.
KEEP = ("the keeper begins", "the keeper ends")
SENT = ("w0 gets s2a1", "w0 until World.send", "w0 goes on: World.send")
LANDED = (*SENT, "the request of step 2 lands")
SHOWN = (*SENT, "the fence's deadline passes, noted", *KEEP)  # As a dead letter; the request is still under way.
ASKED_IN_VAIN = (*SENT, "the fence's deadline passes, noted", *KEEP, "w1 gets s2a1", "w1 until World.ask", "w1 asks")
STALLED = ("the fence's deadline passes", "! w0 stalls past its lease")


@dataclass(frozen=True, slots=True)
class Move:
    """Something that may happen now. `weight`: how likely, beside the others."""

    name: str
    do: Callable[[], object]
    weight: int = 4

    def __repr__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        """Its name without the worker's, the step's and the call's."""
        words = self.name.partition(":")[0].split()
        return " ".join(word for word in words if not any(letter.isdigit() for letter in word))


def moves(simulation: Simulation) -> list[Move]:
    """Whatever may happen now; what gets on first."""
    may_fail = simulation.tally.faults < simulation.faults_max
    found = [move for process in simulation.processes for move in _worker_moves(simulation, process)]
    found += _keeper_moves(simulation)
    found += _judge_moves(simulation, may_lie=may_fail)
    found += _world_moves(simulation)
    found += _time_moves(simulation)
    if may_fail:
        found += _faults(simulation)
    return found


def play(simulation: Simulation, *names: str, skips_impossible: bool = False) -> None:
    """Make these moves, each the first whose name begins so, and check after each. Raises Broken.

    `w0 until World.send` goes on to that call, `w0 ends` and `the keeper ends` to the end.
    """
    for name in names:
        who, until, where = name.partition(" until ")
        if until or who.endswith(" ends"):
            _go_on(simulation, who.removesuffix(" ends"), where)
            continue
        move = next((move for move in moves(simulation) if move.name.startswith(name)), None)
        if move is not None:
            simulation.make(move.name, move.do)
        elif not skips_impossible:
            raise AssertionError(f"{name!r} can't happen now, only {moves(simulation)}")


def _go_on(simulation: Simulation, who: str, where: str) -> None:
    going = f"{who} goes on: "
    while move := next((move for move in moves(simulation) if move.name.startswith(going)), None):
        if move.name == going + where:
            return
        simulation.make(move.name, move.do)


def walk(simulation: Simulation, pick: Callable[[int], int], moves_max: int) -> None:
    """Make moves until the run is at rest, then bring it to its end. Raises Broken.

    `pick(n)` chooses a number below n. Each walk likes some kinds of moves and leaves out others: walks that do a
    little of everything get nowhere.
    """
    likings: dict[str, int] = {}
    for _ in range(moves_max):
        if simulation.is_at_rest:
            break
        possible = moves(simulation)
        weights = []
        for move in possible:
            if move.kind not in likings:
                likings[move.kind] = 1 if move.kind in WORK else LIKINGS[pick(len(LIKINGS))]
            weights.append(move.weight * likings[move.kind])
        move = _weighted(possible, weights, pick)
        simulation.make(move.name, move.do)
    simulation.drain()


def _worker_moves(simulation: Simulation, process: Process) -> Iterator[Move]:
    name, work = process.name, process.work
    if not process.is_working:
        yield from _heart_moves(simulation, process)
        for ref in dict.fromkeys(simulation.broker.messages):
            yield Move(f"{name} gets {_text(ref)}", partial(simulation.deliver, process, ref), 12)
        return
    assert work is not None and work.at is not None
    if work.at == Stop(WORLD, "die"):
        yield Move(f"{name} dies of the step", partial(simulation.die, process, redelivered=True), 12)
        yield Move(f"{name} dies of the step, noted", partial(simulation.die, process, noted=True), 4)
    elif simulation.may_go_on(process):
        yield Move(f"{name} goes on: {work.at}", partial(work.obey, Order.GO), 16)
        if work.at == Stop(WORLD, "ask"):
            yield Move(f"{name} asks in vain", partial(simulation.ask_in_vain, process), 8)
        if work.at.method in HOLDABLE and not work.at.is_answer:
            yield Move(f"{name} goes on, held: {work.at}", partial(work.obey, Order.HOLD), 3)
    yield from _heart_moves(simulation, process)


def _heart_moves(simulation: Simulation, process: Process) -> Iterator[Move]:
    beat = process.beat
    if beat is not None and not beat.is_over:
        yield Move(f"{process.name}'s heart: {beat.at}", partial(beat.obey, Order.GO), 4)
    elif process.is_working:
        yield Move(f"{process.name}'s heart begins to beat", process.begin_beat, 2)


def _keeper_moves(simulation: Simulation) -> Iterator[Move]:
    if not simulation.keeps:
        yield Move("the keeper begins", simulation.begin_to_keep, 4)
        return
    keeper = simulation.keeper
    assert keeper is not None
    yield Move(f"the keeper goes on: {keeper.at}", partial(simulation.keep_on, Order.GO), 8)


def _judge_moves(simulation: Simulation, *, may_lie: bool) -> Iterator[Move]:
    run = simulation.run
    fence, number = run["pending_effect_id"], run["pending_effect_number"]
    if simulation.seen is not None:
        yield Move("the judge answers", simulation.answer, 6)
    elif fence is not None and (
        run["pending_effect_effect"] == ToolEffect.NON_IDEMPOTENT_WRITE or not simulation.is_active
    ):
        has_happened = simulation.receiver.effects[RUN, number] > 0
        yield Move("the judge looks", partial(simulation.look, number, has_happened), 3 if simulation.is_active else 8)
        if has_happened and may_lie and simulation.time.moment > settled_at(run):
            yield Move("the judge looks, and errs", partial(simulation.look, number, False, is_wrong=True), 2)
    if simulation.may_have_probe_asked:
        yield Move("the judge has the probe asked", simulation.have_probe_asked, 8)
    if simulation.may_replay and simulation.tally.replays < REPLAYS_MAX:
        yield Move("the judge replays", simulation.replay, 8)


def _world_moves(simulation: Simulation) -> Iterator[Move]:
    for request in simulation.receiver.flying:
        yield Move(f"the request of step {request.number} lands", partial(simulation.land, request), 8)
        yield Move(f"the request of step {request.number} is lost", partial(simulation.lose, request), 2)
    for waiting in simulation.waiting:
        yield Move(f"{waiting.actor.name}'s {waiting.stop} lands", partial(simulation.run_late, waiting), 4)
        yield Move(f"{waiting.actor.name}'s {waiting.stop} is dropped", partial(simulation.waiting.remove, waiting), 4)
    if simulation.cancels and simulation.is_active and not simulation.run["cancel_requested"]:
        yield Move("cancel", simulation.cancel, 1)


def _time_moves(simulation: Simulation) -> Iterator[Move]:
    yield Move("3 seconds pass", partial(simulation.pass_time, 3), 2)
    yield Move("a lease's time passes", partial(simulation.pass_time, LEASE_SECONDS + 1), 3)
    run, now = simulation.run, simulation.time.moment
    if run["pending_effect_id"] is None:
        return
    for what, moment in (("deadline", run["pending_effect_deadline_at"]), ("time to settle", settled_at(run))):
        seconds = (moment - now).total_seconds() + 0.01
        if seconds > 0:
            yield Move(f"the fence's {what} passes", partial(simulation.pass_time, seconds), 3)
            yield Move(f"the fence's {what} passes, noted", partial(simulation.pass_time, seconds, noted=True), 1)


def _faults(simulation: Simulation) -> Iterator[Move]:
    for process in simulation.processes:
        if process.is_working:
            yield from _worker_faults(simulation, process)
        if process.beat is not None and not process.beat.is_over:
            beat = process.beat
            for order in (Order.CUT, Order.LOSE):
                yield _fault(simulation, f"{process.name}'s heart {order}: {beat.at}", partial(beat.obey, order))
    if simulation.keeps:
        assert simulation.keeper is not None and simulation.keeper.at is not None
        at = simulation.keeper.at
        yield _fault(simulation, f"the keeper {Order.DIE}: {at}", partial(simulation.keep_on, Order.DIE))
        if at.port != "Clock":
            yield _fault(simulation, f"the keeper {Order.CUT}: {at}", partial(simulation.keep_on, Order.CUT))
            yield _fault(simulation, f"the keeper {Order.LOSE}: {at}", partial(simulation.keep_on, Order.LOSE))
    yield _fault(simulation, "redis is flushed", simulation.parts.flush, 2)
    for ref in dict.fromkeys(simulation.broker.messages):
        yield _fault(simulation, f"the message {_text(ref)} is lost", partial(simulation.broker.messages.remove, ref))
        yield _fault(
            simulation, f"the message {_text(ref)} is doubled", partial(simulation.broker.messages.append, ref)
        )


def _worker_faults(simulation: Simulation, process: Process) -> Iterator[Move]:
    name, work = process.name, process.work
    assert work is not None and work.at is not None
    at = work.at
    yield _fault(simulation, f"{name} is killed: {at}", partial(simulation.die, process, redelivered=True), 2)
    yield _fault(simulation, f"{name} is killed, noted: {at}", partial(simulation.die, process, noted=True))
    yield _fault(simulation, f"{name} stalls past its lease", partial(simulation.stall, process), 2)
    if at.is_answer or at.port in ("Clock", "Models") or at == Stop(WORLD, "die"):
        return
    if at.port == WORLD:
        yield _fault(simulation, f"{name}'s call raises: {at}", partial(simulation.let_raise, process), 2)
        return
    if not simulation.may_go_on(process):
        return
    yield _fault(simulation, f"{name} is killed after {at}", partial(simulation.die_after, process))
    yield _fault(simulation, f"{name} {Order.CUT}: {at}", partial(simulation.cut, process))
    yield _fault(simulation, f"{name} {Order.LOSE}: {at}", partial(work.obey, Order.LOSE), 2)
    if at.method in STATEMENTS:
        yield _fault(simulation, f"{name} {Order.LATER}: {at}", partial(work.obey, Order.LATER), 2)


def _fault(simulation: Simulation, name: str, do: Callable[[], object], weight: int = 1) -> Move:
    def fail() -> None:
        simulation.tally.faults += 1
        do()

    return Move(f"! {name}", fail, weight)


def _text(ref: StepRef) -> str:
    return f"s{ref.number}a{ref.attempt}"


def _weighted(moves: list[Move], weights: list[int], pick: Callable[[int], int]) -> Move:
    left = pick(max(1, sum(weights)))
    for move, weight in zip(moves, weights, strict=True):
        left -= weight
        if left < 0:
            return move
    return moves[0]
