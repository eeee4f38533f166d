"""The spine over a real SQLite store and leases in memory; clock, call limit, models and broker are fakes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from agentq.adapters.memory_leases import MemoryLeases
from agentq.domain.agents import Agent, Registry
from agentq.domain.failures import FailureClassifier
from agentq.domain.function_model import FunctionModel
from agentq.domain.model import Event, ModelReply, Run, RunMode, Step, StepRef, ToolCall
from agentq.domain.retry import Budgets, RetryPolicy
from agentq.domain.tools import Tool
from agentq.ports.steps import OutcomeFiles
from agentq.services.execute import Executed, Limits, StepExecutor
from agentq.services.heartbeat import Heartbeat
from tests.support.fakes import (
    FakeCallLimit,
    FakeClock,
    RecordingDispatcher,
    ScriptedLeases,
    ScriptedModels,
    ScriptedSteps,
)
from tests.support.stage import FIRST_CALL, Stage

AGENT = "support"
LEASE_SECONDS = 15.0
DEADLINE_SECONDS = 30.0
SETTLE_PATIENCE_SECONDS = 60.0
HAND_BACK_SECONDS = 60.0
RESULT_BYTES_MAX = 1000
TURNS_MAX = 5
PROBE_DEADLINE_SECONDS = 10.0
PROBES_MAX = 8
TRIES_MAX = 3
PATIENCE_SECONDS = 3600.0


class Spine:
    """One process that executes steps. What it was given and what it did is in its public parts."""

    def __init__(
        self, stage: Stage, *tools: Tool, dispatcher: bool = True, outcome_files: OutcomeFiles | None = None
    ) -> None:
        self.outcome_files = outcome_files
        self.stage = stage
        self.clock = FakeClock()
        memory = MemoryLeases(lease_seconds=LEASE_SECONDS, elapsed_seconds=self.clock.elapsed_seconds)
        self.leases = ScriptedLeases(memory)
        self.steps = ScriptedSteps(stage.steps)
        self.call_limit = FakeCallLimit()
        self.models = ScriptedModels()
        self.broker = RecordingDispatcher()
        self.heartbeat = Heartbeat(self.leases, self.steps, self.clock, LEASE_SECONDS)
        self.executor = self._executor(tools, self.broker if dispatcher else None)
        self._owners = 0

    def know(self, *tools: Tool) -> None:
        """From now on these are the agent's tools."""
        self.executor = self._executor(tools, self.broker)

    def _executor(self, tools: Sequence[Tool], dispatcher: RecordingDispatcher | None) -> StepExecutor:
        return StepExecutor(
            store=self.steps,
            heartbeat=self.heartbeat,
            registry=Registry([Agent(name=AGENT, model=FunctionModel(lambda *_: "unused"), tools=tools)]),
            models=self.models,
            policy=policy(),
            clock=self.clock,
            call_limit=self.call_limit,
            limits=Limits(
                operation_deadline_seconds=DEADLINE_SECONDS,
                settle_patience_seconds=SETTLE_PATIENCE_SECONDS,
                hand_back_seconds=HAND_BACK_SECONDS,
                result_bytes_max=RESULT_BYTES_MAX,
                turns_max=TURNS_MAX,
                probe_deadline_seconds=PROBE_DEADLINE_SECONDS,
                probes_max=PROBES_MAX,
            ),
            new_owner=self.new_owner,
            dispatcher=dispatcher,
            outcome_files=self.outcome_files,
        )

    def new_owner(self) -> str:
        self._owners += 1
        return f"host/boot/1-1/{self._owners}"

    # --- moves

    def asked(self, *calls: str, mode: RunMode = RunMode.QUEUED, **arguments: Any) -> str:
        """A run whose first turn, executed here, asked for calls of these tools."""
        run_id = self.stage.queued(mode=mode)
        wanted = [ToolCall(id=f"call-{number}", name=name, arguments=arguments) for number, name in enumerate(calls, 1)]
        self.models.replies.append(ModelReply(tool_calls=tuple(wanted)))
        self.execute(run_id, 1)
        self.broker.published.clear()
        self.steps.script.calls.clear()
        self.steps.settlements.clear()
        return run_id

    def execute(self, run_id: str, number: int = FIRST_CALL) -> Executed:
        """The attempt of that step that may run now."""
        return self.executor.execute(self.ref(run_id, number))

    # --- looking

    def ref(self, run_id: str, number: int = FIRST_CALL) -> StepRef:
        return self.stage.ref(run_id, number)

    def run(self, run_id: str) -> Run:
        return self.stage.runs.run(run_id)

    def step(self, run_id: str, number: int = FIRST_CALL) -> Step:
        return self.run(run_id).steps[number - 1]

    def events(self, run_id: str, kind: str) -> list[Event]:
        return [event for event in self.stage.runs.events(run_id) if event.kind == kind]


def policy() -> RetryPolicy:
    budgets = Budgets(tries_max=TRIES_MAX, crashes_max=3, backoff_seconds=1.0, patience_seconds=PATIENCE_SECONDS)
    return RetryPolicy(FailureClassifier(), budgets)


@contextmanager
def opened(stage: Stage) -> Iterator[Callable[..., Spine]]:
    """Makes spines over that store, and lets their heartbeats end."""
    made: list[Spine] = []

    def make(*tools: Tool, **options: Any) -> Spine:
        made.append(Spine(stage, *tools, **options))
        return made[-1]

    yield make
    for spine in made:
        spine.clock.end()
