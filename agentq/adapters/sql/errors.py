"""Turns what the databases' drivers raise into our errors: the one place that knows their codes."""

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import sqlalchemy.exc

from agentq.domain.errors import (
    AgentqError,
    AuditRefusedError,
    SchemaError,
    StoreRefusedError,
    StoreUnavailableError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    import psycopg

# Classes and codes of SQLSTATE that pass by themselves, or that say nothing about the data we sent.
_UNAVAILABLE_CLASSES = ("08", "40", "53", "57", "58", "F0", "XX")
_UNAVAILABLE_STATES = (
    "25006",  # read-only transaction: a replica after a failover
    "55P03",  # lock not available in time
    "25P03",  # idle in a transaction for too long
    "25P04",  # transaction timeout
)
_LOST_CLASSES = ("08", "57P0")  # The connection went with it: nothing is known of the statement.
_MISSING_STATES = ("42P01", "42703", "42883", "3F000")  # table, column, function, schema

_SQLITE_REFUSED = (
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
)
# An event is refused for these too: the rest of the transaction could be stored.
_SQLITE_AUDIT_REFUSED = (*_SQLITE_REFUSED, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FULL)


_RAISED = (
    sqlalchemy.exc.SQLAlchemyError,
    sqlite3.Error,
    OverflowError,  # SQLite's driver: an integer that no column can hold.
    UnicodeEncodeError,  # Half of a surrogate pair, in a name.
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises StoreUnavailableError, StoreRefusedError, AuditRefusedError or SchemaError for a driver's error."""
    try:
        yield
    except Exception as error:
        if not _is_raised_by_driver(error):
            raise
        raise translation(error) from error


@contextmanager
def auditing() -> Iterator[None]:
    """Around the insert of an audit event: what refuses it, short of a lost connection, is AuditRefusedError."""
    try:
        yield
    except Exception as error:
        if not _is_raised_by_driver(error):
            raise
        raise translation(error, is_event=True) from error


def translation(error: Exception, *, is_event: bool = False) -> AgentqError:
    """Our error for a driver's. `is_event`: raised by the insert of an audit event alone."""
    original = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    if _is_of_psycopg(original):
        return _from_postgresql(original, is_event)
    match original:
        case sqlite3.Error():
            return _from_sqlite(original, is_event)
        case sqlalchemy.exc.TimeoutError():
            return StoreUnavailableError("no connection to the database became free in time")
        case sqlalchemy.exc.DBAPIError() | OverflowError() | UnicodeEncodeError():
            return StoreRefusedError(f"the database refused the change: {_line(original)}")
        case _:
            return StoreRefusedError(f"the statement is wrong: {_line(error)}")


def is_lost(error: Exception) -> bool:
    """The connection is of no use any more."""
    original = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    if not _is_of_psycopg(original):
        return False
    if original.sqlstate:
        return original.sqlstate.startswith(_LOST_CLASSES)
    return isinstance(original, sys.modules["psycopg"].OperationalError)


def _is_raised_by_driver(error: Exception) -> bool:
    return isinstance(error, _RAISED) or _is_of_psycopg(error)


def _is_of_psycopg(error: BaseException | None) -> "TypeGuard[psycopg.Error]":
    # Not imported, because it takes a sixth of a list's time on SQLite: what it raised was raised when it was loaded.
    driver = sys.modules.get("psycopg")
    return driver is not None and isinstance(error, driver.Error)


def _from_postgresql(error: "psycopg.Error", is_event: bool) -> AgentqError:
    if error.pgconn is not None:  # Only of an attempt to connect.
        return StoreUnreachableError(f"the database can't be reached: {_line(error)}")
    if is_lost(error):
        return StoreUnavailableError(f"the database can't be reached, or its reply was lost: {_line(error)}")
    # The functions that settle and fence insert the event, and seal, themselves: then the context names the statement.
    inner = f"{error.diag.context or ''} {error.diag.internal_query or ''}"
    if is_event or "INSERT INTO events" in inner or "agentq_seal_1" in inner:
        return AuditRefusedError(f"the audit event could not be stored: {_line(error)}")
    state = error.sqlstate or ""
    if state.startswith(_UNAVAILABLE_CLASSES) or state in _UNAVAILABLE_STATES:
        return StoreUnavailableError(f"the database could not do it now: {_line(error)}")
    if state in _MISSING_STATES:
        return SchemaError(f"the database's schema is not the expected one ({_line(error)}): run `agentq db upgrade`")
    return StoreRefusedError(f"the database refused the change: {_line(error)}")


def _from_sqlite(error: sqlite3.Error, is_event: bool) -> AgentqError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if code is not None else None  # Extended codes hold their kind in the low byte.
    if is_event and primary in _SQLITE_AUDIT_REFUSED:
        return AuditRefusedError(f"the audit event could not be stored: {_line(error)}")
    if primary == sqlite3.SQLITE_ERROR and "no such" in str(error):
        return SchemaError(f"the database's schema is not the expected one ({_line(error)}): run `agentq db upgrade`")
    if primary is None or primary in _SQLITE_REFUSED or primary == sqlite3.SQLITE_ERROR:
        return StoreRefusedError(f"the database refused the change: {_line(error)}")
    return StoreUnavailableError(f"the database could not do it now: {_line(error)}")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
