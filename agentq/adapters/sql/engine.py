"""Connections and transactions: one engine a process, and the one way to change a run."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, Row, bindparam, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, DisconnectionError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from agentq.adapters.sql.errors import is_lost, translated
from agentq.adapters.sql.schema import UtcDateTime, runs
from agentq.domain.errors import ConfigurationError, SchemaError

if TYPE_CHECKING:
    import psycopg

CONNECT_TIMEOUT_SECONDS = 5
POOL_SIZE = 4  # Connections of a process: a step holds one for a millisecond at a time.
POOL_OVERFLOW = 4
POOL_TIMEOUT_SECONDS = 10.0
IDLE_SECONDS = 0.1  # A connection that lay in the pool for longer is tried first: no server is back sooner than that.
_RETURNED_AT = "agentq_returned_at"

SQLITE_BUSY_SECONDS = 30.0  # Writers come one at a time; waiting in this line is no failure.

_POSTGRESQL_OPTIONS = {
    "default_transaction_isolation": r"read\ committed",  # After a lock each statement must see the present.
    "synchronous_commit": "on",  # A fence that the server forgets is a write that runs twice.
    "statement_timeout": "20s",
    "lock_timeout": "10s",  # The holder of a run's row is at most one statement timeout away from its end.
    "idle_in_transaction_session_timeout": "20s",  # A stalled process must not hold a run's row for ever.
    "timezone": "UTC",
}
_SQLITE_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
)


class now_plus(FunctionElement[Any]):
    """The database's time now, plus so many seconds (a number or a column)."""

    type = UtcDateTime()
    inherit_cache = True

    def __init__(self, seconds: float | ColumnElement[Any] = 0) -> None:
        super().__init__(seconds)


class seconds_since(FunctionElement[float]):
    """How many seconds ago, by the database's time, that column's time was; negative when it is to come."""

    inherit_cache = True

    def __init__(self, column: ColumnElement[Any]) -> None:
        super().__init__(column)


@compiles(now_plus, "postgresql")
def _now_plus_postgresql(element: now_plus, compiler: SQLCompiler, **options: Any) -> str:
    # The statement's time, not the transaction's: that may have begun long before it got its lock.
    seconds = compiler.process(element.clauses, **options)
    return f"(statement_timestamp() + make_interval(secs => CAST({seconds} AS double precision)))"


