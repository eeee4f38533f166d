"""Run a dead-lettered run again by a person's decision, from the step that stopped it."""

from agentq.ports import DecisionStore, Dispatcher, Ruling, RunStore
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
) -> None:
    """Record the ruling on the unknown write, if one is given, then open the run again and wake a worker.

    Raises what `DecisionStore.resolve` and `DecisionStore.replay` raise. A ruling that was recorded stays recorded when
    the replay itself is refused.
    """
    if ruling is not None:
        decisions.resolve(run_id, ruling, actor=actor, reason=reason)
    wakeups = decisions.replay(run_id, actor=actor, reason=reason)
    publish_steps(wakeups, runs=runs, dispatcher=dispatcher)
