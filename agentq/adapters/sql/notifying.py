"""Which open dead letters nobody was told of yet, in SQL."""

from collections.abc import Sequence

from sqlalchemy import bindparam, func, select, update

from agentq.adapters.sql.engine import Database, now_plus
from agentq.adapters.sql.rows import dead_letter_from
from agentq.adapters.sql.schema import UNTOLD, dead_letters, runs
from agentq.domain.model import DeadLetter

_untold = (
    select(dead_letters).where(UNTOLD).order_by(dead_letters.c.created_at, dead_letters.c.id).limit(bindparam("limit"))
)
_count_untold = select(func.count()).select_from(dead_letters).where(UNTOLD)
_are_these = dead_letters.c.id.in_(bindparam("ids", expanding=True))
# First, and in the order of their ids, as everybody locks several: who decides about many has the same rows to change.
_lock_runs = (
    select(runs.c.id)
    .where(runs.c.id.in_(select(dead_letters.c.run_id).where(_are_these)))
    .order_by(runs.c.id)
    .with_for_update(key_share=True)
)
_mark = update(dead_letters).where(_are_these, dead_letters.c.notified_at.is_(None)).values(notified_at=now_plus())


class SqlNotificationStore:
    """`NotificationStore` on PostgreSQL and SQLite."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def untold(self, limit: int) -> list[DeadLetter]:
        with self._database.reading() as connection:
            return [dead_letter_from(row) for row in connection.execute(_untold, {"limit": limit}).mappings()]

    def count_untold(self) -> int:
        with self._database.reading() as connection:
            count: int = connection.execute(_count_untold).scalar_one()
        return count

    def mark_told(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        with self._database.writing() as connection:
            connection.execute(_lock_runs, {"ids": list(ids)})
            connection.execute(_mark, {"ids": list(ids)})
