"""The filter grammar as conditions of statements: one meaning for runs and for dead letters."""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Text, exists
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from agentq.adapters.sql.schema import dead_letters, runs, steps
from agentq.ports.runs import RunFilter


class metadata_text(FunctionElement[str]):
    """The text under that key of a metadata column; null where there is none. The key may hold any character."""

    type = Text()
    inherit_cache = True

    def __init__(self, column: ColumnElement[Any], key: str) -> None:
        super().__init__(column, key)


@compiles(metadata_text, "postgresql")
def _metadata_text_postgresql(element: metadata_text, compiler: SQLCompiler, **options: Any) -> str:
    column, key = (compiler.process(part, **options) for part in element.clauses)
    return f"({column} ->> CAST({key} AS text))"


@compiles(metadata_text, "sqlite")
def _metadata_text_sqlite(element: metadata_text, compiler: SQLCompiler, **options: Any) -> str:
    column, key = (compiler.process(part, **options) for part in element.clauses)
    return f"(SELECT CAST(value AS TEXT) FROM json_each({column}) WHERE key = {key})"


def run_conditions(filters: RunFilter) -> Iterator[ColumnElement[bool]]:
    """For a statement over `runs`. What only dead letters have is asked of a run's open one."""
    yield from _of_runs(filters)
    if filters.since is not None:
        yield runs.c.created_at >= filters.since
    if filters.until is not None:
        yield runs.c.created_at < filters.until
    if filters.tool is not None:
        yield exists().where(steps.c.run_id == runs.c.id, steps.c.tool == filters.tool)
    of_its_dead_letter = list(_of_dead_letters(filters))
    if of_its_dead_letter:
        yield _has_open_dead_letter(*of_its_dead_letter)
    if filters.outcome_unknown is not None:
        in_doubt = _has_open_dead_letter(dead_letters.c.outcome_unknown)
        yield in_doubt if filters.outcome_unknown else ~in_doubt


def dead_letter_conditions(filters: RunFilter) -> Iterator[ColumnElement[bool]]:
    """For a statement over `dead_letters`, joined with `runs` if `asks_of_runs`: times are the dead letter's, the tool
    is its step's."""
    if filters.statuses:
        yield runs.c.status.in_([status.value for status in filters.statuses])
    if filters.agent is not None:
        yield dead_letters.c.agent == filters.agent
    yield from _of_metadata(filters)
    yield from _of_dead_letters(filters)
    if filters.since is not None:
        yield dead_letters.c.created_at >= filters.since
    if filters.until is not None:
        yield dead_letters.c.created_at < filters.until
    if filters.outcome_unknown is not None:
        yield dead_letters.c.outcome_unknown.is_(filters.outcome_unknown)
    if filters.tool is not None:
        yield dead_letters.c.tool == filters.tool


def asks_of_runs(filters: RunFilter) -> bool:
    """Conditions on dead letters need their runs' rows as well."""
    return bool(filters.statuses or filters.metadata)


def _of_runs(filters: RunFilter) -> Iterator[ColumnElement[bool]]:
    if filters.statuses:
        yield runs.c.status.in_([status.value for status in filters.statuses])
    if filters.agent is not None:
        yield runs.c.agent == filters.agent
    yield from _of_metadata(filters)


def _of_metadata(filters: RunFilter) -> Iterator[ColumnElement[bool]]:
    for key, text in (filters.metadata or {}).items():
        yield metadata_text(runs.c.metadata, key) == text


def _of_dead_letters(filters: RunFilter) -> Iterator[ColumnElement[bool]]:
    if filters.reason is not None:
        yield dead_letters.c.reason == filters.reason.value
    if filters.failure_class is not None:
        yield dead_letters.c.failure_class == filters.failure_class.value
    if filters.fingerprint is not None:
        yield dead_letters.c.fingerprint == filters.fingerprint


def _has_open_dead_letter(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists().where(dead_letters.c.run_id == runs.c.id, dead_letters.c.closed_at.is_(None), *conditions)
