"""Deleting old runs in SQL, with every row that they own."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, RowMapping, Table, bindparam, delete, insert, or_, select

from agentq.adapters.sql.deployment_log import tell
from agentq.adapters.sql.engine import Database, now_plus
from agentq.adapters.sql.schema import dead_letters, metadata, purging, runs
from agentq.domain.events import EventKind
from agentq.domain.times import time_text
from agentq.ports.purging import Kept, Place, PurgedBatch

ROWS_MAX = 20_000  # Steps and events of one batch, unless a single run has more: below a second, also with triggers.

# Whatever belongs to a run, a table that is added one day included.
OWNED: tuple[Table, ...] = tuple(
    table for table in metadata.sorted_tables if "run_id" in table.c and table is not purging
)

_columns = (
    runs.c.id,
    runs.c.finished_at,
    runs.c.pending_effect_id,
    runs.c.has_contradiction,
    (runs.c.events_count + runs.c.next_step).label("row_count"),
)
_finished = (
    select(*_columns)
    .where(runs.c.finished_at < bindparam("finished_before"))
    .order_by(runs.c.finished_at, runs.c.id)
    .limit(bindparam("runs_max"))
)
_finished_behind = _finished.where(
    # Said so, the index leads to the place: an alternative alone would be looked for from the first run on.
    runs.c.finished_at >= bindparam("after_time"),
    or_(runs.c.finished_at > bindparam("after_time"), runs.c.id > bindparam("after_id")),
)
_are_these = runs.c.id.in_(bindparam("run_ids", expanding=True))
# A run that is locked is being changed: it isn't waited for, and is found by the next purge.
_lock = (
    select(*_columns)
    .where(_are_these, runs.c.finished_at < bindparam("finished_before"))
    .order_by(runs.c.id)
    .with_for_update(skip_locked=True)
)
_with_open_dead_letter = select(dead_letters.c.run_id).where(
    dead_letters.c.run_id.in_(bindparam("run_ids", expanding=True)), dead_letters.c.closed_at.is_(None)
)


class SqlPurgeStore:
    """`PurgeStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def excludes_writers(self) -> bool:
        return not self._database.is_postgresql

    def time_before(self, age: timedelta) -> datetime:
        with self._database.reading() as connection:
            moment: datetime = connection.execute(select(now_plus(-age.total_seconds()))).scalar_one()
        return moment

    def purge(
        self,
        *,
        finished_before: datetime,
        after: Place | None,
        runs_max: int,
        with_contradictions: bool,
        actor: str,
        is_rehearsal: bool,
    ) -> PurgedBatch:
        page = self._page(finished_before, after, runs_max)
        if not page:
            return PurgedBatch()
        batch = _as_many_as_fit(page)
        with self._database.writing() as connection:
            # Read before they were locked, they may have moved on since.
            names = {"run_ids": [row["id"] for row in batch], "finished_before": finished_before}
            locked = connection.execute(_lock, names).mappings().all()
            kept = _why_kept(connection, locked, with_contradictions=with_contradictions)
            run_ids = tuple(row["id"] for row in locked if row["id"] not in kept)
            if run_ids and not is_rehearsal:
                _delete(connection, run_ids)
                told = {"runs": len(run_ids), "finished_before": time_text(finished_before)}
                tell(connection, EventKind.RUNS_PURGED, actor=actor, data=told)
        counts = Counter(kept.values())
        counts[Kept.IN_USE] += len(batch) - len(locked)
        is_last = len(page) < runs_max and len(batch) == len(page)
        place = None if is_last else Place(finished_at=batch[-1]["finished_at"], run_id=batch[-1]["id"])
        return PurgedBatch(run_ids=run_ids, kept=+counts, place=place)

    def _page(self, finished_before: datetime, after: Place | None, runs_max: int) -> Sequence[RowMapping]:
        names = {"finished_before": finished_before, "runs_max": runs_max}
        with self._database.reading() as connection:
            if after is None:
                return connection.execute(_finished, names).mappings().all()
            behind = {"after_time": after.finished_at, "after_id": after.run_id}
            return connection.execute(_finished_behind, {**names, **behind}).mappings().all()


def _as_many_as_fit(page: Sequence[RowMapping]) -> Sequence[RowMapping]:
    """The first of them, at least one, so that no transaction deletes for long."""
    rows = 0
    for count, row in enumerate(page):
        rows += row["row_count"]
        if rows > ROWS_MAX and count:
            return page[:count]
    return page


def _why_kept(connection: Connection, locked: Sequence[RowMapping], *, with_contradictions: bool) -> dict[str, Kept]:
    """Those that stay. A statement of its own after the lock: nobody can open a dead letter any more."""
    names = {"run_ids": [row["id"] for row in locked]}
    waiting = set(connection.execute(_with_open_dead_letter, names).scalars()) if locked else set()
    kept = {}
    for row in locked:
        if row["id"] in waiting:
            kept[row["id"]] = Kept.DEAD_LETTER
        elif row["pending_effect_id"] is not None:
            kept[row["id"]] = Kept.FENCE
        elif row["has_contradiction"] and not with_contradictions:
            kept[row["id"]] = Kept.CONTRADICTION
    return kept


def _delete(connection: Connection, run_ids: Sequence[str]) -> None:
    """All rows of these runs. The database admits it for events of runs that are named in `purging`."""
    connection.execute(insert(purging), [{"run_id": run_id} for run_id in run_ids])
    for table in OWNED:
        connection.execute(delete(table).where(table.c.run_id.in_(run_ids)))
    connection.execute(delete(runs).where(runs.c.id.in_(run_ids)))
    connection.execute(delete(purging).where(purging.c.run_id.in_(run_ids)))
