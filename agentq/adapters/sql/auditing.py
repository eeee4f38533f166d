"""Reading the audit log in SQL: runs with all that is told of them, page by page, and what was told in a time."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, RowMapping, and_, exists, literal, null, or_, select, tuple_, union_all
from sqlalchemy.sql.expression import ColumnElement

from agentq.adapters.sql.deployment_log import DEPLOYMENT
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.rows import logged_event_from
from agentq.adapters.sql.schema import dead_letters, events, runs, seals, steps
from agentq.domain.audit import AuditedRun, RecordedStep
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import NotFoundError, UnreadableLogError
from agentq.domain.model import RunStatus, StepState
from agentq.domain.seals import LoggedEvent, Seal
from agentq.ports.auditing import AuditPage, AuditScope

PAGE_RUNS = 500
PAGE_EVENTS = 5000  # A few megabytes; a run that has more makes a page of its own.
EXPORT_ROWS = 1000
# A reader that stands still must not keep the server from tidying up for ever.
EXPORT_STALL = "10min"

# What reading a value raises that agentq never wrote.
_UNREADABLE = (ValueError, TypeError, OverflowError)

_has_open_dead_letter = exists().where(dead_letters.c.run_id == runs.c.id, dead_letters.c.closed_at.is_(None))
_runs = select(
    runs.c.id,
    runs.c.status,
    runs.c.events_count,
    runs.c.events_lost,
    runs.c.copied_steps,
    runs.c.pending_effect_id,
    _has_open_dead_letter.label("has_open_dead_letter"),
)
_steps = select(
    steps.c.run_id,
    steps.c.number,
    steps.c.effect,
    or_(steps.c.is_error.is_(False), steps.c.settled_by.is_not(None)).label("was_made"),
).where(steps.c.state == StepState.COMPLETED.value)
_SEAL = "seal"
_event_entries = select(literal("event").label("entry"), *events.c, null().label("events_lost"), null().label("digest"))
_seal_entries = select(
    literal(_SEAL).label("entry"),
    seals.c.run_id,
    seals.c.sequence,
    seals.c.at,
    literal("").label("kind"),
    seals.c.number,
    null().label("attempt"),
    literal("").label("actor"),
    literal("").label("data"),
    seals.c.events_lost,
    seals.c.digest,
)


class SqlAuditStore:
    """`AuditStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database, *, page_runs: int = PAGE_RUNS, page_events: int = PAGE_EVENTS) -> None:
        """A page has at most so many runs, and events, whichever comes first."""
        self._database = database
        self._page_runs, self._page_events = page_runs, page_events

    def pages(self, scope: AuditScope) -> Iterator[AuditPage]:
        if scope.run_ids:
            return self._pages_of(scope.run_ids)
        return self._pages_of_all() if scope.is_everything else self._pages_in_time(scope)

    def deployment_events(self) -> Sequence[LoggedEvent] | None:
        with self._database.reading() as connection:
            try:
                return _events(connection, events.c.run_id == DEPLOYMENT)[DEPLOYMENT]
            except _UNREADABLE:
                return None

    def entries(self, since: datetime | None, until: datetime | None) -> Iterator[LoggedEvent | Seal]:
        told = union_all(
            _event_entries.where(*_in_time(events.c.at, since, until)),
            _seal_entries.where(*_in_time(seals.c.at, since, until)),
        ).subquery()
        in_order = select(told).order_by(told.c.at, told.c.run_id, told.c.sequence, told.c.entry)
        with self._database.snapshot() as connection:
            if self._database.is_postgresql:
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")  # It may sort a year.
                connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{EXPORT_STALL}'")
            rows = iter(connection.execution_options(yield_per=EXPORT_ROWS).execute(in_order).mappings())
            while True:
                try:
                    row = next(rows, None)
                    entry = None if row is None else _entry_from(row)
                except _UNREADABLE:
                    raise UnreadableLogError(
                        "the log holds a row that can't be read, and the export ends before it: agentq audit verify "
                        "says of which run"
                    ) from None
                if entry is None:
                    return
                yield entry

    # --- Pages: each is read in one snapshot, which has ended when it is looked at

    def _pages_of(self, run_ids: Sequence[str]) -> Iterator[AuditPage]:
        wanted = list(dict.fromkeys(run_ids))
        with self._database.reading() as connection:
            for some in _parts(wanted, self._page_runs):
                known = set(connection.execute(select(runs.c.id).where(runs.c.id.in_(some))).scalars())
                unknown = [run_id for run_id in some if run_id not in known]
                if unknown:
                    raise NotFoundError(f"there is no run {unknown[0]!r}")
        while wanted:
            with self._database.snapshot() as connection:
                rows = connection.execute(
                    _runs.where(runs.c.id.in_(wanted[: self._page_runs])).order_by(runs.c.id)
                ).all()
                chosen = self._few(rows)
                page = _page(connection, chosen)
            found, asked = {row.id for row in rows}, set(wanted[: self._page_runs])
            done = {row.id for row in chosen} | (asked - found)  # One may have been purged meanwhile.
            wanted = [run_id for run_id in wanted if run_id not in done]
            yield page

    def _pages_in_time(self, scope: AuditScope) -> Iterator[AuditPage]:
        place = tuple_(runs.c.created_at, runs.c.id)
        following = _runs.add_columns(runs.c.created_at).where(*_in_time(runs.c.created_at, scope.since, scope.until))
        following = following.order_by(runs.c.created_at, runs.c.id).limit(self._page_runs)
        after: Row[Any] | None = None
        while True:
            asked = following
            if after is not None:
                asked = following.where(place > tuple_(literal(after.created_at, runs.c.created_at.type), after.id))
            with self._database.snapshot() as connection:
                try:
                    chosen = self._few(connection.execute(asked).all())
                except _UNREADABLE:
                    raise UnreadableLogError("when a run was created can't be read: verify all of them") from None
                page = _page(connection, chosen)
            if not chosen:
                return
            after = chosen[-1]
            yield page

    def _pages_of_all(self) -> Iterator[AuditPage]:
        """By id, so that whatever stands between two runs' ids in the log belongs to neither."""
        following = _runs.order_by(runs.c.id).limit(self._page_runs)
        after = DEPLOYMENT
        while True:
            with self._database.snapshot() as connection:
                chosen = self._few(connection.execute(following.where(runs.c.id > after)).all())
                last = chosen[-1].id if chosen else None
                strays = _strays(connection, [row.id for row in chosen], after, last)
                page = replace(_page(connection, chosen), strays=strays)
            yield page
            if last is None:
                return
            after = last

    def _few(self, rows: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
        """As many of the first as make a page."""
        count = events_count = 0
        for row in rows:
            events_count += row.events_count if isinstance(row.events_count, int) else 0
            if count and events_count > self._page_events:
                break
            count += 1
        return rows[:count]


def _page(connection: Connection, rows: Sequence[Row[Any]]) -> AuditPage:
    """These runs; where they can't be read together, each by itself: one mustn't hide what is wrong with others."""
    try:
        return AuditPage(runs=_audited(connection, rows))
    except _UNREADABLE:
        if len(rows) == 1:
            return AuditPage(runs=(), unreadable=(rows[0].id,))
    pages = [_page(connection, [row]) for row in rows]
    return AuditPage(
        runs=tuple(run for page in pages for run in page.runs),
        unreadable=tuple(run_id for page in pages for run_id in page.unreadable),
    )


def _audited(connection: Connection, rows: Sequence[Row[Any]]) -> tuple[AuditedRun, ...]:
    ids = [row.id for row in rows]
    if not ids:
        return ()
    told = _events(connection, events.c.run_id.in_(ids))
    sealed = select(seals).where(seals.c.run_id.in_(ids)).order_by(seals.c.run_id, seals.c.number)
    its_seals = _by_run(connection.execute(sealed).mappings())
    completed = _steps.where(steps.c.run_id.in_(ids)).order_by(steps.c.run_id, steps.c.number)
    its_steps = _by_run(connection.execute(completed).mappings())
    return tuple(
        AuditedRun(
            id=row.id,
            status=RunStatus(row.status),
            events_count=_whole(row.events_count),
            events_lost=_whole(row.events_lost),
            copied_steps=_whole(row.copied_steps),
            fence_id=row.pending_effect_id,
            has_open_dead_letter=bool(row.has_open_dead_letter),
            steps=tuple(_step_from(each) for each in its_steps[row.id]),
            events=tuple(told[row.id]),
            seals=tuple(_seal_from(each) for each in its_seals[row.id]),
        )
        for row in rows
    )


def _events(connection: Connection, condition: ColumnElement[bool]) -> defaultdict[str, list[LoggedEvent]]:
    in_order = select(events).where(condition).order_by(events.c.run_id, events.c.sequence)
    found: defaultdict[str, list[LoggedEvent]] = defaultdict(list)
    for row in connection.execute(in_order).mappings():
        found[row["run_id"]].append(_event_from(row))
    return found


def _strays(connection: Connection, ids: Sequence[str], after: str, last: str | None) -> tuple[str, ...]:
    found: set[str] = set()
    for table in (events, seals):
        between = table.c.run_id > after if last is None else and_(table.c.run_id > after, table.c.run_id <= last)
        is_stray = and_(between, table.c.run_id.not_in(ids)) if ids else between
        found.update(connection.execute(select(table.c.run_id).distinct().where(is_stray).limit(PAGE_RUNS)).scalars())
    return tuple(sorted(found))


def _in_time(
    column: ColumnElement[datetime], since: datetime | None, until: datetime | None
) -> list[ColumnElement[bool]]:
    conditions = [] if since is None else [column >= since]
    return conditions if until is None else [*conditions, column < until]


def _by_run(rows: Iterable[RowMapping]) -> defaultdict[str, list[RowMapping]]:
    found: defaultdict[str, list[RowMapping]] = defaultdict(list)
    for row in rows:
        found[row["run_id"]].append(row)
    return found


def _parts(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _step_from(row: RowMapping) -> RecordedStep:
    return RecordedStep(number=_whole(row["number"]), effect=ToolEffect(row["effect"]), was_made=bool(row["was_made"]))


def _seal_from(row: RowMapping) -> Seal:
    return Seal(
        run_id=row["run_id"],
        number=_whole(row["number"]),
        sequence=_whole(row["sequence"]),
        events_lost=_whole(row["events_lost"]),
        at=row["at"],
        digest=_text(row["digest"]),
    )


def _event_from(row: RowMapping) -> LoggedEvent:
    """SQLite keeps any kind of value in any column."""
    _whole(row["sequence"])
    for name in ("run_id", "kind", "actor", "data"):
        _text(row[name])
    return logged_event_from(row)


def _entry_from(row: RowMapping) -> LoggedEvent | Seal:
    return _seal_from(row) if row["entry"] == _SEAL else _event_from(row)


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value
