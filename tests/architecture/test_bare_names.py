"""`tasks` and `config` are parts of the package, and nothing under their bare names."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT


def import_in_project(module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import {module}; print({module}.__name__)"],
        cwd=ROOT,  # Where Python finds the folders by their bare names.
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["tasks", "config"])
def test_a_bare_import_says_what_to_import(name: str) -> None:
    """Imported twice under two names, a module would hold its state twice: two Celery apps, two sets of settings."""
    answer = import_in_project(name)
    assert answer.returncode != 0
    assert answer.stderr.splitlines()[-1].startswith(f"ImportError: import agentq.{name}, not {name}")


@pytest.mark.parametrize("name", ["tasks", "config"])
def test_the_package_holds_a_relative_link(name: str) -> None:
    """An absolute one would lead nowhere on the next machine."""
    link = ROOT / "agentq" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert import_in_project(f"agentq.{name}").stdout.strip() == f"agentq.{name}"
