"""The exact set of tools that write in what agentq ships: nobody adds a writer by accident."""

import ast
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType

import agentq
from agentq.domain.agents import Agent
from agentq.domain.effects import ToolEffect
from agentq.domain.tools import Tool, tool

# Every tool that writes, with its effect and why that effect is the right one.
WRITERS = {
    "tag_order": (ToolEffect.IDEMPOTENT_WRITE, "the demo's shop tells a repeated tag by its Idempotency-Key"),
    "refund_order": (ToolEffect.NON_IDEMPOTENT_WRITE, "the demo's payment service pays each time that it is asked"),
}

INSTRUCTION = (
    "The tools that write have changed. Whoever adds one: declare its effect by @tool(effect=...), choose the stricter "
    "one when in doubt, make it a function at a module's top level, and add it to WRITERS with the reason for its "
    "effect. Whoever removes or renames one: steps in flight still name it; they end as error results."
)

NOT_IMPORTED = ("agentq.adapters.sql.migrations",)  # Alembic alone can run these; read as text all the same.


def shipped_modules() -> Iterator[ModuleType]:
    """Every module of agentq, imported."""
    yield agentq
    for found in walk_packages(agentq.__path__, "agentq."):
        if not found.name.startswith(NOT_IMPORTED) and not found.name.endswith(".__main__"):
            yield import_module(found.name)


def tools_in(modules: Iterable[ModuleType]) -> set[Tool]:
    """The tools that these modules hold by name, themselves or as an agent's."""
    found: set[Tool] = set()
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Tool):
                found.add(value)
            elif isinstance(value, Agent):
                found.update(value.tools)
    return found


def writers_of(tools: Iterable[Tool]) -> dict[str, ToolEffect]:
    return {each.name: each.effect for each in tools if each.effect.is_write}


def decorated_names(source: str) -> set[str]:
    """The functions of a module, at any depth, that `@tool` makes a tool of, by where they are."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(_is_tool(decorator) for decorator in node.decorator_list)
    }


def _is_tool(decorator: ast.expr) -> bool:
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    match named:
        case ast.Name(id="tool") | ast.Attribute(attr="tool"):
            return True
        case _:
            return False


def test_the_tools_that_write_are_exactly_these() -> None:
    """A write that is taken for a read is repeated after every crash; this is where a new one is noticed."""
    shipped = writers_of(tools_in(shipped_modules()))
    assert shipped == {name: effect for name, (effect, _) in WRITERS.items()}, INSTRUCTION


def test_every_tool_of_the_source_is_found() -> None:
    """One that is made inside a function would escape the list."""
    found = {each.function.__name__ for each in tools_in(shipped_modules())}
    root = Path(agentq.__file__).parent
    folders = (root, root / "tasks", root / "config")  # The two are links, which rglob doesn't follow.
    written = {
        name for folder in folders for path in folder.rglob("*.py") for name in decorated_names(path.read_text())
    }
    assert written <= found, f"make these functions of a module's top level: {sorted(written - found)}"


def test_every_writer_has_a_reason() -> None:
    """The reason is what a reviewer reads; an empty one says that nobody thought about it."""
    assert [name for name, (_, reason) in WRITERS.items() if not reason.strip()] == []


def test_a_new_writer_would_be_noticed() -> None:
    """The check itself, on a module that ships nothing."""

    @tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
    def send_parcel() -> None: ...

    module = ModuleType("with_a_writer")
    module.send_parcel = send_parcel  # type: ignore[attr-defined]
    assert writers_of(tools_in([module])) == {"send_parcel": ToolEffect.NON_IDEMPOTENT_WRITE}
    hidden = "def make():\n    @agentq.tool(effect=1)\n    async def inner(): ...\n    @tool\n    def other(): ...\n"
    assert decorated_names(hidden) == {"inner", "other"}
