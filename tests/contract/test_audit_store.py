"""The audit log as databases keep it: append-only, sealed at each end of a run, read page by page and by time."""

import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, update

from agentq.adapters.sql.auditing import SqlAuditStore
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.schema import events, purging, runs, seals
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.audit import AuditedRun, AuditFinding, Break
from agentq.domain.decisions import Replaying, Ruling
from agentq.domain.errors import AuditRefusedError, NotFoundError, StoreRefusedError
from agentq.domain.model import Decision, RunMode, RunStatus
from agentq.domain.outcomes import Answer, Recorded
from agentq.domain.seals import LoggedEvent, Seal, digest_of
from agentq.ports.auditing import AuditScope
from agentq.ports.runs import NewRun
from agentq.ports.steps import Settlement
from agentq.services.verify import verify
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.stage import FIRST_CALL, KEYED, PLAIN, READ, Stage

PATHS = ("sqlite", "postgresql, general path", "postgresql, functions")
EVERYTHING = AuditScope()


@pytest.fixture(params=PATHS)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """On both databases, and on both ways to settle."""
    with fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql() as url:
        database = Database(url)
        stage = Stage(database=database)
        stage.steps = SqlStepStore(database, always_general=request.param == "postgresql, general path")
        yield stage
        database.dispose()


def audited(stage: Stage, run_id: str) -> AuditedRun:
    (page,) = SqlAuditStore(stage.database).pages(AuditScope(run_ids=(run_id,)))
    (run,) = page.runs
    return run


def found(stage: Stage, scope: AuditScope = EVERYTHING) -> list[AuditFinding]:
    findings: list[AuditFinding] = []
    verify(SqlAuditStore(stage.database), scope, findings.append)
    return findings


def paid(stage: Stage) -> str:
    """A completed run with a write."""
    run_id = stage.fenced()
    stage.complete(run_id, FIRST_CALL, "paid", fence_id=run_id)
    stage.answer(run_id, 3)
    return run_id


# --- Append-only ----------------------------------------------------------------------------------------------------

