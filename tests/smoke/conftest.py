"""The nodes of the smoke tests: pytest-celery's fixtures, over processes or containers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_celery import CeleryBrokerCluster, CeleryTestBroker, CeleryTestWorker, CeleryWorkerCluster

from agentq.config.settings import Settings
from tests.support import smoke_agents
from tests.support.celery_nodes import Machine, machine


@pytest.fixture
def agents_folder(tmp_path: Path) -> Path:
    """Where the workers find the agents' module, and where its tool writes."""
    shutil.copy(smoke_agents.__file__, tmp_path / "agents_here.py")
    return tmp_path


@pytest.fixture
def nodes(agents_folder: Path) -> Iterator[Machine]:
    found = machine(agents_folder, Settings(agents=("agents_here",), tools_concurrency=2, model_concurrency=4))
    yield found
    found.close()


@pytest.fixture
def celery_broker(nodes: Machine) -> Iterator[CeleryTestBroker]:
    node = CeleryTestBroker(nodes.broker())
    yield node
    node.teardown()


@pytest.fixture
def celery_broker_cluster(celery_broker: CeleryTestBroker) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(celery_broker)


@pytest.fixture
def celery_backend() -> None:
    """State lives in SQL: there is no result backend."""


@pytest.fixture
def celery_backend_cluster(celery_backend: None) -> None:
    return None


@pytest.fixture
def celery_worker(nodes: Machine, celery_broker: CeleryTestBroker) -> Iterator[CeleryTestWorker]:
    """The tools worker; a broker runs before it starts."""
    node = CeleryTestWorker(nodes.worker("tools"), app=None)
    yield node
    node.teardown()


@pytest.fixture
def model_worker(nodes: Machine, celery_broker: CeleryTestBroker) -> Iterator[CeleryTestWorker]:
    node = CeleryTestWorker(nodes.worker("model"), app=None)
    yield node
    node.teardown()


@pytest.fixture
def celery_worker_cluster(celery_worker: CeleryTestWorker, model_worker: CeleryTestWorker) -> CeleryWorkerCluster:
    cluster = CeleryWorkerCluster(celery_worker, model_worker)
    cluster.ready()
    return cluster
