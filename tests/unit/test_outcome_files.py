"""Outcome files: durable, private, read back as they were written, and never believed when they weren't."""

import json
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.outcome_files import OutcomeFolder
from agentq.adapters.sql.purging import SqlPurgeStore
from agentq.domain.errors import AuditRefusedError, OutcomeNotKeptError, StoreUnavailableError
from agentq.domain.model import RunStatus, StepRef, StepState
from agentq.domain.outcomes import Join, Recorded
from agentq.domain.tools import tool
from agentq.ports.steps import Settlement
from agentq.services.heal import Healer
from tests.support.purged import age
from tests.support.spine import SETTLE_PATIENCE_SECONDS, Spine
from tests.support.stage import PLAIN

DEPLOYMENT = "shop"
AWAY = StoreUnavailableError("the database is away")
REFUSED = AuditRefusedError("the log is full")

MakeSpine = Callable[..., Spine]


@pytest.fixture
def files(tmp_path: Path) -> OutcomeFolder:
    return OutcomeFolder(tmp_path, DEPLOYMENT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "outcomes" / DEPLOYMENT


def settlement(**fields: Any) -> Settlement:
    change = Recorded(result={"id": 7, "text": "é"}, then=Join(), note="noted")
    values = {"ref": StepRef(run_id="r", number=2, attempt=3), "owner": "w", "effect": PLAIN, "fence_id": "f"}
    return Settlement(**{**values, "change": change, **fields})


def test_an_outcome_is_read_back_as_it_was_kept(files: OutcomeFolder) -> None:
    """What heals a run must be what happened, to the letter."""
    files.keep(settlement())
    [kept] = files.pending()
    assert kept.settlement == settlement()
    files.forget(kept)
    files.forget(kept)
    assert list(files.pending()) == []


def test_an_outcome_is_only_its_owner_s_to_read(files: OutcomeFolder, folder: Path) -> None:
    """It holds what a tool returned."""
    files.keep(settlement())
    [path] = folder.iterdir()
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_same_outcome_is_kept_once(files: OutcomeFolder) -> None:
    """A second try is no second outcome, another delivery's is."""
    files.keep(settlement())
    files.keep(settlement())
    files.keep(settlement(owner="another"))
    assert len(list(files.pending())) == 2


def test_a_full_disk_is_said_and_leaves_nothing_half(files: OutcomeFolder, folder: Path) -> None:
    """Half a file would look like an outcome."""
    with file_bytes_max(16), pytest.raises(OutcomeNotKeptError, match="could not be kept in"):
        files.keep(settlement())
    assert list(folder.iterdir()) == []


@contextmanager
def file_bytes_max(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "no object": lambda kept: [kept],
    "no outcome": lambda kept: {},
    "of the next version": lambda kept: {**kept, "version": 2},
    "of another deployment": lambda kept: {**kept, "deployment": "another"},
    "altered": lambda kept: {**kept, "outcome": {**kept["outcome"], "result": 1}},
    "without its check": lambda kept: {**kept, "sha256": None},
}


@pytest.mark.parametrize("oddity", ODD)
def test_what_isn_t_an_outcome_of_ours_is_set_aside(
    files: OutcomeFolder, folder: Path, oddity: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not believed, not deleted, said one time, and in nobody's way."""
    files.keep(settlement())
    [path] = folder.iterdir()
    odd = folder / "odd.json"
    odd.write_text(json.dumps(ODD[oddity](json.loads(path.read_text()))))
    with caplog.at_level(logging.ERROR):
        assert [kept.name for kept in files.pending()] == [path.name]
        assert [kept.name for kept in files.pending()] == [path.name]
    assert (folder / "odd.json.rejected").exists() and not odd.exists()
    assert len(caplog.records) == 1


def test_a_truncated_one_is_set_aside(files: OutcomeFolder, folder: Path) -> None:
    """As a disk leaves it that lied about its flush."""
    files.keep(settlement())
    [path] = folder.iterdir()
    os.truncate(path, path.stat().st_size // 2)
    assert list(files.pending()) == []
    assert [each.name for each in folder.iterdir()] == [f"{path.name}.rejected"]


# --- Keeping and healing --------------------------------------------------------------------------------------------


@tool(effect=PLAIN, name="pay")
def paying() -> str:
    """Pay."""
    return "paid"


@pytest.fixture
def spine(make_spine: MakeSpine, files: OutcomeFolder) -> Spine:
    return make_spine(paying, outcome_files=files)


def healer(spine: Spine, files: OutcomeFolder) -> Healer:
    return Healer(files=files, steps=spine.steps, runs=spine.stage.runs, dispatcher=spine.broker, clock=spine.clock)


def test_an_outcome_that_the_database_doesn_t_take_is_kept_after_the_patience(
    spine: Spine, files: OutcomeFolder
) -> None:
    """The run goes on when the keeper has brought it home, as if nothing had been."""
    run_id = spine.asked("pay")
    spine.steps.script.fail("settle", *[AWAY] * 100)
    assert spine.execute(run_id).stopped is None
    assert sum(spine.clock.slept) > SETTLE_PATIENCE_SECONDS - 3
    assert healer(spine, files).heal() == 0
    spine.steps.script.end()
    assert healer(spine, files).heal() == 1
    assert (spine.step(run_id).result, spine.run(run_id).status) == ("paid", RunStatus.RUNNING)
    assert spine.broker.numbers == [3]
    assert list(files.pending()) == []


def test_an_outcome_that_the_audit_log_refuses_is_kept_at_once_and_stops_the_run_meanwhile(
    spine: Spine, files: OutcomeFolder
) -> None:
    """No run goes on over a write that the log doesn't hold."""
    run_id = spine.asked("pay")
    spine.steps.script.fail("settle", REFUSED)
    assert spine.execute(run_id).stopped is not None
    assert spine.clock.slept == []
    spine.steps.script.fail("settle", REFUSED)
    assert healer(spine, files).heal() == 0
    assert spine.run(run_id).status is RunStatus.FAILED
    assert [healer(spine, files).heal(), healer(spine, files).heal()] == [1, 0]
    run = spine.run(run_id)
    assert (run.status, run.dead_letter, run.steps[1].state) == (RunStatus.RUNNING, None, StepState.COMPLETED)


def test_an_outcome_that_was_healed_before_is_only_forgotten(spine: Spine, files: OutcomeFolder) -> None:
    """A healer that died between the two changes nothing by its successor's second try."""
    run_id = spine.asked("pay")
    spine.steps.script.fail("settle", REFUSED)
    spine.execute(run_id)
    [kept] = files.pending()
    healer(spine, files).heal()
    files.keep(kept.settlement)
    assert healer(spine, files).heal() == 1
    assert not spine.run(run_id).has_contradiction
    assert len(spine.events(run_id, "outcome.late")) == 1


def test_an_outcome_whose_run_was_purged_is_left_for_a_person(
    spine: Spine, files: OutcomeFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Its write was given up as unknown, and the machine came back a month later: what it knows isn't thrown away."""
    run_id = spine.asked("pay")
    spine.steps.script.fail("settle", REFUSED)
    spine.execute(run_id)
    [kept] = files.pending()
    spine.stage.decisions.discard(run_id, actor="ann", reason="nobody knows")
    age(spine.stage, run_id)
    store = SqlPurgeStore(spine.stage.database)
    purged = store.purge(
        finished_before=store.time_before(timedelta(days=30)),
        after=None,
        runs_max=10,
        with_contradictions=False,
        actor="ann",
        is_rehearsal=False,
    )
    assert purged.run_ids == (run_id,)
    assert healer(spine, files).heal() == 0 and list(files.pending()) == []
    assert kept.name in caplog.text and "isn't there any more: it was purged" in caplog.text


def test_what_was_not_called_is_not_kept(spine: Spine, files: OutcomeFolder) -> None:
    """An error result of a call that was never made is no outcome; it is found again."""
    run_id = spine.asked("pay", amount=3)
    spine.steps.script.fail("settle", REFUSED)
    spine.execute(run_id)
    assert list(files.pending()) == []