@compiles(now_plus, "sqlite")
def _now_plus_sqlite(element: now_plus, compiler: SQLCompiler, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', {seconds}))"


@compiles(seconds_since, "postgresql")
def _seconds_since_postgresql(element: seconds_since, compiler: SQLCompiler, **options: Any) -> str:
    column = compiler.process(element.clauses, **options)
    return f"CAST(extract(epoch FROM statement_timestamp() - {column}) AS double precision)"


@compiles(seconds_since, "sqlite")
def _seconds_since_sqlite(element: seconds_since, compiler: SQLCompiler, **options: Any) -> str:
    return f"((julianday('now') - julianday({compiler.process(element.clauses, **options)})) * 86400.0)"


# NO KEY UPDATE: excludes every other writer, but not the check of a dead letter's foreign key.
_lock_run = (
    select(runs, now_plus().label("now")).where(runs.c.id == bindparam("run_id")).with_for_update(key_share=True)
)


class Database:
    """A database of runs. Cheap to make: it connects when it is first used, and anew in a forked process.

    Every context manager here raises StoreUnavailableError, StoreRefusedError or SchemaError for a driver's error.
    """

    def __init__(self, url: str, *, application_name: str = "agentq") -> None:
        self._url = checked_url(url)
        self._application_name = application_name
        self._engines: dict[int, Engine] = {}  # By process id: a connection that two processes share is garbage.

    @property
    def is_postgresql(self) -> bool:
        return self._url.get_backend_name() == "postgresql"

    @property
    def engine(self) -> Engine:
        """This process's engine, in autocommit mode; transactions begin as `locked` and its like say."""
        process = os.getpid()
        engine = self._engines.get(process)
        # Two threads may both make one; the loser's never connects.
        return engine or self._engines.setdefault(process, self._make_engine())

    @contextmanager
    def locked(self, run_id: str) -> Iterator[tuple[Connection, Row[Any] | None]]:
        """The one way to change a run: a transaction that holds its row, and the row as it is under the lock.

        The row has all columns of `runs`, and `now`, the database's time; it is None when there is no such run.
        Commits when the block ends, rolls back when it raises.
        """
        with self.writing() as connection:
            yield connection, connection.execute(_lock_run, {"run_id": run_id}).one_or_none()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that may write: new runs, or several whose rows it locks in the order of their ids."""
        with self._transaction(self._begin_writing) as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A transaction that only reads: all its statements see the same moment."""
        begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" if self.is_postgresql else "BEGIN"
        with self._transaction(begin) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """For single statements that only read: no transaction around them."""
        with translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def raw(self) -> Iterator[Any]:
        """The driver's own connection, in autocommit mode, for statements that are run too often for more."""
        with translated():
            connection = self.engine.raw_connection()
            try:
                yield connection.driver_connection
            except Exception as error:
                if is_lost(error):
                    connection.invalidate(error)
                    self.engine.dispose()  # The others of the pool went with it, most likely.
                raise
            finally:
                connection.close()

    def load_driver(self) -> None:
        """Import the driver, and connect to nothing: what is forked from this process needn't import it again."""
        self._url.get_dialect().import_dbapi()

    def dispose(self) -> None:
        """Close this process's connections; the next use opens new ones."""
        engine = self._engines.pop(os.getpid(), None)
        if engine is not None:
            engine.dispose()

    @property
    def _begin_writing(self) -> str:
        # SQLite: a lock taken later can't wait, it fails at once.
        return "BEGIN ISOLATION LEVEL READ COMMITTED" if self.is_postgresql else "BEGIN IMMEDIATE"

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with translated(), self.engine.connect() as connection:
            connection.execution_options(begin_statement=begin)
            with connection.begin():
                yield connection

    def _make_engine(self) -> Engine:
        if not self.is_postgresql and not Path(self._url.database or "").parent.is_dir():
            raise SchemaError(f"there is no database {self._url.database} yet: run `agentq db upgrade`")
        engine = create_engine(
            self._url,
            isolation_level="AUTOCOMMIT",
            connect_args=self._connect_arguments(),
            pool_size=POOL_SIZE,
            max_overflow=POOL_OVERFLOW,
            pool_timeout=POOL_TIMEOUT_SECONDS,
        )
        event.listen(engine, "begin", _begin)
        event.listen(engine, "connect", _prepare_postgresql if self.is_postgresql else _prepare_sqlite)
        if self.is_postgresql:
            event.listen(engine, "checkin", _note_return)
            event.listen(engine, "checkout", _try_idle)
        return engine

    def _connect_arguments(self) -> dict[str, Any]:
        if not self.is_postgresql:
            return {"timeout": SQLITE_BUSY_SECONDS}
        options = " ".join(f"-c {name}={value}" for name, value in _POSTGRESQL_OPTIONS.items())
        return {
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "application_name": self._application_name,
            "options": f"{self._url.query.get('options', '')} {options}".strip(),
            # A peer that vanished without a word is noticed within half a minute.
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 4,
            "tcp_user_timeout": 30_000,
        }


def checked_url(url: str) -> URL:
    """The URL with the driver that we use. Raises ConfigurationError for a database that isn't supported."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigurationError("the database URL can't be read; give postgresql://... or sqlite:///FILE") from None
    match parsed.get_backend_name():
        case "postgresql":
            return parsed.set(drivername="postgresql+psycopg")
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return parsed.set(drivername="sqlite+pysqlite")
        case "sqlite":
            raise ConfigurationError("SQLite needs a file, because several processes share it: sqlite:///FILE")
        case other:
            raise ConfigurationError(f"the database {other!r} isn't supported; give postgresql://... or sqlite:///FILE")


def _begin(connection: Connection) -> None:
    begin = connection.get_execution_options().get("begin_statement")
    if begin is not None:
        connection.exec_driver_sql(begin)


def _prepare_postgresql(connection: "psycopg.Connection[Any]", _: ConnectionPoolEntry) -> None:
    from psycopg import Error  # noqa: PLC0415 - loaded by who made the connection, and not on SQLite

    try:
        # Or the statement of a killed client that waits for a lock is still executed, and committed, later.
        connection.execute("SET client_connection_check_interval = '2s'")
    except Error:
        connection.rollback()  # A server or platform that hasn't got it: statements end by their timeout.
    else:
        connection.commit()


def _note_return(_connection: object, record: ConnectionPoolEntry) -> None:
    record.info[_RETURNED_AT] = time.monotonic()


def _try_idle(connection: "psycopg.Connection[Any]", record: ConnectionPoolEntry, _proxy: object) -> None:
    """The server may have gone and come back meanwhile: the pool connects anew then, and nobody is told of a failure.
    A busy process asks nothing."""
    if time.monotonic() - record.info.get(_RETURNED_AT, time.monotonic()) < IDLE_SECONDS:
        return
    from psycopg import Error  # noqa: PLC0415 - loaded by who made the connection

    try:
        connection.execute("")
    except Error as error:
        raise DisconnectionError(str(error)) from error


def _prepare_sqlite(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    for pragma in _SQLITE_PRAGMAS:
        connection.execute(pragma)
