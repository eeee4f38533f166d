"""Brings a database's schema up to date, and refuses to work on one that isn't."""

from pathlib import Path

from sqlalchemy import inspect, select

from agentq.adapters.sql.engine import Database, checked_url
from agentq.adapters.sql.errors import translated
from agentq.adapters.sql.schema import VERSION, deployment
from agentq.domain.errors import SchemaError

VERSION_TABLE = "agentq_schema"  # Alembic's own name is taken in a database that is shared with another program.


def upgrade(url: str) -> None:
    """Bring the schema to this code's version; may be called any number of times, by several processes at once."""
    from alembic import command  # noqa: PLC0415 - every worker and keeper checks the schema, and none migrates it
    from alembic.config import Config  # noqa: PLC0415

    parsed = checked_url(url)
    if parsed.get_backend_name() == "sqlite":
        Path(parsed.database or "").parent.mkdir(parents=True, exist_ok=True)
    database = Database(url, application_name="agentq db upgrade")
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    try:
        with database.writing() as connection:
            if database.is_postgresql:
                # One at a time: the others find it done.
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('agentq db upgrade'))")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        database.dispose()


def check(url: str) -> str:
    """The deployment's id. Raises SchemaError that says what to run when this code can't work on the schema."""
    database = Database(url, application_name="agentq")
    try:
        return deployment_id(database)
    finally:
        database.dispose()


def deployment_id(database: Database) -> str:
    """Like `check`, over an open database."""
    with translated(), database.reading() as connection:
        row = None
        if inspect(connection).has_table(deployment.name):
            row = connection.execute(select(deployment)).one_or_none()
    if row is None:
        raise SchemaError("the database has no schema yet: run `agentq db upgrade`")
    if row.version < VERSION:
        raise SchemaError(f"the database's schema is at version {row.version}, this agentq needs {VERSION}: "
                          "run `agentq db upgrade`")  # fmt: skip
    if row.oldest_code_version > VERSION:
        raise SchemaError(
            f"the database's schema admits agentq from schema version {row.oldest_code_version} on, this one knows "
            f"{VERSION}: install a newer agentq"
        )
    identity: str = row.id
    return identity
