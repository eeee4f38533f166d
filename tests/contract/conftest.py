"""What every store is tested on: SQLite and PostgreSQL, each test on a database of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentq.adapters.sql.engine import Database
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.stage import Stage


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    fresh = fresh_sqlite(tmp_path) if request.param == "sqlite" else fresh_postgresql()
    with fresh as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.dispose()


@pytest.fixture
def stage(database: Database) -> Stage:
    return Stage(database=database)


@pytest.fixture
def postgresql_stage() -> Iterator[Stage]:
    """For tests of what happens between two connections: SQLite lets only one write at a time."""
    with fresh_postgresql() as url:
        database = Database(url)
        yield Stage(database=database)
        database.dispose()
