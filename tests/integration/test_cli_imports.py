"""The command line is quick because it imports little: what each command may not load."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentq.adapters.sql.migration import upgrade
from agentq.config.settings import Settings
from tests.support.workers import environment

HEAVY = ("celery", "kombu", "openai", "pydantic", "alembic", "flower", "redis", "rich", "httpx", "psycopg")
WHAT_WAS_IMPORTED = """
import sys
from agentq.cli.main import run_command
code = run_command({arguments!r})
loaded = [name for name in {packages!r} if name in sys.modules]
sys.stderr.write("loaded: " + " ".join(loaded) + "\\n")
sys.exit(code)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(home=tmp_path)
    upgrade(settings.effective_database_url)
    return settings


def loaded_by(settings: Settings, *arguments: str, packages: Sequence[str] = HEAVY) -> list[str]:
    """Which of those packages that command imports."""
    script = WHAT_WAS_IMPORTED.format(arguments=list(arguments), packages=packages)
    ended = subprocess.run(
        (sys.executable, "-c", script),
        env=environment(settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("loaded: ")]
    return line.removeprefix("loaded: ").split()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["runs", "--help"]])
def test_help_loads_nothing_heavy(settings: Settings, arguments: list[str]) -> None:
    """Nor the database: a person types this to read."""
    assert loaded_by(settings, *arguments, packages=(*HEAVY, "sqlalchemy")) == []


@pytest.mark.parametrize("arguments", [["runs", "list"], ["runs", "list", "--json"], ["dead-letters", "list"]])
def test_a_list_loads_the_database_alone(settings: Settings, arguments: list[str]) -> None:
    """It answers in 0.4 s; Celery, the SDKs and the Redis client alone would take twice that."""
    assert loaded_by(settings, *arguments) == []


def test_the_check_finds_what_is_loaded(settings: Settings) -> None:
    """Or the others would prove nothing."""
    assert loaded_by(settings, "enqueue", "--help") == [] and "alembic" in loaded_by(settings, "db", "upgrade")
