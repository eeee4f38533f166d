"""What fault tests share: one deployment a module, and the check that each test ends with."""

from collections.abc import Iterator

import pytest

from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.proxy import PostgresProxy
from tests.support.system import System
from tests.support.workers import WorkerProcess


@pytest.fixture(scope="module", params=["postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A database, Valkey, receiver and keeper. A module for other databases says so: `pytest.mark.parametrize(
    "deployment", ["sqlite", "postgresql"], indirect=True, scope="module")`."""
    folder = tmp_path_factory.mktemp("deployment")
    database = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
    with database as url, System(folder, url) as system:
        system.keeper()
        yield system


@pytest.fixture(scope="module")
def proxy() -> Iterator[PostgresProxy]:
    """For a module whose deployment reaches its database, or a part of it does, through something that can fail."""
    with fresh_postgresql() as url, PostgresProxy(url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def workers(deployment: System) -> list[WorkerProcess]:
    """A model worker and a tools worker, for the tests of a module that leave them alive."""
    return deployment.workers("model", "tools")


@pytest.fixture
def system(deployment: System) -> Iterator[System]:
    """The module's deployment. Processes that the test starts end with it; then every run must have ended, and every
    invariant hold."""
    before = list(deployment.processes)
    yield deployment
    deployment.receiver.release_all()
    try:
        deployment.check()
    finally:
        deployment.stop_all_but(before)
        deployment.broker.forget_in_hand()  # What dead workers had, or drained queues would be waited for in vain.
