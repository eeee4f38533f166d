"""`agentq db`: prepare the database."""

import click

from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import say
from agentq.domain.errors import ConfigurationError

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

    url = load_settings().effective_database_url
    try:
        upgrade_schema(url)
    except OSError as error:
        raise ConfigurationError(f"the database's folder can't be made: {error}; set AGENTQ_DATABASE_URL") from None
    say("the database is up to date")
