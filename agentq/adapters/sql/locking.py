"""Changing steps of many runs at once: their rows are locked first, in the order of their ids."""

from collections.abc import Sequence

from sqlalchemy import Connection, Integer, Text, column, select, tuple_, values
from sqlalchemy.sql.expression import ColumnElement

from agentq.adapters.sql.schema import runs, steps
from agentq.domain.model import StepRef


def lock_runs_of(connection: Connection, refs: Sequence[StepRef]) -> None:
    """Hold the runs of these steps. One order for everybody, or two batches would wait for each other for ever."""
    run_ids = {ref.run_id for ref in refs}
    connection.execute(
        select(runs.c.id).where(runs.c.id.in_(run_ids)).order_by(runs.c.id).with_for_update(key_share=True)
    )


def is_one_of(refs: Sequence[StepRef]) -> ColumnElement[bool]:
    """The step is one of these, at that attempt."""
    # A joined table: as a list of alternatives, planning it would take longer than all the rest.
    wanted = (
        values(column("run_id", Text), column("number", Integer), column("attempt", Integer), name="wanted")
        .data([(ref.run_id, ref.number, ref.attempt) for ref in refs])
        .cte()
    )
    return tuple_(steps.c.run_id, steps.c.number, steps.c.attempt).in_(select(wanted))
