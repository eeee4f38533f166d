"""`agentq db`: prepare the database."""

import click

from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import say

_COMMANDS = {
    "upgrade": LazyCommand("agentq.cli.db:upgrade", "Bring the schema to this version; safe to repeat."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def db() -> None:
    """Prepare the database."""


@click.command()
def upgrade() -> None:
    """Bring the schema of AGENTQ_DATABASE_URL to this version. Safe to repeat, and to run while older workers work."""
    from agentq.adapters.sql.migration import upgrade as upgrade_schema  # noqa: PLC0415 - alembic takes its time
    from agentq.config.settings import load_settings  # noqa: PLC0415

    upgrade_schema(load_settings().effective_database_url)
    say("the database is up to date")
