"""Connections that wait for a lock, as PostgreSQL tells it: how a test knows that two changes met."""

from sqlalchemy import text

from agentq.adapters.sql.engine import Database
from tests.support.waiting import eventually

_WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")


def wait_for_waiters(database: Database, count: int = 1, *, seconds: float = 15.0) -> None:
    """So many connections to that database wait for a lock."""

    def counted() -> int:
        with database.reading() as connection:
            return int(connection.execute(_WAITING).scalar_one())

    eventually(lambda: counted() >= count, seconds=seconds, what=f"{count} connections wait for a lock")