CHANGES = {
    "an event's text": update(events).values(data="{}"),
    "nothing of an event": update(events).values(kind=events.c.kind),
    "events deleted": delete(events),
    "a seal's digest": update(seals).values(digest="0"),
    "seals deleted": delete(seals),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_told_is_neither_changed_nor_deleted(stage: Stage, change: Any) -> None:
    """The database itself refuses, whoever asks, and says why."""
    run_id = paid(stage)
    before = audited(stage, run_id)
    with pytest.raises(StoreRefusedError, match="the audit log is append-only"), stage.database.writing() as connection:
        connection.execute(change)
    assert audited(stage, run_id) == before


def test_no_other_way_leads_around_that(stage: Stage) -> None:
    """Each database has a statement that deletes rows without saying so."""
    run_id = paid(stage)
    before = audited(stage, run_id)
    if stage.database.is_postgresql:
        around = ["TRUNCATE events", "TRUNCATE seals", "TRUNCATE runs, events CASCADE"]
    else:
        columns = "(run_id, sequence, at, kind, actor)"
        around = [
            f"INSERT OR REPLACE INTO events {columns} VALUES ('{run_id}', 1, 'x', 'x', 'x')",
            "REPLACE INTO events (rowid, run_id, sequence, at, kind, actor) VALUES (1, 'z', 1, 'x', 'x', 'x')",
            f"REPLACE INTO seals VALUES ('{run_id}', 1, 1, 0, 'x', 'x')",
        ]
    for statement in around:
        refusal = pytest.raises(StoreRefusedError, match="the audit log is append-only")
        with refusal, stage.database.writing() as connection:
            connection.exec_driver_sql(statement)
    assert audited(stage, run_id) == before


def test_only_a_run_that_is_being_purged_loses_its_events(stage: Stage) -> None:
    """Nor do others in the same transaction."""
    purged, kept = paid(stage), paid(stage)
    with stage.database.writing() as connection:
        connection.execute(insert(purging).values(run_id=purged))
        for table in (events, seals):
            connection.execute(delete(table).where(table.c.run_id == purged))
        with pytest.raises(Exception, match="append-only"), connection.begin_nested():
            connection.execute(delete(events).where(events.c.run_id == kept))
        connection.execute(delete(purging))
    assert len(audited(stage, kept).events) == 6
    assert (audited(stage, purged).events, audited(stage, purged).seals) == ((), ())


# --- Seals ----------------------------------------------------------------------------------------------------------


TEXT = 'wrong "customer": \u20ac 5,-\n\U0001f600 e\u0301 -'  # Whose characters, bytes and signs differ in number.


def cancelled(stage: Stage) -> str:
    run_id = stage.queued()
    stage.runs.cancel(run_id, actor="ann", reason=TEXT)
    return run_id


def refused(stage: Stage) -> str:
    run_id = uuid.uuid4().hex
    stage.runs.add([NewRun(id=run_id, agent="nobody", input="x", error="unknown agent 'nobody'")])
    return run_id


def failed_with_its_caller(stage: Stage) -> str:
    run_id = stage.fenced(mode=RunMode.INTERACTIVE)
    assert stage.keeping.fail_interactive(run_id, error="its caller is gone")
    return run_id


def late_and_cancelled(stage: Stage) -> str:
    run_id = stage.unknown(is_cancelled=True)
    stage.decisions.discard(run_id, actor="ann", reason="nobody knows")
    return run_id


ENDS = {
    "completed": paid,
    "dead-lettered": lambda stage: stage.failed(KEYED),
    "unknown": lambda stage: stage.unknown(),
    "cancelled": cancelled,
    "refused": refused,
    "failed with its caller": failed_with_its_caller,
    "cancelled after a dead letter": late_and_cancelled,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_each_end_is_sealed_as_the_domain_says(stage: Stage, end: Any) -> None:
    """One text in SQL and in Python: what one of them seals the other one proves."""
    run = audited(stage, end(stage))
    last = run.seals[-1]
    assert (last.sequence, last.events_lost, last.at) == (run.events_count, 0, run.events[-1].at)
    before = run.seals[-2] if len(run.seals) > 1 else None
    assert last.digest == digest_of(
        run.events[before.sequence if before else 0 :],
        previous=before.digest if before else None,
        run_id=run.id,
        number=len(run.seals),
        sequence=last.sequence,
        events_lost=0,
        at=last.at,
    )
    assert found(stage) == []


def answering(stage: Stage, run_id: str, *, with_events: bool) -> Settlement:
    answered = Recorded(result={"content": "done"}, then=Answer(output="done"))
    return Settlement(ref=stage.ref(run_id, 1), owner="x", effect=READ, change=answered, with_events=with_events)


def test_a_run_that_goes_on_is_not_sealed(stage: Stage) -> None:
    """A step that doesn't end its run costs nothing more."""
    run_id = stage.asked(READ, PLAIN)
    stage.complete(run_id, FIRST_CALL)
    assert audited(stage, run_id).seals == ()


def test_what_is_noted_after_an_end_is_sealed_by_the_next(stage: Stage) -> None:
    """A replay chains on: its seal stands on the one before, and covers what people decided in between."""
    run_id = stage.unknown()
    ruling = Ruling(decision=Decision.DID_NOT_HAPPEN)
    stage.decisions.resolve(run_id, ruling, actor="ann", reason="asked the bank")
    between = audited(stage, run_id)
    assert [seal.sequence for seal in between.seals] == [4] and between.events_count == 5
    checked = verify(SqlAuditStore(stage.database), EVERYTHING, print)
    assert (checked.findings, checked.events_unsealed) == (0, 1)

    stage.decisions.replay(run_id, actor="ann", reason="go on")
    stage.stop(run_id, FIRST_CALL)
    stage.decisions.decide_many([run_id], Replaying(), actor="ann", reason="again")
    stage.stop(run_id, FIRST_CALL)

    seals_of_all = audited(stage, run_id).seals
    assert [(seal.number, seal.sequence) for seal in seals_of_all] == [(1, 4), (2, 7), (3, 9)]
    assert found(stage) == []


def test_an_end_without_its_events_has_no_seal(stage: Stage) -> None:
    """A log that refuses everything stops no run that only reads; what it lost is counted, and so excused."""
    run_id = stage.queued()
    stage.steps.settle(answering(stage, run_id, with_events=False))
    run = audited(stage, run_id)
    assert (run.status, run.events_lost, run.seals) == (RunStatus.COMPLETED, 2, ())
    assert found(stage) == []


def test_a_seal_that_is_refused_is_a_refused_event(stage: Stage) -> None:
    """So that a read's run ends without it, and a write's isn't said to have ended."""
    run_id = stage.queued()
    with stage.database.writing() as connection:
        connection.exec_driver_sql("ALTER TABLE seals RENAME TO kept_seals")
    with pytest.raises(AuditRefusedError):
        stage.answer(run_id, 1)
    assert stage.runs.status(run_id) is RunStatus.QUEUED
    stage.steps.settle(answering(stage, run_id, with_events=False))
    assert stage.runs.status(run_id) is RunStatus.COMPLETED


# --- Pages ----------------------------------------------------------------------------------------------------------


def pages(stage: Stage, scope: AuditScope = EVERYTHING, **sizes: int) -> list[list[str]]:
    return [[run.id for run in page.runs] for page in SqlAuditStore(stage.database, **sizes).pages(scope)]


@pytest.mark.parametrize("sizes", [{"page_runs": 2}, {"page_events": 12}, {"page_events": 1}], ids=str)
def test_every_run_is_on_one_page(stage: Stage, sizes: dict[str, int]) -> None:
    """Whatever the pages are cut by, no run is left out, none comes twice, and one that is large still comes."""
    made = [paid(stage) for _ in range(5)]
    scopes = [EVERYTHING, AuditScope(run_ids=(*made, made[0])), AuditScope(since=datetime(2026, 1, 1, tzinfo=UTC))]
    for scope in scopes:
        cut = [page for page in pages(stage, scope, **sizes) if page]
        assert sorted(run_id for page in cut for run_id in page) == sorted(made)
        assert max(len(page) for page in cut) == (1 if sizes == {"page_events": 1} else 2)


def test_a_time_chooses_runs_by_when_they_were_created(stage: Stage) -> None:
    """As every list of runs does; the end isn't part of it."""
    made = [paid(stage) for _ in range(3)]
    created = datetime(2026, 1, 31, 12, tzinfo=UTC)
    for days, run_id in enumerate(made):
        stage.change_run(run_id, created_at=created + timedelta(days=days))
    assert pages(stage, AuditScope(since=created + timedelta(days=1))) == [made[1:]]
    assert pages(stage, AuditScope(until=created + timedelta(days=1))) == [made[:1]]
    assert pages(stage, AuditScope(since=created + timedelta(days=7))) == []


def test_a_run_that_is_not_there_stops_it_at_once(stage: Stage) -> None:
    """Nothing was proved of it: a line that says so, before any other."""
    run_id = paid(stage)
    with pytest.raises(NotFoundError, match="no run 'missing'"):
        pages(stage, AuditScope(run_ids=(run_id, "missing")))


def test_the_log_of_a_run_whose_row_was_deleted_is_found(stage: Stage) -> None:
    """Purge takes all or nothing; who deletes the row alone wants to hide what the run did."""
    hidden = [paid(stage) for _ in range(3)]
    left = paid(stage)
    with stage.database.writing() as connection:
        connection.execute(delete(runs).where(runs.c.id.in_(hidden)))
    assert pages(stage, page_runs=1)[0] == [left]
    told = {(finding.run_id, finding.broken) for finding in found(stage)}
    assert told == {(run_id, Break.NO_RUN) for run_id in hidden}


def test_the_deployment_s_own_log_is_no_run_s(stage: Stage) -> None:
    """It stands under no run's id, and is judged by itself."""
    stage.pausing.pause("pay", None, reads=False, actor="ann", reason="the bank is down")
    stage.pausing.resume("pay", None, actor="ann", reason="")
    told = SqlAuditStore(stage.database).deployment_events()
    assert told is not None
    assert [event.kind for event in told] == ["tool.paused", "tool.resumed"]
    checked = verify(SqlAuditStore(stage.database), EVERYTHING, print)
    assert (checked.findings, checked.runs, checked.events) == (0, 0, 2)


# --- By time --------------------------------------------------------------------------------------------------------


def entries(stage: Stage, since: datetime | None = None, until: datetime | None = None) -> list[LoggedEvent | Seal]:
    return list(SqlAuditStore(stage.database).entries(since, until))


def keys(told: Sequence[LoggedEvent | Seal]) -> list[tuple[datetime, str, int, bool]]:
    return [(each.at, each.run_id, each.sequence, isinstance(each, Seal)) for each in told]


def test_all_that_was_told_comes_in_one_order(stage: Stage) -> None:
    """By time, run and sequence, a seal after what it seals: two exports of one time are the same bytes."""
    made = [paid(stage) for _ in range(4)]
    told = entries(stage)
    assert keys(told) == sorted(keys(told)) and told == entries(stage)
    for run_id in made:
        run = audited(stage, run_id)
        assert tuple(each for each in told if each.run_id == run_id and isinstance(each, LoggedEvent)) == run.events
        assert tuple(each for each in told if each.run_id == run_id and isinstance(each, Seal)) == run.seals


def test_a_time_has_its_beginning_and_not_its_end(stage: Stage) -> None:
    """So that the exports of two days side by side hold each event once."""
    paid(stage)
    told = entries(stage)
    middle = told[len(told) // 2].at
    assert entries(stage, until=middle) + entries(stage, since=middle) == told
    assert entries(stage, since=told[-1].at + timedelta(seconds=1)) == []


def test_a_large_time_is_read_as_it_is_asked_for(stage: Stage) -> None:
    """Whoever stops reading has read no more than a part, and the connection is free again."""
    row = {"sequence": 1, "at": datetime(2026, 1, 31, tzinfo=UTC), "kind": "run.enqueued", "actor": "enqueue"}
    with stage.database.writing() as connection:
        connection.execute(insert(events), [{**row, "run_id": f"run-{number:05}"} for number in range(3000)])
    told = SqlAuditStore(stage.database).entries(None, None)
    assert [next(told).run_id for _ in range(2)] == ["run-00000", "run-00001"]
    told.close()  # type: ignore[attr-defined]
    with stage.database.reading() as connection:
        assert connection.execute(select(func.count()).select_from(events)).scalar_one() == 3000
