"""Somebody changes the audit log in the database itself, past agentq and past its triggers."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentq.adapters.sql.engine import Database
from tests.support.databases import fresh_sqlite
from tests.support.stage import FIRST_CALL, Stage

SLIPS = {
    "an event": "UPDATE events SET actor = 'nobody' WHERE sequence = 4",
    "its deletion": "DELETE FROM events WHERE sequence = 2",
    "its replacement": "INSERT OR REPLACE INTO events SELECT run_id, 4, at, kind, 3, 1, actor, '{}' FROM events",
    "a seal": "UPDATE seals SET digest = upper(digest)",
    "a seal's deletion": "DELETE FROM seals",
}
FORGERIES = {
    "an event": ("UPDATE events SET actor = 'nobody' WHERE sequence = 4", "seal 1 doesn't match events 1 to 6"),
    "a deletion": ("DELETE FROM events WHERE sequence = 2", "event 2 is missing"),
    "a deletion, counted down": (
        "DELETE FROM events WHERE sequence = 6; UPDATE runs SET events_count = 5",
        "it is completed, and its log tells of no end",
    ),
    "a status": ("UPDATE runs SET status = 'cancelled'", "it is cancelled, and its log tells of run.completed last"),
    "a seal's deletion": ("DELETE FROM seals", "the end at event 6 has no seal"),
    "the run's row": ("DELETE FROM runs", "there are events or seals of it, and no run"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database file with a completed run that has a write; nobody has it open."""
    with fresh_sqlite(tmp_path) as url:
        stage = Stage(database=Database(url))
        run_id = stage.fenced()
        stage.complete(run_id, FIRST_CALL, "paid", fence_id=run_id)
        stage.answer(run_id, 3)
        stage.database.dispose()
    return tmp_path / "agentq.db"


@pytest.fixture
def verified(file: Path) -> Callable[[], tuple[int, str]]:
    """The command's exit code, and what it prints, in a process of its own."""

    def run() -> tuple[int, str]:
        command = [sys.executable, "-m", "agentq.cli.main", "audit", "verify"]
        environ = {"AGENTQ_DATABASE_URL": f"sqlite:///{file}", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, env=environ, cwd=file.parent, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("slip", SLIPS.values(), ids=SLIPS)
def test_the_file_itself_refuses_a_slip(file: Path, verified: Callable[[], tuple[int, str]], slip: str) -> None:
    """A person with a SQL shell, or another program, changes nothing by mistake."""
    connection = sqlite3.connect(file)
    with pytest.raises(sqlite3.IntegrityError, match="the audit log is append-only"), connection:
        connection.execute(slip)
    connection.close()
    assert verified() == (0, "checked 1 runs, 6 events, 1 writes, 1 seals: all of it holds\n")


@pytest.mark.parametrize(("forgery", "told"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_found(file: Path, verified: Callable[[], tuple[int, str]], forgery: str, told: str) -> None:
    """Who takes the triggers away can change what they like, and is seen."""
    connection = sqlite3.connect(file)
    triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
    connection.executescript("".join(f"DROP TRIGGER {name};" for (name,) in triggers) + forgery)
    connection.close()
    code, findings = verified()
    assert code == 1
    assert told in findings
