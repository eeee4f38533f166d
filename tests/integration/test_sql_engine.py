"""Connections and transactions as the databases see them: isolation, durability, forks, losses, refusals."""

import multiprocessing
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.errors import translation
from agentq.domain.errors import (
    AgentqError,
    AuditRefusedError,
    ConfigurationError,
    SchemaError,
    StoreRefusedError,
    StoreUnavailableError,
)
from agentq.domain.outcomes import Join, Recorded
from agentq.ports.steps import FenceRequest
from tests.support.databases import PostgresServer, fresh_postgresql, fresh_sqlite
from tests.support.stage import FIRST_CALL, PLAIN, READ, Stage


@pytest.fixture
def database() -> Iterator[Database]:
    with fresh_postgresql() as url:
        database = Database(url, application_name="engine test")
        yield database
        database.dispose()


def shown(database: Database, setting: str) -> str:
    with database.writing() as connection:
        value: str = connection.exec_driver_sql(f"SHOW {setting}").scalar_one()
        return value


def a_fence(stage: Stage, run_id: str) -> FenceRequest:
    return FenceRequest(
        ref=stage.ref(run_id, FIRST_CALL),
        id=f"fence of {run_id}",
        owner="host/boot/1-1/x",
        tool="pay",
        effect=PLAIN,
        deadline_seconds=30,
        settles_within_seconds=None,
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("transaction_isolation", "read committed"),
        ("synchronous_commit", "on"),
        ("statement_timeout", "20s"),
        ("lock_timeout", "10s"),
        ("idle_in_transaction_session_timeout", "20s"),
        ("client_connection_check_interval", "2s"),
        ("application_name", "engine test"),
    ],
)
def test_the_engine_sets_what_safety_rests_on(database: Database, setting: str, value: str) -> None:
    """Whatever the server's own defaults are: a fence that is forgotten is a write that runs twice."""
    database_name = database.engine.url.database
    with database.engine.connect() as connection:
        for default in ("default_transaction_isolation = 'serializable'", "synchronous_commit = off"):
            connection.exec_driver_sql(f"ALTER DATABASE {database_name} SET {default}")
    database.dispose()
    assert shown(database, setting) == value


def test_sqlite_waits_for_its_turn_and_keeps_what_it_committed(tmp_path: Path) -> None:
    """Several processes write to one file; and a commit survives a crash of the machine."""
    with fresh_sqlite(tmp_path) as url:
        database = Database(url)
        with database.reading() as connection:
            pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
            values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas]
        assert values == ["wal", 2, 1, 30_000]
        database.dispose()


def test_a_forked_process_has_connections_of_its_own(database: Database) -> None:
    """A connection that two processes share mixes up their replies."""
    own = backend(database)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(backend(database)))
    child.start()
    assert receiver.poll(10)
    assert receiver.recv() != own
    child.join(10)
    assert backend(database) == own


def backend(database: Database) -> int:
    with database.reading() as connection:
        number: int = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        return number


def test_a_lost_connection_is_told_and_replaced() -> None:
    """A caller learns that nothing is known of its change; asking again, after the server is back, finds out."""
    server = PostgresServer().create().start()
    try:
        from_template(server)
        stage = Stage(database=Database(server.url("agentq")))
        run_id = stage.asked(PLAIN)
        request = a_fence(stage, run_id)
        server.stop()
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                stage.steps.fence(request)
            with pytest.raises(StoreUnavailableError):
                stage.runs.status(run_id)
        server.start()
        assert stage.steps.fence(request) == "stamped"
        stage.database.dispose()
    finally:
        server.remove()


def from_template(server: PostgresServer) -> None:
    from agentq.adapters.sql.migration import upgrade

    server.execute("CREATE DATABASE agentq")
    upgrade(server.url("agentq"))


def test_a_connection_that_was_cut_in_the_pool_fails_one_call(database: Database) -> None:
    """The pool is emptied with it: the second try isn't spent on the next dead connection."""
    stage = Stage(database=database)
    run_id = stage.asked(READ)
    with database.reading() as one, database.reading() as another:
        one.exec_driver_sql("SELECT 1"), another.exec_driver_sql("SELECT 1")
    with psycopg.connect(database.engine.url.set(drivername="postgresql").render_as_string(), autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'engine test'")
    with pytest.raises(StoreUnavailableError):
        stage.steps.load(stage.ref(run_id, FIRST_CALL))
    assert stage.steps.load(stage.ref(run_id, FIRST_CALL)) is not None


BREAKAGES = {
    "dropped": "ALTER TABLE events RENAME TO kept_events",
    "refused by a rule of its own": "ALTER TABLE events ADD CHECK (kind = 'run.enqueued') NOT VALID",
    "read-only": "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the audit log is closed'; END $$; "
    "CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION refuse()",
}


@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES)
def test_the_functions_tell_a_refused_event_from_a_refused_change(database: Database, breakage: str) -> None:
    """What only reads may be settled without its event; nothing may be without its result."""
    stage = Stage(database=database)
    fenced, read = stage.asked(PLAIN), stage.asked(READ)
    with database.writing() as connection:
        connection.exec_driver_sql(breakage)
    with pytest.raises(AuditRefusedError):
        stage.steps.fence(a_fence(stage, fenced))
    with pytest.raises(AuditRefusedError):
        stage.settle(read, FIRST_CALL, Recorded(result=1, then=Join()))
    assert stage.runs.run(fenced).pending_effect is None


