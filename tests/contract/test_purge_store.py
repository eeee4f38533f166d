"""What a purge takes, with all of it, and what it never takes: the contract of `PurgeStore`."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from sqlalchemy import event, select, text

from agentq.adapters.sql.deployment_log import DEPLOYMENT
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.purging import OWNED, ROWS_MAX, SqlPurgeStore
from agentq.adapters.sql.schema import metadata, runs
from agentq.domain.decisions import Ruling
from agentq.domain.errors import AgentqError, NotFoundError
from agentq.domain.model import Decision, RunStatus, StepRef
from agentq.domain.outcomes import Join, Recorded
from agentq.domain.replay import Copying
from agentq.ports.purging import Kept, Place, PurgedBatch
from agentq.ports.runs import NewRun
from agentq.ports.steps import Settlement, Verdict
from tests.support.databases import fresh_postgresql
from tests.support.held_database import WAIT_SECONDS, HeldDatabase
from tests.support.invariants import check_invariants
from tests.support.purged import age, old, orphans
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage
from tests.support.waiting import eventually

AGE = timedelta(days=30)


@pytest.fixture
def stage(stage: Stage) -> Iterator[Stage]:
    yield stage
    check_invariants(stage.database)
    assert orphans(stage.database) == {}


def purge(
    stage: Stage,
    *,
    after: Place | None = None,
    runs_max: int = 100,
    with_contradictions: bool = False,
    is_rehearsal: bool = False,
) -> PurgedBatch:
    store = SqlPurgeStore(stage.database)
    return store.purge(
        finished_before=store.time_before(AGE),
        after=after,
        runs_max=runs_max,
        with_contradictions=with_contradictions,
        actor="ann",
        is_rehearsal=is_rehearsal,
    )


@contextmanager
def before_statement(database: Database, words: str, do: Callable[[], object]) -> Iterator[None]:
    """What another connection does just before the first statement that holds these words."""
    left = [do]

    def look(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if words in statement and left:
            left.pop()()

    event.listen(database.engine, "before_cursor_execute", look)
    yield
    event.remove(database.engine, "before_cursor_execute", look)
    assert not left, "there was no such statement"


def replay(stage: Stage, run_id: str) -> None:
    stage.decisions.replay(run_id, actor="ann", reason="")


def exists(stage: Stage, run_id: str) -> bool:
    try:
        return bool(stage.runs.status(run_id))
    except NotFoundError:
        return False


def test_what_finished_long_ago_goes_with_all_that_it_owns(stage: Stage) -> None:
    """Personal data that a law or a customer wants gone is in steps and events too."""
    gone, stays = old(stage), old(stage, timedelta(days=29))
    discarded = age(stage, stage.failed(READ))
    stage.decisions.discard(discarded, actor="ann", reason="too old")
    cancelled = stage.queued()
    stage.runs.cancel(cancelled, actor="ann", reason="")
    age(stage, cancelled)

    batch = purge(stage)

    assert set(batch.run_ids) == {gone, discarded, cancelled} and batch.kept == {} and batch.place is None
    assert not any(exists(stage, run_id) for run_id in batch.run_ids)
    assert len(stage.runs.run(stays).steps) == 3
    [told] = stage.runs.events(DEPLOYMENT)
    assert (told.kind, told.actor, told.data["runs"]) == ("runs.purged", "ann", 3)


def test_every_table_with_rows_of_a_run_is_known() -> None:
    """A table that is added one day must not keep what was to be deleted."""
    others = {"runs", "purging", "deployment", "agents", "pauses"}
    assert {table.name for table in OWNED} == set(metadata.tables) - others


def test_what_waits_for_a_person_or_goes_on_is_never_taken(stage: Stage) -> None:
    """However old: nobody has decided about it, and its record is what they decide by."""
    going = [stage.queued(), stage.asked(READ), stage.fenced(PLAIN)]
    failed, unknown = age(stage, stage.failed(READ)), age(stage, stage.unknown(PLAIN))
    assert purge(stage).kept == {Kept.DEAD_LETTER: 2}
    assert all(exists(stage, run_id) for run_id in (*going, failed, unknown))

    stage.decisions.resolve(unknown, Ruling(decision=Decision.HAPPENED, result="ok"), actor="ann", reason="")
    assert purge(stage).kept == {Kept.DEAD_LETTER: 2}  # It waits for its replay.
    stage.decisions.discard(unknown, actor="ann", reason="")
    assert purge(stage).run_ids == (unknown,)


def test_a_standing_fence_keeps_a_run_whatever_else_says(stage: Stage) -> None:
    """The one record of a write that may have happened."""
    run_id = age(stage, stage.unknown(PLAIN))
    with stage.database.writing() as connection:
        connection.exec_driver_sql("UPDATE dead_letters SET closed_at = created_at")
    assert purge(stage).kept == {Kept.FENCE: 1}
    stage.change_run(run_id, pending_effect_id=None, pending_effect_number=None)
    assert purge(stage).run_ids == (run_id,)


def test_a_contradiction_goes_only_when_asked_for(stage: Stage) -> None:
    """Nothing marks one as dealt with: who has looked at them says so."""
    run_id = old(stage)
    stage.change_run(run_id, has_contradiction=True)
    assert purge(stage).kept == {Kept.CONTRADICTION: 1}
    assert purge(stage, with_contradictions=True).run_ids == (run_id,)


def test_the_oldest_go_first_a_batch_at_a_time(stage: Stage) -> None:
    """Broken off, what is left is the newer part; and runs that stay don't stand in the way of the next batch."""
    moments = [timedelta(days=days) for days in (60, 50, 40, 40, 40, 35)]
    made = [old(stage, by) for by in moments]
    kept = age(stage, stage.failed(READ), timedelta(days=55))
    same = sorted(made[2:5])  # They finished at the same time only nearly, as rows of one transaction do exactly.
    with stage.database.reading() as connection:
        moment = connection.execute(select(runs.c.finished_at).where(runs.c.id == same[0])).scalar_one()
    for run_id in same:
        stage.change_run(run_id, finished_at=moment)

    batches, place = [], None
    while True:
        batch = purge(stage, after=place, runs_max=2)
        batches.append(set(batch.run_ids))
        place = batch.place
        if place is None:
            break
    assert batches == [{made[0]}, {made[1], same[0]}, {same[1], same[2]}, {made[5]}]
    assert exists(stage, kept)


