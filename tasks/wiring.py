"""The wiring of this process: made when first needed, and made anew in a forked child."""

import os
from dataclasses import dataclass

from agentq.bootstrap import Wiring
from agentq.tasks.app import app, settings


@dataclass(slots=True)
class _Process:
    """What this process works with; a forked child inherits it and finds that the pid isn't its own."""

    pid: int | None = None
    wiring: Wiring | None = None
    deployment: str | None = None


_process = _Process()


def wiring() -> Wiring:
    """What this process works with. A connection that a parent opened is never used by its child."""
    if _process.wiring is None or _process.pid != os.getpid():
        inherited = _process.wiring
        _process.wiring = Wiring(
            settings,
            app=app,
            deployment=_process.deployment,
            registry=None if inherited is None else inherited.registry,
        )
        _process.pid = os.getpid()
    return _process.wiring


def remember_deployment(deployment: str) -> None:
    """The worker's main process must not ask the database, so its start-up check tells it, and its children."""
    _process.deployment = deployment
    _process.pid = None
