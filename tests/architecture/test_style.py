"""The rules of style that a machine can check and ruff doesn't know."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, source_files

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 80
SENTENCE_ENDS = (".", ":", "?", "!")

UNWANTED = {
    "a promise that nobody can keep": re.compile(r"exactly[ -]once", re.IGNORECASE),
    "work that was left": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a path of somebody's machine": re.compile(r"""(?<![\w.$}])/(work|home/\w|root|Users)/"""),
}
TEXT_FILES = ("README.md", "docker-compose.yml", "Dockerfile", ".ci/run", "pyproject.toml")
VAGUE_MODULES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}
VAGUE_CLASSES = re.compile(r"(Manager|Helper|Util|Utils)$")
OWN_RULES = Path(__file__)  # It names what it looks for.

MODULES = [path for path in source_files() if path.name != "__init__.py" or path.stat().st_size]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(params=MODULES, ids=named)
def module(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_a_module_says_first_what_it_is_for(module: Path) -> None:
    """A reader decides by its first line whether to go on."""
    docstring = ast.get_docstring(ast.parse(module.read_text()))
    assert docstring, "no docstring"
    assert docstring.split("\n\n")[0].rstrip().endswith(SENTENCE_ENDS)


def test_a_module_is_read_in_one_sitting(module: Path) -> None:
    """Beyond that it is two modules."""
    assert len(module.read_text().splitlines()) <= MODULE_LINES_MAX


def test_a_function_fits_a_screen(module: Path) -> None:
    """What has to be scrolled is read in parts, and believed in parts. A migration is a list, not a function."""
    if "versions" in module.parts:
        return
    tree = ast.parse(module.read_text())
    long = [f.name for f in functions(tree) if (f.end_lineno or 0) - f.body[0].lineno >= FUNCTION_LINES_MAX]
    assert not long


def test_names_say_something(module: Path) -> None:
    """A helper helps with anything, so anything ends up in it."""
    assert module.stem not in VAGUE_MODULES
    tree = ast.parse(module.read_text())
    assert not [c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and VAGUE_CLASSES.search(c.name)]


def test_a_test_says_why_it_matters() -> None:
    """Whoever breaks one must learn what it costs, not only that it broke."""
    silent = [
        f"{named(path)}::{function.name}"
        for path in MODULES
        if path.name.startswith("test_")
        for function in functions(ast.parse(path.read_text()))
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert not silent


def test_no_test_sleeps_for_a_guessed_time() -> None:
    """What is long enough here is too short on a busier machine; `tests.support.waiting` waits for a condition.

    Letting a named time pass, such as a lease's, is no guess.
    """
    guesses = [
        f"{named(path)}:{call.lineno}"
        for path in MODULES
        if path.name.startswith("test_")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {"time.sleep", "sleep", "asyncio.sleep"}
        if isinstance(call.args[0], ast.Constant)
    ]
    assert not guesses


@pytest.mark.parametrize("what", UNWANTED)
def test_nothing_unwanted_is_written(what: str) -> None:
    """Each of these has misled a reader before."""
    texts = [*MODULES, *(ROOT / name for name in TEXT_FILES if (ROOT / name).exists())]
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in texts
        if path != OWN_RULES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNWANTED[what].search(line)
    ]
    assert not found, "\n".join(found)