def test_a_rehearsal_deletes_nothing(stage: Stage) -> None:
    """It looks in the same way: what it says is what would go."""
    run_id, kept = old(stage), age(stage, stage.failed(READ))
    rehearsed = purge(stage, is_rehearsal=True)
    assert (rehearsed.run_ids, rehearsed.kept) == ((run_id,), {Kept.DEAD_LETTER: 1})
    assert exists(stage, run_id) and exists(stage, kept) and stage.runs.events(DEPLOYMENT) == []
    assert purge(stage) == rehearsed


def test_a_batch_is_as_short_as_its_rows_ask_for(stage: Stage) -> None:
    """Two hundred runs of a thousand steps each, deleted at once, would be a lock held for a minute."""
    long, short = old(stage, timedelta(days=50)), old(stage)
    stage.change_run(long, events_count=ROWS_MAX)
    first = purge(stage, is_rehearsal=True)
    assert first.run_ids == (long,) and first.place is not None
    assert purge(stage, after=first.place, is_rehearsal=True).run_ids == (short,)
    stage.change_run(long, events_count=len(stage.runs.events(long)))


def test_a_purged_key_starts_a_new_run(stage: Stage) -> None:
    """It is forgotten with the run: said in the help, because whoever retries after that long pays twice."""
    again = NewRun(id="second", agent="support", input="refund", idempotency_key="ticket 1")
    stage.runs.add([NewRun(id="first", agent="support", input="refund", idempotency_key="ticket 1")])
    stage.runs.cancel("first", actor="ann", reason="")
    age(stage, "first")
    assert [added.run_id for added in stage.runs.add([again])] == ["first"]
    purge(stage)
    assert [(added.run_id, added.is_new) for added in stage.runs.add([again])] == [("second", True)]


def test_a_copy_outlives_the_run_that_it_was_made_from(stage: Stage) -> None:
    """It has its recorded results itself; what it was made from stays written on it."""
    run_id = stage.failed(READ)
    stage.decisions.copy(run_id, "copy", Copying(from_step=FIRST_CALL), actor="ann", reason="")
    stage.decisions.discard(run_id, actor="ann", reason="")
    age(stage, run_id)
    assert purge(stage).run_ids == (run_id,)
    copy = stage.runs.run("copy")
    assert (copy.copied_from, copy.copied_steps) == (run_id, 1)
    stage.complete("copy", FIRST_CALL)
    stage.answer("copy", 3)
    assert stage.runs.status("copy") is RunStatus.COMPLETED
    age(stage, "copy")
    assert purge(stage).run_ids == ("copy",)


