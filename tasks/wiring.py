"""The wiring of this process: made when first needed, and made anew in a forked child."""

import os

from agentq.bootstrap import Wiring
from agentq.tasks.app import app, settings

_wirings: dict[int, Wiring] = {}
deployment: str | None = None


def wiring() -> Wiring:
    """What this process works with. A connection that a parent opened is never used by its child."""
    pid = os.getpid()
    if pid not in _wirings:
        parent = next(iter(_wirings.values()), None)
        _wirings.clear()
        _wirings[pid] = Wiring(settings, app=app, deployment=deployment, registry=parent.registry if parent else None)
    return _wirings[pid]


def remember_deployment(deployment_id: str) -> None:
    """The worker's main process must not ask the database, so its start-up check tells it."""
    global deployment
    deployment = deployment_id
