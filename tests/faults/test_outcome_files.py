"""Files that hold outcomes of writes: whatever else lies there, and wherever they can't be written, nothing is lost."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.audit_log import OUTCOMES, refusing
from tests.support.system import System, call
from tests.support.waiting import eventually
from tests.support.workers import KeeperProcess, WorkerProcess


@pytest.fixture(scope="module")
def keepers(deployment: System) -> list[KeeperProcess]:
    """Two, which heal the same folder."""
    return [*(each for each in deployment.processes if isinstance(each, KeeperProcess)), deployment.keeper()]


@pytest.fixture(scope="module")
def model_worker(deployment: System) -> WorkerProcess:
    return deployment.worker("model")


@pytest.fixture
def folder(system: System) -> Iterator[Path]:
    """Where this deployment's outcomes are kept. Afterwards none may be left."""
    folder = system.settings.home / "outcomes" / system.wiring.deployment
    yield folder
    eventually(lambda: not list(folder.glob("*.json")), what="every outcome is brought home")


@pytest.mark.usefixtures("model_worker")
def test_many_outcomes_and_two_healers_make_one_result_each(
    system: System, folder: Path, keepers: list[KeeperProcess]
) -> None:
    """The second finds what the first has recorded; no outcome contradicts itself."""
    system.worker("tools", tools_concurrency=4)
    names = [f"kept {number}" for number in range(8)]
    run_ids = [system.enqueue([call("pay", name)]) for name in names]
    with refusing(system.database, *OUTCOMES):
        for run_id in run_ids:
            system.stops_as_unknown(run_id)
        assert len(list(folder.glob("*.json"))) == len(names)
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for run_id in run_ids:
        assert not system.eventually_completes(run_id).has_contradiction
    assert {len(system.receiver.requests(name)) for name in names} == {1}


@pytest.mark.usefixtures("model_worker")
def test_what_isnt_an_outcome_is_set_aside_with_a_line_and_stops_no_other(
    system: System, folder: Path, keepers: list[KeeperProcess]
) -> None:
    """A truncated, altered or foreign file must neither be believed nor deleted, nor hold up the others."""
    system.worker("tools")
    run_id = system.enqueue([call("pay", "beside odd files")])
    with refusing(system.database, *OUTCOMES):
        system.stops_as_unknown(run_id)
        [kept] = folder.glob("*.json")
        text = kept.read_text()
        odd = {
            "truncated": text[: len(text) // 2],
            "altered": text.replace("paid", "owed"),
            "foreign": text.replace(system.wiring.deployment, "another"),
            "of the next version": json.dumps({**json.loads(text), "version": 2}),
            "no object": "[]",
            "empty": "",
        }
        for name, content in odd.items():
            (folder / f"{name}.json").write_text(content)
        for name in odd:
            eventually((folder / f"{name}.json.rejected").exists, what=f"{name} is set aside")
    system.eventually_completes(run_id)
    log = "".join(keeper.log() for keeper in keepers)
    for name, content in odd.items():
        assert (folder / f"{name}.json.rejected").read_text() == content
        assert log.count(f"{name}.json.rejected") == 1


@pytest.mark.usefixtures("model_worker")
def test_an_outcome_that_no_file_takes_leaves_its_write_unknown(system: System, tmp_path: Path) -> None:
    """A full disk under the file is the end of the machine's means: a person is told, and one line says why."""
    (tmp_path / "outcomes").write_text("not a folder")
    worker = system.worker("tools", home=tmp_path)
    run_id = system.enqueue([call("pay", "nowhere to keep")])
    with refusing(system.database, *OUTCOMES):
        system.stops_as_unknown(run_id)
    assert worker.log().count("lost an outcome, its fence stays") == 1
    assert len(system.receiver.requests("nowhere to keep")) == 1
