"""`agentq tools`: what the agents of this environment may do to the world, and switching tools off for a while."""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from agentq.cli.hints import after_resume, newest_unknown, scope_options
from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import (
    EFFECT_STYLES,
    Cell,
    Column,
    Format,
    View,
    emit_list,
    emit_one,
    moment_cell,
    output_options,
    say,
    short,
    suggest,
)
from agentq.cli.session import actor_option, ask, connected, yes_option
from agentq.domain.errors import AgentqError, ConfigurationError, InvalidInputError, SchemaError
from agentq.domain.pauses import Pause
from agentq.views import pause_view

if TYPE_CHECKING:
    from agentq.client import AgentQ
    from agentq.domain.agents import Registry

_COMMANDS = {
    "list": LazyCommand("agentq.cli.tools:list_tools", "Every tool with its effect. Imports your agents' modules."),
    "pause": LazyCommand("agentq.cli.tools:pause", "Let calls of a tool wait; no write of it begins after that."),
    "resume": LazyCommand("agentq.cli.tools:resume", "End a pause; what waited goes on."),
    "pauses": LazyCommand("agentq.cli.tools:list_pauses", "What is paused now, since when, by whom and why."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def tools() -> None:
    """The tools of the agents here, what they do to the world, and whether they are paused."""


COLUMNS = (
    Column("TOOL", lambda view: Cell(view["name"])),
    Column("EFFECT", lambda view: Cell(view["effect"], EFFECT_STYLES[view["effect"]])),
    Column("AGENTS", lambda view: Cell(", ".join(view["agents"])), yields=2),
    Column("PAUSED", lambda view: Cell(_paused(view), "yellow")),
    Column("DEADLINE", lambda view: Cell(_seconds(view["deadline_seconds"], "default"))),
    Column("SETTLES WITHIN", lambda view: Cell(_settles(view))),
    Column("WHAT IT DOES", lambda view: Cell(short(view["description"], 80)), may_shrink=True, yields=1),
)
PAUSE_COLUMNS = (
    Column("TOOL", lambda view: Cell(view["tool"] or "(every tool)")),
    Column("AGENT", lambda view: Cell(view["agent"] or "(every agent)")),
    Column("WHAT WAITS", lambda view: Cell("reads and writes" if view["reads"] else "writes")),
    Column("SINCE", lambda view: moment_cell(view["paused_at"])),
    Column("BY", lambda view: Cell(view["paused_by"]), yields=1),
    Column("REASON", lambda view: Cell(short(view["reason"], 60)), may_shrink=True),
)


@click.command("list")
@output_options
def list_tools(output: Format) -> None:
    """Every tool of the agents in AGENTQ_AGENTS with its effect. Imports those modules."""
    registry = _registry()
    paused = _pauses_if_known()
    views = []
    for tool in registry.tools():
        serving = [name for name in registry.names() if registry.tool(name, tool.name) is not None]
        stopped = [
            pause_view(pause)
            for pause in paused
            if any(pause.stops(agent=agent, tool=tool.name, is_write=tool.effect.is_write) for agent in serving)
        ]
        views.append(
            {
                "name": tool.name,
                "effect": tool.effect.value,
                "agents": serving,
                "pauses": stopped,
                "deadline_seconds": tool.deadline_seconds,
                "settles_within_seconds": tool.settles_within_seconds,
                "description": tool.description,
                "parameters": tool.parameters,
            }
        )
    emit_list(views, COLUMNS, output, id_of="name", none="no tools: no agent in AGENTQ_AGENTS has any")


@click.command()
@click.argument("tool", required=False)
@click.option("--agent", metavar="AGENT", help="Only for runs of this agent; without TOOL: every tool of it.")
@click.option("--all", "everything", is_flag=True, help="Every tool of every agent.")
@click.option("--reads", is_flag=True, help="Calls that only read wait too, within a second.")
@click.option("--reason", default="", help="Why, for the audit log and for whoever finds the tool paused.")
@actor_option
@yes_option
@output_options
def pause(
    tool: str | None,
    agent: str | None,
    everything: bool,
    reads: bool,
    reason: str,
    actor: str,
    yes: bool,
    output: Format,
) -> None:
    """Let calls of TOOL wait: from when this returns, no write of it begins.

    Writes that are in flight end first. Steps that wait spend none of their run's budgets, and model turns go on.
    """
    _check_scope(tool, agent, everything)
    with connected(actor) as client:
        if tool is not None:
            _check_known(client, tool, yes=yes)
        else:
            ask(f"Pause {_scope_text(tool, agent)}?", yes=yes)
        made = client.pause(tool, agent=agent, reads=reads, reason=reason)
        in_flight = client.writes_in_flight(tool, agent=agent)
        unknown = newest_unknown(client, tool, agent)
    emit_one({**pause_view(made), "writes_in_flight": in_flight}, output, lambda: None, id_of="tool")
    say(f"{_scope_text(tool, agent)} is paused: {'reads and writes wait' if reads else 'writes wait'}")
    if in_flight:
        say(f"{in_flight} writes of it were in flight already: they end, or are listed as unknown")
    if output.is_for_people:
        if unknown is not None:
            suggest(f"agentq dead-letters plan {unknown}")
        suggest(f"agentq tools resume {scope_options(tool, agent)}")


@click.command()
@click.argument("tool", required=False)
@click.option("--agent", metavar="AGENT", help="The agent that was named when it was paused.")
@click.option("--all", "everything", is_flag=True, help="The pause of every tool of every agent.")
@click.option("--reason", default="", help="Why, for the audit log.")
@actor_option
@output_options
def resume(tool: str | None, agent: str | None, everything: bool, reason: str, actor: str, output: Format) -> None:
    """End the pause that was made with the same TOOL and --agent; what waited goes on at once."""
    _check_scope(tool, agent, everything)
    with connected(actor) as client:
        woken = client.resume(tool, agent=agent, reason=reason)
        left = [pause_view(each) for each in client.pauses()]
        next_commands = after_resume(client)
    emit_one({"tool": tool, "agent": agent, "steps_due": woken}, output, lambda: None, id_of="tool")
    say(f"{_scope_text(tool, agent)} is not paused any more; {woken} steps waited and are due now")
    if output.is_for_people:
        suggest(*next_commands)
    if left:
        say(f"still paused: {', '.join(_scope_text(each['tool'], each['agent']) for each in left)}")


@click.command("pauses")
@output_options
def list_pauses(output: Format) -> None:
    """What is paused now, since when, by whom and why. Imports no agent's code."""
    with connected() as client:
        views = [pause_view(each) for each in client.pauses()]
    emit_list(views, PAUSE_COLUMNS, output, id_of="tool", none="nothing is paused")


def say_parked(parked: Sequence[View]) -> None:
    """Which steps of a run wait for a pause, and the command that ends it."""
    for view in parked:
        made = view["pause"]
        why = f": {made['reason']}" if made["reason"] else ""
        since = moment_cell(made["paused_at"]).text
        who = f"{made['paused_by']} paused {_scope_text(made['tool'], made['agent'])} at {since}{why}"
        say(f"step {view['step']} waits, {view['tool']} is not called: {who}", style="yellow")
    for options in dict.fromkeys(scope_options(each["pause"]["tool"], each["pause"]["agent"]) for each in parked):
        suggest(f"agentq tools resume {options}")


def _check_scope(tool: str | None, agent: str | None, everything: bool) -> None:
    if everything and (tool is not None or agent is not None):
        raise click.UsageError("--all is every tool of every agent: leave TOOL and --agent out")
    if not everything and not tool and not agent:
        raise click.UsageError("name a tool, or an --agent, or say --all")
    if agent == "" or tool == "":
        raise InvalidInputError("the name of a tool or an agent isn't empty")


def _check_known(client: "AgentQ", tool: str, *, yes: bool) -> None:
    """A name that nobody knows pauses nothing: most likely it is mistyped."""
    known = client.tools_seen()
    if tool in known or yes:
        return
    known |= _registered_tools()
    if tool in known:
        return
    similar = difflib.get_close_matches(tool, sorted(known), n=1)
    if similar:
        raise InvalidInputError(f"no tool {tool!r} is known; did you mean {similar[0]!r}? --yes pauses it all the same")
    ask(f"No tool {tool!r} is in AGENTQ_AGENTS, or in a step that is open. Pause it all the same?", yes=yes)


def _registered_tools() -> set[str]:
    try:
        return {tool.name for tool in _registry().tools()}
    except ConfigurationError:
        return set()  # Whoever pauses a tool in an outage may not have the agents' code.


def _registry() -> "Registry":
    from agentq.adapters.agent_modules import load_registry  # noqa: PLC0415 - only here agents are imported
    from agentq.config.settings import load_settings  # noqa: PLC0415

    return load_registry(load_settings().agents)


def _pauses_if_known() -> tuple[Pause, ...]:
    try:
        with connected() as client:
            return client.pauses()
    except SchemaError:
        return ()  # No database yet, so nothing is paused in it.
    except AgentqError as error:
        say(f"whether any is paused is not known: {error}", style="yellow")
        return ()


def _scope_text(tool: str | None, agent: str | None) -> str:
    what = "every tool" if tool is None else f"tool {tool}"
    return what if agent is None else f"{what} of agent {agent}"


def _paused(view: View) -> str:
    return "; ".join(_pause_text(each) for each in view["pauses"])


def _pause_text(made: View) -> str:
    whose = f"for {made['agent']} " if made["agent"] else ""
    why = f": {short(made['reason'], 40)}" if made["reason"] else ""
    return f"{whose}by {made['paused_by']}{why}"


def _seconds(seconds: float | None, otherwise: str) -> str:
    return otherwise if seconds is None else f"{seconds:g} s"


def _settles(view: View) -> str:
    return "" if view["effect"] == "read_only" else _seconds(view["settles_within_seconds"], "a person says")
