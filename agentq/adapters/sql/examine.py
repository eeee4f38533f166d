"""What a database says of itself, as far as a fence depends on it. Changes nothing."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from agentq.adapters.filesystem import filesystem_of
from agentq.adapters.sql.engine import CONNECT_TIMEOUT_SECONDS, Database, checked_url
from agentq.adapters.sql.schema import metadata
from agentq.domain.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """A replica that this server feeds. None: this user may not see it."""

    name: str
    sync_state: str | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresqlFacts:
    """`synchronous_commit`, `isolation` and `lock_timeout` are those of agentq's own connections;
    `synchronous_commit_default` is what any other program gets here, None when that can't be told.
    `seconds_ahead`: the server's clock against this machine's."""

    version: str
    place: str
    is_replica: bool = False
    is_read_only: bool = False
    has_fsync: bool = True
    has_full_page_writes: bool = True
    synchronous_commit: str = "on"
    synchronous_commit_default: str | None = "on"
    synchronous_standby_names: str = ""
    isolation: str = "read committed"
    lock_timeout: str = "10s"
    standbys: tuple[Standby, ...] = ()
    unlogged_tables: tuple[str, ...] = ()
    seconds_ahead: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteFacts:
    """`filesystem` None: this system doesn't say. `synchronous` as SQLite numbers it: 2 is FULL."""

    version: str
    file: Path
    filesystem: str | None = None
    journal_mode: str = "wal"
    synchronous: int = 2


_POSTGRESQL = """
SELECT current_setting('server_version') AS version,
       pg_is_in_recovery() AS is_replica,
       current_setting('transaction_read_only') = 'on' AS is_read_only,
       current_setting('fsync') = 'on' AS has_fsync,
       current_setting('full_page_writes') = 'on' AS has_full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('synchronous_standby_names') AS synchronous_standby_names,
       current_setting('transaction_isolation') AS isolation,
       current_setting('lock_timeout') AS lock_timeout
"""
_STANDBYS = """
SELECT application_name AS name, sync_state, CAST(extract(epoch FROM replay_lag) AS double precision) AS lag_seconds
FROM pg_stat_replication
"""
_UNLOGGED = "SELECT relname FROM pg_class WHERE relpersistence <> 'p' AND oid = to_regclass(%(name)s)"


def examine_database(database: Database, url: str) -> PostgresqlFacts | SqliteFacts:
    """The facts. Raises what `Database` raises, and SchemaError where there is no SQLite file yet."""
    if not database.is_postgresql and not Path(place_of(url)).exists():
        raise SchemaError("the database has no schema yet: run `agentq db upgrade`")  # Looking makes no file.
    with database.reading() as connection:
        if database.is_postgresql:
            return _postgresql_facts(connection, url)
        return _sqlite_facts(connection, url)


def place_of(url: str) -> str:
    """Where a database is, without user, password or options."""
    parsed = checked_url(url)
    if parsed.get_backend_name() == "sqlite":
        return str(parsed.database)
    host = parsed.host or parsed.query.get("host") or "the local socket"
    named = ", ".join(host) if isinstance(host, tuple) else host
    return f"{named}{f':{parsed.port}' if parsed.port else ''}, database {parsed.database or 'of the user'}"


def _postgresql_facts(connection: Connection, url: str) -> PostgresqlFacts:
    row = connection.exec_driver_sql(_POSTGRESQL).mappings().one()
    return PostgresqlFacts(
        **row,
        place=place_of(url),
        synchronous_commit_default=_synchronous_commit_default(url),
        standbys=tuple(Standby(**standby) for standby in connection.exec_driver_sql(_STANDBYS).mappings()),
        unlogged_tables=tuple(
            name
            for name in metadata.tables
            if connection.exec_driver_sql(_UNLOGGED, {"name": name}).scalar_one_or_none() is not None
        ),
        seconds_ahead=_seconds_ahead(connection),
    )


def _synchronous_commit_default(url: str) -> str | None:
    """What server, database and role say, without what agentq asks for."""
    engine = create_engine(checked_url(url), poolclass=NullPool, connect_args=_timeout())
    try:
        with engine.connect() as connection:
            return str(connection.exec_driver_sql("SHOW synchronous_commit").scalar_one())
    except SQLAlchemyError:
        return None


def _timeout() -> dict[str, Any]:
    return {"connect_timeout": CONNECT_TIMEOUT_SECONDS}


def _seconds_ahead(connection: Connection) -> float:
    """Against the middle of the question's way there and back."""
    asked_at = time.time()
    theirs = float(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())").scalar_one())
    return theirs - (asked_at + time.time()) / 2


def _sqlite_facts(connection: Connection, url: str) -> SqliteFacts:
    file = Path(place_of(url))
    return SqliteFacts(
        version=connection.exec_driver_sql("SELECT sqlite_version()").scalar_one(),
        file=file,
        filesystem=filesystem_of(file.parent),
        journal_mode=connection.exec_driver_sql("PRAGMA journal_mode").scalar_one(),
        synchronous=connection.exec_driver_sql("PRAGMA synchronous").scalar_one(),
    )
