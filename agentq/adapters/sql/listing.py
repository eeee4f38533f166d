"""Reading dead letters: one by one, by what they have in common, and page by page for whoever decides about many."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, case, exists, func, select

from agentq.adapters.sql.conditions import asks_of_runs, dead_letter_conditions
from agentq.adapters.sql.rows import dead_letter_from
from agentq.adapters.sql.schema import dead_letters, runs
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetter, DeadLetterGroup, DeadLetterReason
from agentq.ports.runs import RunFilter

GROUPS_MAX = 1000  # Far more than a person reads; an endless variety of errors mustn't become an endless answer.

_is_open = dead_letters.c.closed_at.is_(None)
_contradicted = select(runs.c.id).where(runs.c.has_contradiction).subquery("contradicted")  # Few, by an index.
_is_contradicted = exists().where(_contradicted.c.id == dead_letters.c.run_id)


def open_dead_letters(connection: Connection, filters: RunFilter) -> list[DeadLetter]:
    """Those with a contradiction first, then newest first; up to the filter's limit."""
    newest_first = (
        _of_open(filters, dead_letters)
        .order_by(dead_letters.c.created_at.desc(), dead_letters.c.id.desc())
        .limit(filters.limit)
    )
    # Two questions, or all that are open would have to be sorted for the first few.
    first = connection.execute(newest_first.where(_is_contradicted)).mappings().all()
    rest = connection.execute(newest_first.where(~_is_contradicted)).mappings().all()
    listed = [_listed(row, has_contradiction=True) for row in first]
    listed += [_listed(row, has_contradiction=False) for row in rest]
    return listed[: filters.limit]


def grouped_dead_letters(connection: Connection, filters: RunFilter) -> list[DeadLetterGroup]:
    """Those with a contradiction first, then the largest."""
    kind = (dead_letters.c.tool, dead_letters.c.failure_class, dead_letters.c.reason, dead_letters.c.fingerprint)
    grouped = (
        _of_open(
            filters,
            *kind,
            func.count().label("count"),
            func.sum(_one_if(dead_letters.c.outcome_unknown)).label("unknown_count"),
            func.count(_contradicted.c.id).label("contradicted_count"),
            func.min(dead_letters.c.created_at, type_=dead_letters.c.created_at.type).label("oldest_at"),
            func.max(dead_letters.c.created_at, type_=dead_letters.c.created_at.type).label("newest_at"),
            func.max(dead_letters.c.id).label("newest_id"),
        )
        .outerjoin(_contradicted, _contradicted.c.id == dead_letters.c.run_id)
        .group_by(*kind)
        .subquery("grouped")
    )
    largest_first = (
        select(grouped, dead_letters.c.error, dead_letters.c.run_id)
        .join_from(grouped, dead_letters, dead_letters.c.id == grouped.c.newest_id)
        .order_by(_one_if(grouped.c.contradicted_count > 0).desc(), grouped.c.count.desc(), grouped.c.newest_at.desc())
        .limit(GROUPS_MAX)
    )
    return [_group_from(row) for row in connection.execute(largest_first).mappings()]


def count_of_open(connection: Connection, filters: RunFilter) -> tuple[int, int]:
    """How many are open that match, and the highest number of any that is."""
    found = connection.execute(_of_open(filters, func.count(), func.max(dead_letters.c.id))).one()
    return found[0], found[1] or 0


def page_of_open(
    connection: Connection, filters: RunFilter, *, after: str, number_max: int, limit: int
) -> Sequence[str]:
    """The next runs whose open one matches, in the order of their ids, without those that came after that number."""
    page = (
        _of_open(filters, dead_letters.c.run_id)
        .where(dead_letters.c.run_id > after, dead_letters.c.id <= number_max)
        .order_by(dead_letters.c.run_id)
        .limit(limit)
    )
    return connection.execute(page).scalars().all()


def _of_open(filters: RunFilter, *columns: Any) -> Select[Any]:
    selected = select(*columns).select_from(dead_letters)
    if asks_of_runs(filters):
        selected = selected.join(runs, runs.c.id == dead_letters.c.run_id)
    return selected.where(_is_open, *dead_letter_conditions(filters))


def _one_if(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return case((condition, 1), else_=0)


def _listed(row: RowMapping, *, has_contradiction: bool) -> DeadLetter:
    return replace(dead_letter_from(row), has_contradiction=has_contradiction)


def _group_from(row: RowMapping) -> DeadLetterGroup:
    return DeadLetterGroup(
        tool=row["tool"],
        failure_class=FailureClass(row["failure_class"]),
        reason=DeadLetterReason(row["reason"]),
        fingerprint=row["fingerprint"],
        count=row["count"],
        unknown_count=row["unknown_count"],
        contradicted_count=row["contradicted_count"],
        oldest_at=row["oldest_at"],
        newest_at=row["newest_at"],
        error=row["error"],
        run_id=row["run_id"],
    )
