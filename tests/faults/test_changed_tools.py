"""Tools that another version of the agents renamed, or declared otherwise, while their steps were under way."""

import os
import signal
from collections.abc import Iterator

import pytest

from agentq.domain.effects import ToolEffect
from agentq.domain.model import Fence, StepState
from agentq.services.enqueue import new_run_id
from tests.support.proxy import Loss, PostgresProxy
from tests.support.system import System, call

NO_TOOL = "there is no tool"

# The next version of the agents: `look` and `pay` have other names, and `put` is declared too weakly.
NEXT_VERSION = """
from agentq import Agent, ToolContext, ToolEffect, tool
from tests.support import fault_agents

@tool(effect=ToolEffect.IDEMPOTENT_WRITE, name="pay_for_much")
def weaker(context: ToolContext, name: str, size_bytes: int) -> str:
    "Write something, under a key that no earlier version gave."
    return f"{name} put: {fault_agents.ask(name, 'write', context)}"

@tool
def look_closely(name: str) -> str:
    "What was called `look`."
    return name

support = Agent(name="support", model=fault_agents.support.model, tools=[weaker, look_closely])
"""


@pytest.fixture(scope="module")
def deployment(proxy: PostgresProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Models are asked by the old version, tools are called by the next one, as in the middle of a deploy."""
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "next_version.py").write_text(NEXT_VERSION)
    with System(folder, proxy.server_url, operation_deadline_seconds=2.0) as it:
        it.keeper()
        it.worker("model")
        it.worker("tools", agents=("next_version",), database_url=proxy.url)
        yield it


class TestRenamed:
    """The step names a tool that no worker knows any more."""

    @pytest.mark.parametrize("tool", ["look", "pay"])
    def test_it_is_handed_back_for_a_while_and_then_an_error_result(self, system: System, tool: str) -> None:
        """Another worker may know it; in the end the model hears that it is gone. No person is bothered."""
        run_id = system.enqueue([call(tool, f"renamed {tool}")])
        run = system.completes(run_id)
        step = run.steps[1]
        assert step.is_error and str(step.result).startswith(f"{NO_TOOL} '{tool}'")
        assert (step.attempt, step.tries, step.crashes) == (1, 0, 0)
        assert system.receiver.requests(f"renamed {tool}") == []
        kinds = [event.kind for event in system.client.events(run_id) if event.number == 2]
        assert kinds == ["step.handed_back", "fence.stamped", "step.settled"]

    def test_its_fence_says_that_nothing_could_be_called(self, system: System, proxy: PostgresProxy) -> None:
        """It is a plain write's, because nobody knows what the tool did; but it is no unknown write."""
        run_id = new_run_id()
        trap = proxy.trap(run_id, NO_TOOL, loss=Loss.OF_NOTHING)
        system.enqueue([call("look", "fenced")], run_id=run_id)
        trap.wait()
        fence = standing(system, run_id)
        assert (fence.effect, fence.is_callable) == (ToolEffect.NON_IDEMPOTENT_WRITE, False)
        trap.release()
        system.completes(run_id)

    @pytest.mark.parametrize("killed", ["the pool child", "the worker"])
    def test_a_worker_that_dies_over_it_leaves_no_unknown_write(
        self, system: System, proxy: PostgresProxy, killed: str
    ) -> None:
        """The requeue clears the fence: if it stood, the next attempt would be dead-lettered for it."""
        run_id = new_run_id()
        trap = proxy.trap(run_id, NO_TOOL, loss=Loss.OF_NOTHING)
        system.enqueue([call("pay", f"fenced by {killed}")], run_id=run_id)
        trap.wait()
        fence = standing(system, run_id)
        worker = system.processes[-1]
        if killed == "the worker":
            worker.kill()
            worker.wait()
            worker.start()
        else:
            os.kill(int(fence.owner.split("/")[2].partition("-")[0]), signal.SIGKILL)
        run = system.completes(run_id)
        [requeued] = system.events(run_id, "step.requeued")
        assert (requeued.at > fence.deadline_at, requeued.data["charge"]) == (True, "nothing")
        step = run.steps[1]
        assert (step.attempt, step.is_error, step.state) == (2, True, StepState.COMPLETED)
        assert system.events(run_id, "run.dead_lettered") == []
        assert system.receiver.requests(f"fenced by {killed}") == []


class TestWeaker:
    """The next version says that repeating is safe; the step was created when it wasn't."""

    def test_the_stricter_effect_counts(self, system: System) -> None:
        """The effect is pinned on the step: its request carried no key that a repeat could use."""
        run_id = system.enqueue([call("pay_for_much", "weakened", size_bytes=1)])
        with system.receiver.holding("weakened"):
            request = system.receiver.wait_for("weakened")
            assert standing(system, run_id).effect is ToolEffect.NON_IDEMPOTENT_WRITE
            os.kill(request.pid, signal.SIGKILL)
            system.stops_as_unknown(run_id)
        assert len(system.receiver.requests("weakened")) == system.receiver.effects_of(run_id) == 1


def standing(system: System, run_id: str) -> Fence:
    fence = system.client.get(run_id).pending_effect
    assert fence is not None
    return fence
