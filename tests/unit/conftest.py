"""One SQLite database a module for unit tests that need a store: the real one doesn't lie."""

from collections.abc import Callable, Iterator

import pytest

from agentq.adapters.sql.engine import Database
from tests.support.databases import fresh_sqlite
from tests.support.invariants import check_invariants
from tests.support.spine import Spine, opened
from tests.support.stage import Stage


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with fresh_sqlite(tmp_path_factory.mktemp("store")) as url:
        database = Database(url)
        yield Stage(database=database)
        check_invariants(database)
        database.dispose()


@pytest.fixture
def make_spine(stage: Stage) -> Iterator[Callable[..., Spine]]:
    """Makes spines with the tools given."""
    with opened(stage) as make:
        yield make
