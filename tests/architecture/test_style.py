"""The rules of style that a machine can check and ruff doesn't know."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, source_files

MODULE_LINES_MAX = 650
SUITE_LINES_MAX = 1000  # The contract of a port is one suite, a simulation of the world one fake.
FUNCTION_LINES_MAX = 80
SENTENCE_ENDS = (".", ":", "?", "!")

UNWANTED = {
    "a promise that nobody can keep": re.compile(r"exactly[ -]once", re.IGNORECASE),
    "work that was left": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a path of somebody's machine": re.compile(r"""(?<![\w.$}])/(work|home/\w|root|Users)/"""),
}
TEXT_FILES = ("README.md", "docker-compose.yml", "Dockerfile", ".ci/run", "pyproject.toml")
SLEEPS = {"time.sleep", "sleep", "asyncio.sleep"}
VAGUE_MODULES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}
VAGUE_CLASSES = re.compile(r"(Manager|Helper|Util|Utils)$")
OWN_RULES = Path(__file__)  # It names what it looks for.

MODULES = [path for path in source_files() if path.name != "__init__.py" or path.stat().st_size]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_a_module_says_first_what_it_is_for() -> None:
    """A reader decides by its first line whether to go on."""
    first_lines = {
        named(path): (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0] for path in MODULES
    }
    assert not [name for name, line in first_lines.items() if not line.rstrip().endswith(SENTENCE_ENDS)]


def test_a_module_is_read_in_one_sitting() -> None:
    """Beyond that it is two modules."""
    lines = {named(path): len(path.read_text().splitlines()) for path in MODULES}
    maxima = {name: SUITE_LINES_MAX if name.startswith("tests/") else MODULE_LINES_MAX for name in lines}
    assert not {name: count for name, count in lines.items() if count > maxima[name]}


def test_a_function_fits_a_screen() -> None:
    """What has to be scrolled is read in parts, and believed in parts. A migration is a list, not a function."""
    assert not [
        f"{named(path)}:{function.lineno}"
        for path in MODULES
        if "versions" not in path.parts
        for function in functions(ast.parse(path.read_text()))
        if (function.end_lineno or 0) - function.body[0].lineno >= FUNCTION_LINES_MAX
    ]


def test_names_say_something() -> None:
    """A helper helps with anything, so anything ends up in it."""
    assert not [named(path) for path in MODULES if path.stem in VAGUE_MODULES]
    assert not [
        f"{named(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and VAGUE_CLASSES.search(node.name)
    ]


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

    Letting a named time pass, such as a lease's, is no guess; nor is a slow tool that a test defines.
    """
    guesses = [
        f"{named(path)}:{call.lineno}"
        for path in MODULES
        for function in functions(ast.parse(path.read_text()))
        if function.name.startswith("test_")
        for call in calls_of(function)
        if ast.unparse(call.func) in SLEEPS and isinstance(call.args[0], ast.Constant)
    ]
    assert not guesses


def calls_of(function: ast.AST) -> Iterator[ast.Call]:
    """Those that the function makes itself."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from calls_of(node)


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
