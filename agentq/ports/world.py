"""Models, time, chance, and the end of a call that takes too long."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentq.domain.model import ModelReply

if TYPE_CHECKING:
    from agentq.domain.agents import Agent  # Who only lists runs needs a clock, and no tools.


class Models(Protocol):
    """Asks the model of an agent; raises what the classifier knows."""

    def complete(self, agent: "Agent", messages: list[dict[str, object]]) -> ModelReply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model turn. Messages and tools have the shapes of the Chat Completions API."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    timeout_seconds: float


class ModelClient(Protocol):
    """Asks a model for its next reply. Raises what `FailureClassifier` knows; never retries by itself."""

    def complete(self, request: ModelRequest) -> ModelReply: ...


class Clock(Protocol):
    """Time and chance, so that tests own both."""

    def elapsed_seconds(self) -> float:
        """A clock for durations that goes on while the machine sleeps."""
        ...

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def sleep(self, seconds: float) -> None: ...


class CallLimit(Protocol):
    """Ends this process when a call outlives its deadline."""

    @property
    def can_end_calls(self) -> bool:
        """False: a call in this process can't be ended (a thread beside others), so it must not write."""
        ...

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """Inside, the process has at most `seconds` to live, whatever the call does; leaving lifts that."""
        ...
