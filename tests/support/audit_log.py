"""An audit log that refuses events, as when its disk is full, and one that its owner tampers with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentq.adapters.sql.engine import Database

OUTCOMES = ("step.settled", "outcome.late")  # The kinds of event that hold what became of a call.


@contextmanager
def refusing(database: Database, *kinds: str) -> Iterator[None]:
    """Inside, the audit log takes no events of these kinds."""
    of_these = f"NEW.kind IN ({', '.join(repr(kind) for kind in kinds)})"
    if database.is_postgresql:
        make = f"""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'the log is full'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW WHEN ({of_these})
            EXECUTE FUNCTION refuse()
        """
        drop = "DROP FUNCTION refuse CASCADE"
    else:
        make = f"""
            CREATE TRIGGER refuse BEFORE INSERT ON events WHEN {of_these}
            BEGIN SELECT RAISE(ABORT, 'the log is full'); END
        """
        drop = "DROP TRIGGER refuse"
    _execute(database, make)
    try:
        yield
    finally:
        _execute(database, drop)


@contextmanager
def tampering(database: Database) -> Iterator[Callable[[str], None]]:
    """As whoever owns the database can: what refuses is away while statements are executed, and back afterwards."""
    if database.is_postgresql:
        switch = "ALTER TABLE events {0} TRIGGER USER; ALTER TABLE seals {0} TRIGGER USER"
        _execute(database, switch.format("DISABLE"))
        yield lambda statement: _execute(database, statement)
        _execute(database, switch.format("ENABLE"))
        return
    with database.reading() as connection:
        made = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").all()
    for trigger in made:
        _execute(database, f"DROP TRIGGER {trigger.name}")
    yield lambda statement: _execute(database, statement)
    for trigger in made:
        _execute(database, trigger.sql)


def _execute(database: Database, statement: str) -> None:
    with database.writing() as connection:
        connection.exec_driver_sql(statement)
