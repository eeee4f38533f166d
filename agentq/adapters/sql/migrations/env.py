"""Alembic's entry: runs the migrations over the connection, and in the transaction, of whoever called."""

from alembic import context

from agentq.adapters.sql.migration import VERSION_TABLE
from agentq.adapters.sql.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=False,
)
context.run_migrations()
