"""Publishing: wake-up calls, and how many of them wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentq.domain.effects import ToolEffect
from agentq.domain.model import StepKind, StepRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Wakeup:
    """What a dispatcher needs to publish a step: ids for the message, the rest to route it and to name it in Flower."""

    ref: StepRef
    agent: str
    kind: StepKind
    tool: str | None = None
    effect: ToolEffect = ToolEffect.READ_ONLY
    deadline_seconds: float | None = None
    is_isolated: bool = False


class Dispatcher(Protocol):
    """Publishes wake-up calls. Raises BrokerUnavailableError at once rather than wait for a broker that is away."""

    def publish(self, wakeups: Sequence[Wakeup]) -> None: ...

    def backlog(self) -> Mapping[StepKind, int]:
        """How many messages wait in the queue of each kind of step."""
        ...

    def is_drained(self) -> bool:
        """True: no message is queued and none is delivered and unacknowledged, so that no step can be in one."""
        ...
