"""A model that is a Python function: for tests, demos, and agents whose next step needs no network."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from agentq.domain.errors import ConfigurationError
from agentq.domain.model import ModelReply, ToolCall
from agentq.domain.replies import with_own_ids

Reply: TypeAlias = "str | ToolCall | Sequence[ToolCall] | ModelReply"


class FunctionModel:
    """Asks a function of (messages, tools), both in the shapes of the Chat Completions API, for the next reply.

    The function returns the final text, a ToolCall or several, or a whole ModelReply. Calls with the same id, or none,
    get ids of their own.
    """

    def __init__(
        self, function: Callable[[list[dict[str, Any]], list[dict[str, Any]]], Reply], name: str = "function"
    ) -> None:
        if not callable(function):
            raise ConfigurationError(f"a FunctionModel needs a function of messages and tools, not {function!r}")
        self.function = function
        self.name = name

    def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ModelReply:
        """The function's reply. Raises what it raises, and ConfigurationError when it returns something else."""
        reply = self.function(messages, tools)
        match reply:
            case ModelReply():
                return with_own_ids(reply)
            case str():
                return ModelReply(text=reply)
            case ToolCall():
                return with_own_ids(ModelReply(tool_calls=(reply,)))
            case [*calls] if calls and all(isinstance(call, ToolCall) for call in calls):
                return with_own_ids(ModelReply(tool_calls=tuple(calls)))
            case _:
                raise ConfigurationError(
                    f"the function of model {self.name!r} returned {type(reply).__name__}; "
                    "return a str, a ToolCall, a list of them, or a ModelReply"
                )

    def __repr__(self) -> str:
        return f"FunctionModel({self.name!r})"
