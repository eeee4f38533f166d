"""Runs in the states that tests begin with, brought there by the moves that bring real runs there."""

import uuid
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import select, update

from agentq.adapters.sql.deciding import SqlDecisionStore
from agentq.adapters.sql.engine import Database
from agentq.adapters.sql.keeping import SqlKeeperStore
from agentq.adapters.sql.pausing import SqlPauseStore
from agentq.adapters.sql.runs import SqlRunStore
from agentq.adapters.sql.schema import runs, steps
from agentq.adapters.sql.steps import SqlStepStore
from agentq.domain.effects import ToolEffect
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, Json, NewStep, RunMode, StepKind, StepRef
from agentq.domain.outcomes import Answer, Join, Recorded, Retried, Stopped, Turn
from agentq.ports.runs import NewRun
from agentq.ports.steps import FenceRequest, FenceVerdict, Settled, Settlement, Verdict

READ, KEYED, PLAIN = ToolEffect.READ_ONLY, ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE
FIRST_CALL = 2  # The number of the first call in a run that has had one turn.


@dataclass(slots=True, kw_only=True)
class Stage:
    """The stores over one database, and moves; each move asserts that it was made."""

    database: Database
    runs: SqlRunStore = field(init=False)
    steps: SqlStepStore = field(init=False)
    keeping: SqlKeeperStore = field(init=False)
    decisions: SqlDecisionStore = field(init=False)
    pausing: SqlPauseStore = field(init=False)

    def __post_init__(self) -> None:
        self.runs = SqlRunStore(self.database)
        self.steps = SqlStepStore(self.database)
        self.keeping = SqlKeeperStore(self.database)
        self.decisions = SqlDecisionStore(self.database)
        self.pausing = SqlPauseStore(self.database)

    def queued(self, *, mode: RunMode = RunMode.QUEUED, agent: str = "support") -> str:
        """A new run."""
        run_id = uuid.uuid4().hex
        self.runs.add([NewRun(id=run_id, agent=agent, input="refund order 17", mode=mode)])
        return run_id

    def asked(self, *effects: ToolEffect, mode: RunMode = RunMode.QUEUED, agent: str = "support") -> str:
        """A run whose first turn asked for calls with these effects, each in a batch of its own but for reads."""
        run_id = self.queued(mode=mode, agent=agent)
        calls, batch = [], 0
        for number, effect in enumerate(effects):
            batch += effect.is_write or number == 0 or effects[number - 1].is_write
            tool = "look" if effect is READ else "pay"
            calls.append(NewStep(kind=StepKind.TOOL, batch=batch, tool=tool, call_id=f"call-{number}", effect=effect))
        message: Json = {"role": "assistant", "content": None}
        self.settle(run_id, 1, Recorded(result=message, then=Turn(calls=tuple(calls))))
        return run_id

    def fenced(
        self,
        effect: ToolEffect = PLAIN,
        *,
        mode: RunMode = RunMode.QUEUED,
        deadline_seconds: float = 30,
        settles_within_seconds: float | None = 0,
        is_callable: bool = True,
        has_probe: bool = False,
        others: tuple[ToolEffect, ...] = (),
    ) -> str:
        """A run with a write in flight; its fence's id is the run's."""
        run_id = self.asked(effect, *others, mode=mode)
        request = FenceRequest(
            ref=self.ref(run_id, FIRST_CALL),
            id=run_id,
            owner="host/boot/1-1/x",
            tool="pay",
            effect=effect,
            deadline_seconds=deadline_seconds,
            settles_within_seconds=settles_within_seconds,
            is_callable=is_callable,
            has_probe=has_probe,
        )
        assert self.steps.fence(request) is FenceVerdict.STAMPED
        return run_id

    def unknown(
        self,
        effect: ToolEffect = PLAIN,
        *,
        deadline_seconds: float = -60,
        settles_within_seconds: float | None = 0,
        is_cancelled: bool = False,
        has_probe: bool = False,
        others: tuple[ToolEffect, ...] = (),
    ) -> str:
        """A dead letter with a write in doubt, whose call had that long when it was stamped just now."""
        run_id = self.fenced(
            effect,
            deadline_seconds=deadline_seconds,
            settles_within_seconds=settles_within_seconds,
            has_probe=has_probe,
            others=others,
        )
        if is_cancelled:
            self.runs.cancel(run_id, actor="ann", reason="wrong customer")
        self.stop(run_id, FIRST_CALL, outcome_unknown=True, fence_id=run_id)
        return run_id

    def failed(self, *effects: ToolEffect) -> str:
        """A dead letter over the first call of these, with nothing in doubt."""
        run_id = self.asked(*effects)
        self.stop(run_id, FIRST_CALL)
        return run_id

    def contradicted(self) -> str:
        """A dead letter like `failed`, with a contradiction."""
        run_id = self.failed(READ)
        self.change_run(run_id, has_contradiction=True)
        return run_id

    # --- single moves

    def stop(self, run_id: str, number: int, *, outcome_unknown: bool = False, fence_id: str | None = None) -> None:
        stopped = Stopped(
            reason=DeadLetterReason.NOT_RETRYABLE,
            failure_class=FailureClass.UNKNOWN,
            error="the tool raised",
            outcome_unknown=outcome_unknown,
        )
        self.settle(run_id, number, stopped, fence_id=fence_id)

    def complete(self, run_id: str, number: int, result: Json = "ok", *, fence_id: str | None = None) -> Settled:
        """A call returns that result."""
        return self.settle(run_id, number, Recorded(result=result, then=Join()), fence_id=fence_id)

    def answer(self, run_id: str, number: int, output: Json = "done") -> Settled:
        """A turn ends the run."""
        return self.settle(run_id, number, Recorded(result={"content": output}, then=Answer(output=output)))

    def settle(
        self, run_id: str, number: int, change: Recorded | Retried | Stopped, *, fence_id: str | None = None
    ) -> Settled:
        ref = self.ref(run_id, number)
        settlement = Settlement(
            ref=ref,
            owner=f"worker/{uuid.uuid4().hex}",
            effect=PLAIN if fence_id else READ,
            change=change,
            fence_id=fence_id,
        )
        settled = self.steps.settle(settlement)
        assert settled.verdict is Verdict.APPLIED, settled
        return settled

    # --- looking, and what time does

    def ref(self, run_id: str, number: int) -> StepRef:
        """The attempt of that step that may run now."""
        with self.database.reading() as connection:
            its_attempt = select(steps.c.attempt).where(steps.c.run_id == run_id, steps.c.number == number)
            return StepRef(run_id=run_id, number=number, attempt=connection.execute(its_attempt).scalar_one())

    def change_run(self, run_id: str, **values: object) -> None:
        with self.database.writing() as connection:
            connection.execute(update(runs).where(runs.c.id == run_id).values(values))

    def change_step(self, run_id: str, number: int, **values: object) -> None:
        with self.database.writing() as connection:
            of_step = (steps.c.run_id == run_id, steps.c.number == number)
            connection.execute(update(steps).where(*of_step).values(values))

    def age_fence(self, run_id: str, by: timedelta) -> None:
        """The fence's deadline is that much earlier, as if the time had passed."""
        fence = self.runs.run(run_id).pending_effect
        assert fence is not None
        self.change_run(run_id, pending_effect_deadline_at=fence.deadline_at - by)

    def kinds_of_events(self, run_id: str) -> list[str]:
        return [event.kind for event in self.runs.events(run_id)]
