"""The `agentq` command in the test's own process, on a database that the environment names."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.sql.engine import Database
from agentq.cli.main import run_command
from tests.support.stage import Stage


@contextmanager
def named_stage(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage on that database; of our settings the environment has this alone, and nobody answers for the broker."""
    for name in [name for name in os.environ if name.startswith("AGENTQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AGENTQ_DATABASE_URL", url)
    monkeypatch.setenv("AGENTQ_HOME", str(folder))
    monkeypatch.chdir(folder)
    stage = Stage(database=Database(url))
    yield stage
    stage.database.dispose()


class Agentq:
    """Runs commands that begin with those words. Afterwards `out` and `err` are what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self._capsys = capsys
        self._words = words
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        return self.run(*self._words, *arguments)

    def run(self, *arguments: str) -> int:
        """A command that begins with none of them."""
        self._capsys.readouterr()
        code = run_command([*arguments])
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def data(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def next_commands(self) -> list[str]:
        """Those that were suggested and begin with the words, without them."""
        beginning = " ".join(("agentq", *self._words))
        return re.findall(rf"^next: {beginning} (.*)$", self.err, re.MULTILINE)
