"""What a purge may leave behind, and runs that are old enough for it."""

from datetime import timedelta

from sqlalchemy import func, select

from agentq.adapters.sql.deployment_log import DEPLOYMENT
from agentq.adapters.sql.engine import Database, now_plus
from agentq.adapters.sql.purging import OWNED
from agentq.adapters.sql.schema import purging, runs
from tests.support.stage import FIRST_CALL, READ, Stage

OLD = timedelta(days=31)


def orphans(database: Database) -> dict[str, int]:
    """Rows of runs that aren't there, by table; and what a purge left of itself."""
    counts = {}
    with database.reading() as connection:
        for table in (*OWNED, purging):
            is_of_nobody = table.c.run_id.not_in(select(runs.c.id)) & (table.c.run_id != DEPLOYMENT)
            counted = select(func.count()).select_from(table).where(is_of_nobody)
            counts[table.name] = connection.execute(counted).scalar_one()
    return {name: count for name, count in counts.items() if count}


def age(stage: Stage, run_id: str, by: timedelta = OLD) -> str:
    """As if it had ended that long ago."""
    stage.change_run(run_id, finished_at=now_plus(-by.total_seconds()))
    return run_id


def old(stage: Stage, by: timedelta = OLD) -> str:
    """A completed run of a read and an answer."""
    run_id = stage.asked(READ)
    stage.complete(run_id, FIRST_CALL)
    stage.answer(run_id, 3)
    return age(stage, run_id, by)
