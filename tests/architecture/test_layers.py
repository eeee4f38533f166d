"""Dependencies point one way: the contracts of import-linter hold, and bite."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, copy_project


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_import_keeps_the_layers() -> None:
    """The core can be read, tested and trusted without Celery, SQL or a network only as long as it imports none."""
    answer = lint_imports(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("agentq/domain/model.py", "import sqlalchemy", "The domain is pure"),
        ("agentq/domain/model.py", "import time", "The domain is pure"),
        ("agentq/domain/model.py", "import agentq.services.execute", "Dependencies point one way"),
        ("agentq/services/execute.py", "import agentq.services.enqueue", "One use case never calls another"),
        ("agentq/services/execute.py", "import celery", "Services know no technology"),
        ("agentq/adapters/process.py", "import agentq.config.settings", "Dependencies point one way"),
        ("config/settings.py", "import agentq.tasks.app", "Dependencies point one way"),
        ("agentq/helpers.py", "", "Dependencies point one way"),
    ],
)
def test_an_import_against_the_layers_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """A contract that nothing can break, such as one that doesn't follow the links, would hold no one to anything."""
    project = copy_project(tmp_path / "project")
    with (project / module).open("a") as source:
        source.write(f"\n{line}\n")
    answer = lint_imports(project)
    assert answer.returncode != 0
    broken = [written for written in answer.stdout.splitlines() if written.startswith(contract)]
    assert any("BROKEN" in written for written in broken) or "exhaustive" in answer.stdout, answer.stdout
