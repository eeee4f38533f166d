"""One database for all simulations of a module: each begins by emptying it."""

import logging
from collections.abc import Iterator

import pytest

from agentq.adapters.sql.engine import Database
from tests.support.databases import fresh_sqlite
from tests.support.simulated_world import Time, run_on


@pytest.fixture(scope="module")
def time() -> Time:
    return Time()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, time: Time) -> Iterator[Database]:
    logger = logging.getLogger("agentq")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # Thousands of crashes are told by the move that made them.
    with fresh_sqlite(tmp_path_factory.mktemp("simulation")) as url:
        database = Database(url)
        run_on(time, database)
        yield database
        database.dispose()
    logger.setLevel(level)
