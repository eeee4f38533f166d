"""AI-agent runs on Celery that never repeat a write they can't prove safe to repeat.

Names are imported when they are first used, so that `import agentq` costs a client only what it uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentq.client import AgentQ
    from agentq.domain.agents import Agent
    from agentq.domain.effects import ToolEffect
    from agentq.domain.failures import AuditPersistenceFailedException, FailureClass, FailureClassifier
    from agentq.domain.function_model import FunctionModel
    from agentq.domain.model import RunStatus, ToolCall
    from agentq.domain.probes import ProbeAnswer
    from agentq.domain.tools import ToolContext, ToolError, tool

__all__ = [
    "Agent",
    "AgentQ",
    "AuditPersistenceFailedException",
    "FailureClass",
    "FailureClassifier",
    "FunctionModel",
    "ProbeAnswer",
    "RunStatus",
    "ToolCall",
    "ToolContext",
    "ToolEffect",
    "ToolError",
    "tool",
]

_HOMES = {
    "Agent": "agentq.domain.agents",
    "AgentQ": "agentq.client",
    "AuditPersistenceFailedException": "agentq.domain.failures",
    "FailureClass": "agentq.domain.failures",
    "FailureClassifier": "agentq.domain.failures",
    "FunctionModel": "agentq.domain.function_model",
    "ProbeAnswer": "agentq.domain.probes",
    "RunStatus": "agentq.domain.model",
    "ToolCall": "agentq.domain.model",
    "ToolContext": "agentq.domain.tools",
    "ToolEffect": "agentq.domain.effects",
    "ToolError": "agentq.domain.tools",
    "tool": "agentq.domain.tools",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentq' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
