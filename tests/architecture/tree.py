"""The project's own files, for tests that read them: what a commit holds, without what tools leave behind."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE_FOLDERS = ("agentq", "tasks", "config", "tests", "benchmarks")
LEFTOVERS = (
    ".git",
    ".*_cache",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    ".venv",
    ".agentq",
    ".hypothesis",
    ".coverage*",
)


def source_files() -> list[Path]:
    """Every module, once: the links in the package lead to folders that are listed by themselves."""
    return [
        path
        for folder in CODE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in path.parents if ROOT in parent.parents)
    ]


def copy_project(destination: Path) -> Path:
    """The project as a fresh clone has it, its links among it, so that a test can build or break it."""
    shutil.copytree(ROOT, destination, symlinks=True, ignore=shutil.ignore_patterns(*LEFTOVERS))
    return destination
