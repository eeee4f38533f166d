"""Asks the model that an agent names: a function of its own, or a provider's."""

from functools import lru_cache

from agentq.domain.agents import Agent
from agentq.domain.errors import ConfigurationError
from agentq.domain.function_model import FunctionModel
from agentq.domain.loop import Message
from agentq.domain.model import ModelReply
from agentq.ports.world import ModelClient, ModelRequest


class AgentModels:
    """One client a provider and process, made when the first agent needs it."""

    def __init__(self, *, timeout_seconds: float, openai_base_url: str) -> None:
        self._timeout_seconds = timeout_seconds
        self._openai_base_url = openai_base_url
        self._openai = lru_cache(maxsize=1)(self._make_openai)

    def complete(self, agent: Agent, messages: list[Message]) -> ModelReply:
        """The model's next reply. Raises what the classifier knows."""
        tools = [tool.schema() for tool in agent.tools]
        if isinstance(agent.model, FunctionModel):
            return agent.model.complete(messages, tools)
        provider, _, name = agent.model.partition(":")
        if provider != "openai":
            raise ConfigurationError(f"agent {agent.name!r} names the model {agent.model!r}; known are openai:MODEL")
        return self._openai().complete(
            ModelRequest(model=name, messages=messages, tools=tools, timeout_seconds=self._timeout_seconds)
        )

    def _make_openai(self) -> ModelClient:
        from agentq.adapters.openai_model import OpenAIModel

        return OpenAIModel(base_url=self._openai_base_url or None)