def test_events_are_deleted_with_their_run_and_in_no_other_way(stage: Stage) -> None:
    """Purge is the one path that the append-only log admits, and it ends with the purge."""
    old(stage)
    purge(stage)
    stays = old(stage, timedelta(days=1))
    with pytest.raises(AgentqError, match="append-only"), stage.database.writing() as connection:
        connection.exec_driver_sql(f"DELETE FROM events WHERE run_id = '{stays}'")
    assert len(stage.runs.events(stays)) > 0


def test_a_run_that_somebody_changes_is_left_for_the_next_time(postgresql_stage: Stage) -> None:
    """A purge waits for nobody: it would hold what it has already, and others behind it."""
    stage = postgresql_stage
    busy, idle = old(stage), old(stage)
    with stage.database.locked(busy):
        batch = purge(stage)
    assert (batch.run_ids, batch.kept) == ((idle,), {Kept.IN_USE: 1})
    assert purge(stage).run_ids == (busy,)


def test_what_went_on_before_the_lock_is_seen(postgresql_stage: Stage) -> None:
    """Read as finished, and replayed before the purge had its lock: it runs now."""
    stage = postgresql_stage
    run_id = age(stage, stage.failed(READ))
    with before_statement(stage.database, "FOR UPDATE SKIP LOCKED", lambda: replay(stage, run_id)):
        assert purge(stage).kept == {Kept.IN_USE: 1}
    assert stage.runs.status(run_id) is RunStatus.RUNNING


def test_an_enqueue_whose_key_is_purged_meanwhile_starts_a_run(postgresql_stage: Stage) -> None:
    """It met the old run, which was gone when it looked: it neither fails nor is answered with a run that isn't."""
    stage = postgresql_stage
    stage.runs.add([NewRun(id="first", agent="support", input="refund", idempotency_key="ticket 1")])
    stage.runs.cancel("first", actor="ann", reason="")
    age(stage, "first")
    again = NewRun(id="second", agent="support", input="refund", idempotency_key="ticket 1")
    with before_statement(stage.database, "SELECT runs.id, runs.idempotency_key", lambda: purge(stage)):
        assert [(added.run_id, added.is_new) for added in stage.runs.add([again])] == [("second", True)]
    assert not exists(stage, "first")


@pytest.mark.parametrize(
    "move",
    [
        lambda stage, run_id: stage.runs.cancel(run_id, actor="ann", reason=""),
        lambda stage, run_id: stage.decisions.replay(run_id, actor="ann", reason=""),
        lambda stage, run_id: stage.decisions.discard(run_id, actor="ann", reason=""),
        lambda stage, run_id: stage.decisions.copy(run_id, "copy", Copying(from_step=1), actor="ann", reason=""),
        lambda stage, run_id: stage.steps.take_back(first_call(run_id), "a fence", "owner"),
        lambda stage, run_id: stage.steps.hand_back(first_call(run_id), due_in_seconds=0, why=""),
        lambda stage, run_id: stage.steps.settle(late_outcome(run_id)).verdict is not Verdict.MOVED_ON,
    ],
)
def test_whoever_waited_for_a_purge_finds_no_run(move: Callable[[Stage, str], object]) -> None:
    """The purge had the lock first: nothing may be written to a run that is gone."""
    with fresh_postgresql() as url:
        stage, held = Stage(database=Database(url)), HeldDatabase(url, holds_functions=True)
        run_id = old(stage)
        with ThreadPoolExecutor(2) as pool:
            purged = pool.submit(purge, Stage(database=held))
            assert held.has_arrived.wait(WAIT_SECONDS)
            moved = pool.submit(move, stage, run_id)
            eventually(lambda: waits_for_a_lock(stage.database), what="it waits for the purge")
            held.may_commit.set()
            assert purged.result(WAIT_SECONDS).run_ids == (run_id,)
            with suppress(NotFoundError):
                assert moved.result(WAIT_SECONDS) is False
        assert orphans(stage.database) == {}
        held.dispose()
        stage.database.dispose()


def first_call(run_id: str) -> StepRef:
    return StepRef(run_id=run_id, number=FIRST_CALL, attempt=1)


def late_outcome(run_id: str) -> Settlement:
    return Settlement(
        ref=first_call(run_id), owner="late", effect=PLAIN, fence_id="old", change=Recorded(result="ok", then=Join())
    )


def waits_for_a_lock(database: Database) -> bool:
    asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with database.reading() as connection:
        return bool(connection.execute(text(asked)).scalar_one())
