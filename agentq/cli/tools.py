"""`agentq tools`: what the agents of this environment may do to the world."""

import click

from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import EFFECT_STYLES, Cell, Column, Format, View, emit_list, output_options, short

_COMMANDS = {
    "list": LazyCommand("agentq.cli.tools:list_tools", "Every tool with its effect. Imports your agents' modules."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def tools() -> None:
    """The tools of the agents here, and what they do to the world."""


COLUMNS = (
    Column("TOOL", lambda view: Cell(view["name"])),
    Column("EFFECT", lambda view: Cell(view["effect"], EFFECT_STYLES[view["effect"]])),
    Column("AGENTS", lambda view: Cell(", ".join(view["agents"]))),
    Column("DEADLINE", lambda view: Cell(_seconds(view["deadline_seconds"], "default"))),
    Column("SETTLES WITHIN", lambda view: Cell(_settles(view))),
    Column("WHAT IT DOES", lambda view: Cell(short(view["description"], 80)), may_shrink=True),
)


@click.command("list")
@output_options
def list_tools(output: Format) -> None:
    """Every tool of the agents in AGENTQ_AGENTS with its effect. Imports those modules."""
    from agentq.adapters.agent_modules import load_registry  # noqa: PLC0415 - the only command that imports agents
    from agentq.config.settings import load_settings  # noqa: PLC0415

    registry = load_registry(load_settings().agents)
    views = []
    for tool in registry.tools():
        serving = [name for name in registry.names() if registry.tool(name, tool.name) is not None]
        views.append(
            {
                "name": tool.name,
                "effect": tool.effect.value,
                "agents": serving,
                "deadline_seconds": tool.deadline_seconds,
                "settles_within_seconds": tool.settles_within_seconds,
                "description": tool.description,
                "parameters": tool.parameters,
            }
        )
    emit_list(views, COLUMNS, output, id_of="name", none="no tools: no agent in AGENTQ_AGENTS has any")


def _seconds(seconds: float | None, otherwise: str) -> str:
    return otherwise if seconds is None else f"{seconds:g} s"


def _settles(view: View) -> str:
    return "" if view["effect"] == "read_only" else _seconds(view["settles_within_seconds"], "a person says")
