"""An agent as its author declares it, and the registry of those that a process serves."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentq.domain.effects import ToolEffect, ToolEffectResolver
from agentq.domain.errors import ConfigurationError
from agentq.domain.function_model import FunctionModel
from agentq.domain.tools import Tool

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PROVIDERS = ("openai",)  # Every server that speaks the Chat Completions API is reached by this one.


@dataclass(frozen=True, slots=True, eq=False)
class Agent:
    """A model with instructions and tools. `turns_max` and `input_bytes_max` None: the settings' defaults.

    Raises ConfigurationError that says what is wrong with it.
    """

    name: str
    model: str | FunctionModel
    instructions: str = ""
    tools: Sequence[Tool] = ()
    turns_max: int | None = None
    input_bytes_max: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_model(self.name, self.model)
        if not isinstance(self.instructions, str):
            raise ConfigurationError(f"agent {self.name!r}: instructions are {self.instructions!r}; give a text")
        object.__setattr__(self, "tools", _checked_tools(self.name, self.tools))
        for bound in ("turns_max", "input_bytes_max"):
            value = getattr(self, bound)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"agent {self.name!r}: {bound} is {value!r}; give a whole number above 0")

    def tool(self, name: str) -> Tool | None:
        """Its tool of that name, None without one."""
        return next((tool for tool in self.tools if tool.name == name), None)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ConfigurationError(
            f"agent name {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )


def _check_model(agent: str, model: object) -> None:
    if isinstance(model, FunctionModel):
        return
    if not isinstance(model, str):
        raise ConfigurationError(f"agent {agent!r}: model is {model!r}; give 'provider:model' or a FunctionModel")
    provider, colon, name = model.partition(":")
    if not colon or not name.strip() or not provider:
        meant = name or (provider if provider not in PROVIDERS else "") or "MODEL"
        raise ConfigurationError(f"agent {agent!r}: model is {model!r}; write it as 'openai:{meant}'")
    if provider not in PROVIDERS:
        raise ConfigurationError(
            f"agent {agent!r}: no provider {provider!r} (known: {', '.join(PROVIDERS)}); for a server that speaks the "
            f"Chat Completions API write 'openai:{name}' and set AGENTQ_OPENAI_BASE_URL"
        )


def _checked_tools(agent: str, tools: object) -> tuple[Tool, ...]:
    if isinstance(tools, str | Tool) or not isinstance(tools, Iterable):
        raise ConfigurationError(f"agent {agent!r}: tools is {tools!r}; give a list of tools")
    checked: list[Tool] = []
    for tool in tools:
        if not isinstance(tool, Tool):
            shown = getattr(tool, "__qualname__", repr(tool))
            raise ConfigurationError(f"agent {agent!r}: {shown} is not a tool; decorate it with @tool")
        if any(tool.name == other.name for other in checked):
            raise ConfigurationError(f"agent {agent!r} has two tools named {tool.name!r}; rename one: @tool(name=...)")
        checked.append(tool)
    return tuple(checked)


class Registry:
    """The agents that a process serves, with their tools, by name.

    Raises ConfigurationError for two agents of one name, and for two tools of one name, even of different agents: a
    name must say what it does to the world, since that is what a step and a fence keep.
    """

    def __init__(self, agents: Iterable[Agent]) -> None:
        self._agents: dict[str, Agent] = {}
        self._tools: dict[str, Tool] = {}
        owners: dict[str, str] = {}
        for agent in agents:
            if self._agents.setdefault(agent.name, agent) is not agent:
                raise ConfigurationError(f"two agents are named {agent.name!r}; rename one")
            for tool in agent.tools:
                known = self._tools.setdefault(tool.name, tool)
                if known is not tool:
                    raise ConfigurationError(
                        f"two tools are named {tool.name!r}: {known.origin} of agent {owners[tool.name]!r} and "
                        f"{tool.origin} of agent {agent.name!r}; share one, or rename one by @tool(name=...)"
                    )
                owners.setdefault(tool.name, agent.name)
        self.effects = ToolEffectResolver(self._declared)

    def agent(self, name: str) -> Agent | None:
        return self._agents.get(name)

    def agents(self) -> list[Agent]:
        """All of them, by name."""
        return [self._agents[name] for name in self.names()]

    def names(self) -> list[str]:
        return sorted(self._agents)

    def tool(self, agent_name: str, tool_name: str) -> Tool | None:
        """That agent's tool; None: there is no such agent, or it has no such tool."""
        agent = self._agents.get(agent_name)
        return agent.tool(tool_name) if agent is not None else None

    def tools(self) -> list[Tool]:
        """Those of all agents, by name."""
        return [self._tools[name] for name in sorted(self._tools)]

    def _declared(self, name: str) -> ToolEffect | None:
        tool = self._tools.get(name)
        return tool.effect if tool is not None else None
