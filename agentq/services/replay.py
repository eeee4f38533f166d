"""Run a stopped run again by a person's decision: on from the step that stopped it, or as a copy from another step."""

from agentq.domain.decisions import Ruling
from agentq.domain.replay import Copying
from agentq.ports.deciding import DecisionStore
from agentq.ports.dispatch import Dispatcher
from agentq.ports.runs import RunStore
from agentq.services.publish import publish_steps


def replay(
    run_id: str,
    ruling: Ruling | None,
    *,
    actor: str,
    reason: str,
    decisions: DecisionStore,
    runs: RunStore,
    dispatcher: Dispatcher,
    digest: str | None = None,
) -> None:
    """Record the ruling on the unknown write, if one is given, then open the run again and wake a worker.

    Raises what `DecisionStore.resolve` and `DecisionStore.replay` raise. A ruling that was recorded stays recorded when
    the replay itself is refused.
    """
    wakeups = decisions.replay(run_id, actor=actor, reason=reason, ruling=ruling, digest=digest)
    publish_steps(wakeups, runs=runs, dispatcher=dispatcher)


def replay_as_copy(
    run_id: str,
    new_run_id: str,
    copying: Copying,
    *,
    actor: str,
    reason: str,
    decisions: DecisionStore,
    runs: RunStore,
    dispatcher: Dispatcher,
    digest: str | None = None,
) -> None:
    """Start a new run that begins with recorded results, and wake a worker. Raises what `DecisionStore.copy` raises."""
    wakeups = decisions.copy(run_id, new_run_id, copying, actor=actor, reason=reason, digest=digest)
    publish_steps(wakeups, runs=runs, dispatcher=dispatcher)
