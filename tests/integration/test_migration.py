"""The schema comes up to date by migrations alone, and code refuses to work on one that doesn't fit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.migration import VERSION_TABLE, check, upgrade
from agentq.adapters.sql.schema import VERSION, metadata
from agentq.domain.errors import SchemaError
from tests.support.databases import fresh_postgresql, fresh_sqlite, postgresql_server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql() as url:
        yield url


def change(url: str, statement: str) -> None:
    database = Database(url)
    with database.writing() as connection:
        connection.exec_driver_sql(statement)
    database.dispose()


def test_the_migrations_make_the_tables_that_the_code_names(url: str) -> None:
    """Both are written by hand; one that was forgotten shows here."""
    database = Database(url)
    with database.engine.connect() as connection:
        only_here = {None, connection.dialect.name}
        options = {
            "version_table": VERSION_TABLE,
            "include_object": lambda each, *_: each.info.get("only_on") in only_here,
        }
        context = MigrationContext.configure(connection, opts=options)
        differences = compare_metadata(context, metadata)
    database.dispose()
    assert differences == []


def test_an_upgrade_may_be_run_again(url: str) -> None:
    """Every start of a deployment runs it; the deployment stays the same one."""
    deployment = check(url)
    upgrade(url)
    assert check(url) == deployment


def test_several_upgrades_at_once_make_one_schema(tmp_path: Path) -> None:
    """Replicas of one release start together."""
    server = postgresql_server()
    server.execute("CREATE DATABASE upgraded_at_once")
    for url in (f"sqlite:///{tmp_path / 'new folder' / 'agentq.db'}", server.url("upgraded_at_once")):
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(upgrade, [url] * 3)) == [None] * 3
        assert check(url)
    server.execute("DROP DATABASE upgraded_at_once WITH (FORCE)")


def test_a_database_without_a_schema_is_refused(tmp_path: Path) -> None:
    """The message says what to run."""
    with pytest.raises(SchemaError, match="run `agentq db upgrade`"):
        check(f"sqlite:///{tmp_path / 'empty.db'}")


def test_an_older_schema_is_refused(url: str) -> None:
    """A worker that meets it stops at the start, not at its first statement."""
    change(url, f"UPDATE deployment SET version = {VERSION - 1}")
    with pytest.raises(SchemaError, match="run `agentq db upgrade`"):
        check(url)


def test_a_newer_schema_says_how_old_the_code_may_be(url: str) -> None:
    """Rolling deploys: the last release runs on the next one's schema until that says otherwise."""
    change(url, f"UPDATE deployment SET version = {VERSION + 1}")
    assert check(url)
    change(url, f"UPDATE deployment SET oldest_code_version = {VERSION + 1}")
    with pytest.raises(SchemaError, match="install a newer agentq"):
        check(url)
