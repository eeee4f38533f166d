"""Each pair of guarded transactions on PostgreSQL, one held before its COMMIT while the other begins, in both orders.

Under READ COMMITTED a statement keeps the snapshot it began with even after it waited for a lock. So each pair must
come to what it comes to one after the other: a twin run shows that, and is compared.
"""

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any, TypeAlias

import psycopg
import pytest

from agentq.adapters.sql.deciding import SqlDecisionStore
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.keeping import SqlKeeperStore
from agentq.adapters.sql.runs import SqlRunStore
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.decisions import Asking, Replaying, Ruling
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import AgentqError
from agentq.domain.failures import FailureClass
from agentq.domain.model import Charge, DeadLetterReason, Decision, StepRef
from agentq.domain.outcomes import Join, Recorded, Retried, Stopped
from agentq.domain.probes import ProbeVerdict
from agentq.domain.replay import Copying
from agentq.ports.steps import FenceRequest, NextProbe, ProbeWord, Settlement
from tests.support.databases import fresh_postgresql
from tests.support.held_database import WAIT_SECONDS, HeldDatabase
from tests.support.invariants import check_invariants
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage
from tests.support.waiting import eventually


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores over one database, as one process has them."""

    steps: SqlStepStore
    runs: SqlRunStore
    keeping: SqlKeeperStore
    decisions: SqlDecisionStore


Move: TypeAlias = Callable[[Stores, str], object]
"""One guarded transaction on the first call (or the named one) of that run."""


def stores_over(database: Database, *, always_general: bool) -> Stores:
    return Stores(
        steps=SqlStepStore(database, always_general=always_general),
        runs=SqlRunStore(database),
        keeping=SqlKeeperStore(database),
        decisions=SqlDecisionStore(database),
    )


def first_call(run_id: str, *, number: int = FIRST_CALL) -> StepRef:
    return StepRef(run_id=run_id, number=number, attempt=1)


def settling(
    name: str,
    change: Recorded | Retried | Stopped,
    *,
    effect: ToolEffect = READ,
    is_fenced: bool = False,
    number: int = FIRST_CALL,
) -> Move:
    def move(stores: Stores, run_id: str) -> object:
        return stores.steps.settle(
            Settlement(
                ref=first_call(run_id, number=number),
                owner=name,
                effect=effect,
                change=change,
                fence_id=run_id if is_fenced else None,
            )
        )

    return move


def fencing(name: str, effect: ToolEffect) -> Move:
    def move(stores: Stores, run_id: str) -> object:
        request = FenceRequest(
            ref=first_call(run_id),
            id=f"{name} {run_id}",
            owner=name,
            tool="pay",
            effect=effect,
            deadline_seconds=30,
            settles_within_seconds=0,
        )
        return stores.steps.fence(request)

    return move


def taking_back(stores: Stores, run_id: str) -> object:
    return stores.steps.take_back(first_call(run_id), run_id, "taker")


def handing_back(stores: Stores, run_id: str) -> object:
    return stores.steps.hand_back(first_call(run_id), due_in_seconds=0, why="no such tool here")


def cancelling(stores: Stores, run_id: str) -> object:
    return stores.runs.cancel(run_id, actor="ann", reason="test")


def republishing(stores: Stores, run_id: str) -> object:
    return [ref.number for ref in stores.keeping.mark_republished([first_call(run_id)])]


def ruling(ruling: Ruling) -> Move:
    def move(stores: Stores, run_id: str) -> object:
        return stores.decisions.resolve(run_id, ruling, actor="ann", reason="asked the bank").state

    return move


def by_probe(name: str, change: Recorded | Retried, verdict: ProbeVerdict) -> Move:
    def move(stores: Stores, run_id: str) -> object:
        now = datetime.now(UTC)
        settlement = Settlement(
            ref=first_call(run_id),
            owner=name,
            effect=PLAIN,
            change=change,
            fence_id=run_id,
            probe=ProbeWord(verdict=verdict, looked_after=now, looked_before=now),
        )
        return stores.steps.settle(settlement)

    return move


def asking_again(stores: Stores, run_id: str) -> object:
    request = NextProbe(
        ref=first_call(run_id),
        fence_id=run_id,
        owner="prober",
        verdict=ProbeVerdict.NOT_YET,
        wait_seconds=60,
        waits_for_fence=False,
    )
    return stores.steps.ask_again(request)


def asking_probe(stores: Stores, run_id: str) -> object:
    wakeup = stores.keeping.ask_probe(first_call(run_id), run_id)
    return wakeup and wakeup.ref.number


def asked_about(stage: Stage) -> str:
    """Its time is over, so the probe is believed whatever it says."""
    run_id = stage.fenced(PLAIN, deadline_seconds=-60, others=(READ,))
    stage.change_run(run_id, pending_effect_has_probe=True)
    return run_id


def replaying(stores: Stores, run_id: str) -> object:
    return [wakeup.ref.number for wakeup in stores.decisions.replay(run_id, actor="ann", reason="test")]


def replaying_among_many(stores: Stores, run_id: str) -> object:
    (decided,) = stores.decisions.decide_many([run_id], Replaying(), actor="ann", reason="test")
    if decided.refusal is not None:
        raise decided.refusal
    return [wakeup.ref.number for wakeup in decided.wakeups]


def discarding(stores: Stores, run_id: str) -> object:
    return stores.decisions.discard(run_id, actor="ann", reason="test")


def having_probe_asked(stores: Stores, run_id: str) -> object:
    step = stores.decisions.resolve_by_probe(run_id, actor="ann", reason="test")
    return step.number, step.state


def having_probe_asked_among_many(stores: Stores, run_id: str) -> object:
    (decided,) = stores.decisions.decide_many([run_id], Asking(), actor="ann", reason="test")
    if decided.refusal is not None:
        raise decided.refusal
    return decided.wakeups


def copying(*repeat_writes: int) -> Move:
    asked = Copying(from_step=FIRST_CALL, repeat_writes=frozenset(repeat_writes))

    def move(stores: Stores, run_id: str) -> object:
        wakeups = stores.decisions.copy(run_id, uuid.uuid4().hex, asked, actor="ann", reason="test")
        return [wakeup.ref.number for wakeup in wakeups]

    return move


done = Recorded(result="done", then=Join())
crashed = Retried(charge=Charge.CRASH, error="the process died")
stopped = Stopped(reason=DeadLetterReason.NOT_RETRYABLE, failure_class=FailureClass.UNKNOWN, error="it raised")
unknown = replace(stopped, outcome_unknown=True)
happened = Ruling(decision=Decision.HAPPENED, result="done")
did_not_happen = Ruling(decision=Decision.DID_NOT_HAPPEN)

SCENES: dict[str, tuple[Callable[[Stage], str], dict[str, Move]]] = {
    "a write that is about to be fenced": (
        lambda stage: stage.asked(KEYED, READ),
        {
            "fence": fencing("fence", KEYED),
            "another's fence": fencing("other", KEYED),
            "settle": settling("settle", replace(done, is_error=True), effect=KEYED),
            "requeue": settling("requeue", crashed, effect=KEYED),
            "stop": settling("stop", stopped, effect=KEYED),
            "hand back": handing_back,
            "republish": republishing,
            "cancel": cancelling,
        },
    ),
    "a keyed write in flight": (
        lambda stage: stage.fenced(KEYED, others=(READ,)),
        {
            "fence": fencing("fence", KEYED),
            "settle": settling("settle", done, effect=KEYED, is_fenced=True),
            "requeue": settling("requeue", crashed, effect=KEYED, is_fenced=True),
            "stop": settling("stop", stopped, effect=KEYED, is_fenced=True),
            "take back": taking_back,
            "republish": republishing,
            "cancel": cancelling,
        },
    ),
    "a plain write in flight": (
        lambda stage: stage.fenced(PLAIN, others=(READ,)),
        {
            "fence": fencing("fence", PLAIN),
            "settle": settling("settle", done, effect=PLAIN, is_fenced=True),
            "requeue": settling("requeue", crashed, effect=PLAIN, is_fenced=True),
            "show as unknown": settling("show", unknown, effect=PLAIN, is_fenced=True),
            "take back": taking_back,
            "cancel": cancelling,
        },
    ),
    "an unknown write": (
        lambda stage: stage.unknown(PLAIN, others=(READ,)),
        {
            "settle late": settling("settle", done, effect=PLAIN, is_fenced=True),
            "take back": taking_back,
            "it happened": ruling(happened),
            "it did not happen": ruling(did_not_happen),
            "replay": replaying,
            "replay among many": replaying_among_many,
            "discard": discarding,
            "copy": copying(FIRST_CALL),
        },
    ),
    "an unknown write with a probe": (
        lambda stage: stage.unknown(PLAIN, has_probe=True, others=(READ,)),
        {
            "settle late": settling("settle", done, effect=PLAIN, is_fenced=True),
            "take back": taking_back,
            "it did not happen": ruling(did_not_happen),
            "by probe": having_probe_asked,
            "by probe among many": having_probe_asked_among_many,
            "ask the probe": asking_probe,
            "the probe says: happened": by_probe("happened", done, ProbeVerdict.HAPPENED),
            "show as unknown": settling("show", unknown, effect=PLAIN, is_fenced=True),
            "replay": replaying,
            "discard": discarding,
            "cancel": cancelling,
        },
    ),
    "a dead letter": (
        lambda stage: stage.failed(READ, READ, KEYED),
        {
            "settle": settling("settle", done),
            "replay": replaying,
            "replay among many": replaying_among_many,
            "discard": discarding,
            "copy": copying(),
            "cancel": cancelling,
        },
    ),
    "a plain write that is asked about": (
        asked_about,
        {
            "settle": settling("settle", done, effect=PLAIN, is_fenced=True),
            "the probe says: happened": by_probe("happened", done, ProbeVerdict.HAPPENED),
            "the probe says: did not happen": by_probe("nothing", crashed, ProbeVerdict.DID_NOT_HAPPEN),
            "the probe says: not yet": asking_again,
            "ask the probe": asking_probe,
            "show as unknown": settling("show", unknown, effect=PLAIN, is_fenced=True),
            "cancel": cancelling,
        },
    ),
    "two reads side by side": (
        lambda stage: stage.asked(READ, READ, KEYED),
        {
            "settle": settling("settle", done),
            "settle the other": settling("other", done, number=FIRST_CALL + 1),
            "requeue": settling("requeue", crashed),
            "stop": settling("stop", stopped),
            "cancel": cancelling,
        },
    ),
}
PAIRS = [
    pytest.param(scene, first, second, id=f"{scene}: {first}, {second}")
    for scene, (_, moves) in SCENES.items()
    for first, second in product(moves, moves)
]


@dataclass(frozen=True, slots=True)
class Theatre:
    """A database, and the stores of two processes over it."""

    url: str
    stage: Stage
    stores: Stores
    always_general: bool


@pytest.fixture(params=[True, False], ids=["general path", "functions"], scope="module")
def theatre(request: pytest.FixtureRequest) -> Iterator[Theatre]:
    with fresh_postgresql() as url:
        database, other = Database(url), Database(url, application_name="second")
        stores = stores_over(other, always_general=request.param)
        yield Theatre(url=url, stage=Stage(database=database), stores=stores, always_general=request.param)
        check_invariants(database)
        other.dispose()
        database.dispose()


@pytest.mark.parametrize(("scene", "first", "second"), PAIRS)
def test_two_at_once_come_to_what_one_after_the_other_does(
    theatre: Theatre, scene: str, first: str, second: str
) -> None:
    """The second waits for the first, and decides on what the first has committed."""
    prepare, moves = SCENES[scene]
    twin, run_id = prepare(theatre.stage), prepare(theatre.stage)
    serial = [answer_of(moves[name], theatre.stores, twin) for name in (first, second)]

    # Nothing fits where a run has stopped: all go the general way.
    holds_functions = not scene.startswith("an unknown write") and scene != "a dead letter"
    at_once = answers_at_once(theatre, run_id, moves[first], moves[second], holds_functions=holds_functions)

    assert at_once == serial
    assert what_is_left(theatre.stage, run_id) == what_is_left(theatre.stage, twin)


def test_two_last_siblings_add_the_next_step_once_each_time(theatre: Theatre) -> None:
    """Two parallel reads that settle at the same moment, 1,000 times: neither may overlook the other."""
    run_ids = [theatre.stage.asked(READ, READ) for _ in range(1000 if not theatre.always_general else 100)]
    barrier = threading.Barrier(2)

    def settle_all(number: int) -> list[int]:
        added = []
        for run_id in run_ids:
            barrier.wait(WAIT_SECONDS)
            settled = settling(f"sibling {number}", done, number=number)(theatre.stores, run_id)
            added.append(len(settled.wakeups))  # type: ignore[attr-defined]
        return added

    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(settle_all, (FIRST_CALL, FIRST_CALL + 1)))

    assert [first + second for first, second in zip(*counts, strict=True)] == [1] * len(run_ids)
    with theatre.stage.database.reading() as connection:
        steps_of_a_run = "SELECT count(*) FROM steps WHERE run_id = ANY(%(ids)s) GROUP BY run_id"
        assert set(connection.exec_driver_sql(steps_of_a_run, {"ids": run_ids}).scalars()) == {4}


def test_a_fence_and_a_settle_are_one_transaction_each() -> None:
    """A read costs one commit and a write two: counted as transactions that got an id."""
    with fresh_postgresql() as url:
        stage = Stage(database=Database(url))
        read, write = stage.asked(READ), stage.asked(KEYED)
        stores = stores_over(stage.database, always_general=False)
        with psycopg.connect(url, autocommit=True) as observer:
            before = next_transaction_id(observer)
            stores.steps.load(first_call(read))
            assert next_transaction_id(observer) == before
            settling("settle", done)(stores, read)
            assert next_transaction_id(observer) == before + 1
            fencing("fence", KEYED)(stores, write)
            assert next_transaction_id(observer) == before + 2
        stage.database.dispose()


def answers_at_once(theatre: Theatre, run_id: str, first: Move, second: Move, *, holds_functions: bool) -> list[object]:
    """What both answer when the second begins before the first has committed."""
    database = HeldDatabase(theatre.url, holds_functions=holds_functions)
    held = stores_over(database, always_general=theatre.always_general)
    with ThreadPoolExecutor(2) as pool:
        try:
            answers = [pool.submit(answer_of, first, held, run_id)]
            # A move that is refused is over without a COMMIT to hold.
            eventually(
                lambda: database.has_arrived.is_set() or answers[0].done(), what="the first is before its COMMIT"
            )
            answers.append(pool.submit(answer_of, second, theatre.stores, run_id))
            if not answers[0].done():
                eventually(lambda: waits_for_a_lock(theatre) or answers[1].done(), what="the second waits")
                assert not answers[1].done(), "the second didn't wait for the first"
        finally:
            database.may_commit.set()
        found = [answer.result(WAIT_SECONDS) for answer in answers]
    database.dispose()
    return found


def answer_of(move: Move, stores: Stores, run_id: str) -> object:
    """The answer without what is different in every run; an error by its kind."""
    try:
        return repr(move(stores, run_id)).replace(run_id, "RUN")
    except AgentqError as error:
        return type(error)


def waits_for_a_lock(theatre: Theatre) -> bool:
    with theatre.stage.database.reading() as connection:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'second' AND wait_event_type = 'Lock'"
        return connection.exec_driver_sql(waiting).first() is not None


def what_is_left(stage: Stage, run_id: str) -> dict[str, object]:
    """All that the two transactions left behind, but for times and ids."""
    run = stage.runs.run(run_id)
    fence, letter = run.pending_effect, run.dead_letter
    return {
        "status": run.status,
        "cancel_requested": run.cancel_requested,
        "has_contradiction": run.has_contradiction,
        "fence": fence and (fence.id.replace(run_id, "RUN"), fence.number, fence.attempt),
        "dead_letter": letter and (letter.number, letter.reason, letter.outcome_unknown),
        "steps": [
            (step.number, step.state, step.attempt, step.tries, step.crashes, step.result, step.may_have_happened)
            for step in run.steps
        ],
        "is_dispatched": [step.dispatched_at is not None for step in run.steps],
        "events": [(event.kind, event.number, event.attempt) for event in stage.runs.events(run_id)],
    }


def next_transaction_id(observer: psycopg.Connection[Any]) -> int:
    row = observer.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    number: int = row[0]
    return number