def test_a_locked_audit_log_is_a_refused_event(database: Database) -> None:
    """A read's run must not wait for whoever locked it."""
    stage = Stage(database=database)
    read = stage.asked(READ)
    ref = stage.ref(read, FIRST_CALL)
    with database.raw() as connection:
        connection.execute("SET lock_timeout = '50ms'")  # The pool's one connection, and the next user's.
    with psycopg.connect(database.engine.url.set(drivername="postgresql").render_as_string()) as locker:
        locker.execute("LOCK TABLE events IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(AuditRefusedError):
            stage.settle(read, FIRST_CALL, Recorded(result=1, then=Join()))
    assert stage.steps.load(ref) is not None


def test_a_locked_run_is_a_database_that_can_not_do_it_now(database: Database) -> None:
    """The same owner may try again: nothing was changed."""
    stage = Stage(database=database)
    read = stage.asked(READ)
    with database.raw() as connection:
        connection.execute("SET lock_timeout = '50ms'")
    with psycopg.connect(database.engine.url.set(drivername="postgresql").render_as_string()) as locker:
        locker.execute("SELECT FROM runs WHERE id = %s FOR UPDATE", [read])
        with pytest.raises(StoreUnavailableError):
            stage.complete(read, FIRST_CALL)
    assert stage.complete(read, FIRST_CALL).wakeups


def sqlite_error(code: int, message: str = "failed") -> sqlite3.Error:
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.OperationalError("server closed the connection unexpectedly"), StoreUnavailableError),
        (psycopg.errors.AdminShutdown(), StoreUnavailableError),
        (psycopg.errors.DeadlockDetected(), StoreUnavailableError),
        (psycopg.errors.LockNotAvailable(), StoreUnavailableError),
        (psycopg.errors.QueryCanceled(), StoreUnavailableError),
        (psycopg.errors.DiskFull(), StoreUnavailableError),
        (psycopg.errors.ReadOnlySqlTransaction(), StoreUnavailableError),
        (psycopg.errors.UndefinedTable(), SchemaError),
        (psycopg.errors.UndefinedFunction(), SchemaError),
        (psycopg.errors.NotNullViolation(), StoreRefusedError),
        (psycopg.errors.ProgramLimitExceeded(), StoreRefusedError),
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), StoreRefusedError),
        (sqlite_error(sqlite3.SQLITE_BUSY), StoreUnavailableError),
        (sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), StoreUnavailableError),
        (sqlite_error(sqlite3.SQLITE_IOERR), StoreUnavailableError),
        (sqlite_error(sqlite3.SQLITE_FULL), StoreUnavailableError),
        (sqlite_error(sqlite3.SQLITE_ERROR, "no such table: runs"), SchemaError),
        (sqlite_error(sqlite3.SQLITE_TOOBIG), StoreRefusedError),
        (sqlite_error(sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY), StoreRefusedError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_driver_s_error_says_what_the_caller_should_do(error: Exception, expected: type[AgentqError]) -> None:
    """Try again, give the data up, or call for an operator: callers decide by nothing else."""
    assert type(translation(error)) is expected


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "nonsense"])
def test_a_database_that_can_not_work_is_refused_at_once(url: str) -> None:
    """A clear line at the start, not a strange failure later."""
    with pytest.raises(ConfigurationError):
        Database(url)


def test_a_block_that_raises_leaves_nothing_behind(database: Database) -> None:
    """A change is made whole or not at all."""
    stage = Stage(database=database)
    run_id = stage.queued()

    def break_off() -> Any:
        with database.locked(run_id) as (connection, _):
            connection.execute(text("UPDATE runs SET error = 'half done'"))
            raise LookupError

    with pytest.raises(LookupError):
        break_off()
    assert stage.runs.run(run_id).error is None


def test_the_driver_is_loaded_before_a_fork_and_connects_to_nothing() -> None:
    """Each pool child would import it again otherwise, and hold a copy of its own."""
    code = (
        "import sys; from agentq.adapters.sql.engine import Database; database = Database('postgresql://nowhere/x'); "
        "assert 'psycopg' not in sys.modules; database.load_driver(); assert 'psycopg' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
