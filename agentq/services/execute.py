"""Execute one attempt of a step: lease, read, fence, perform, settle, wake. The order is the protocol."""

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from agentq.domain.agents import Agent, Registry
from agentq.domain.effects import ToolEffect, stricter
from agentq.domain.errors import (
    AuditRefusedError,
    BrokerUnavailableError,
    LeasesUnavailableError,
    StoreUnavailableError,
)
from agentq.domain.failures import AuditPersistenceFailedException, FailureClass
from agentq.domain.loop import assistant_message, conversation, steps_for
from agentq.domain.model import DeadLetterReason, Json, ModelReply, StepKind, StepRef
from agentq.domain.outcomes import Answer, Join, Recorded, Retried, Stopped, Turn
from agentq.domain.retry import RetryPolicy, describe
from agentq.domain.tools import ResultNotJsonError, Tool, ToolContext, ToolError
from agentq.ports import (
    CallLimit,
    Clock,
    Dispatcher,
    FenceRequest,
    FenceVerdict,
    Loaded,
    Settled,
    Settlement,
    StepStore,
    Verdict,
    Wakeup,
)
from agentq.services.heartbeat import Heartbeat, Lease
from agentq.services.record import StepRecorder, not_kept

logger = logging.getLogger(__name__)

HAND_BACK_SECONDS = 2.0
ASK_AGAIN_SECONDS = 0.5


class Models(Protocol):
    """Asks the model of an agent; raises what the classifier knows."""

    def complete(self, agent: Agent, messages: list[dict[str, object]]) -> ModelReply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how much a step may take."""

    operation_deadline_seconds: float
    settle_patience_seconds: float
    hand_back_seconds: float
    result_bytes_max: int
    turns_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What a delivery came to. `wakeups` are the next steps; `stopped` is set when this step ended its run."""

    wakeups: tuple[Wakeup, ...] = ()
    stopped: Stopped | None = None
    agent: str | None = None


NOTHING = Executed()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What the parts of an execution share."""

    loaded: Loaded
    lease: Lease
    agent: Agent
    effect: ToolEffect = ToolEffect.READ_ONLY
    fence_id: str | None = None

    @property
    def ref(self) -> StepRef:
        return self.loaded.step.ref


class StepExecutor:
    """The spine: workers and interactive runs drive the same one."""

    def __init__(
        self,
        *,
        store: StepStore,
        heartbeat: Heartbeat,
        registry: Registry,
        models: Models,
        policy: RetryPolicy,
        clock: Clock,
        call_limit: CallLimit,
        limits: Limits,
        new_owner: Callable[[], str],
        dispatcher: Dispatcher | None,
    ) -> None:
        """Without a dispatcher nothing is published: the caller drives the next steps itself."""
        self._store = store
        self._heartbeat = heartbeat
        self._registry = registry
        self._models = models
        self._policy = policy
        self._clock = clock
        self._call_limit = call_limit
        self._limits = limits
        self._new_owner = new_owner
        self._dispatcher = dispatcher

    def execute(self, ref: StepRef) -> Executed:
        """Execute one attempt. Safe to call any number of times: who comes too late or too often leaves quietly."""
        try:
            with self._heartbeat.hold(ref, self._new_owner()) as lease:
                if lease is None:
                    return NOTHING  # Somebody is at it; if not, the keeper will find it.
                loaded = self._store.load(ref)
                if loaded is None or loaded.fence is not None:
                    return NOTHING  # Finished, cancelled, a newer attempt; or a write that the keeper must judge.
                return self._execute(loaded, lease)
        except (LeasesUnavailableError, StoreUnavailableError) as error:
            # Nothing was called: the step stays available, and the keeper publishes it again.
            logger.warning("left run=%s step=%s attempt=%s: %s", ref.run_id, ref.number, ref.attempt, error)
            return NOTHING

    def _execute(self, loaded: Loaded, lease: Lease) -> Executed:
        agent = self._registry.agent(loaded.run.agent)
        if agent is None:
            self._hand_back(loaded, f"this worker serves no agent {loaded.run.agent!r}")
            return NOTHING
        attempt = _Attempt(loaded=loaded, lease=lease, agent=agent)
        if loaded.step.kind is StepKind.MODEL:
            return self._settle(attempt, self._take_turn(attempt))
        return self._execute_call(attempt)

    # --- a model turn

    def _take_turn(self, attempt: _Attempt) -> Recorded | Retried | Stopped:
        loaded, agent = attempt.loaded, attempt.agent
        turns = sum(item.kind is StepKind.MODEL for item in loaded.history)
        turns_max = agent.turns_max or self._limits.turns_max
        if turns >= turns_max:
            return Stopped(
                reason=DeadLetterReason.NOT_RETRYABLE,
                failure_class=FailureClass.CONFIGURATION,
                error=f"no answer after {turns} model turns; the limit is {turns_max} (Agent.turns_max)",
            )
        history = ((item.kind, item.call_id, item.result) for item in loaded.history)
        try:
            reply = self._models.complete(agent, conversation(agent, loaded.run.input, history))
        except Exception as error:
            return self._after_failure(attempt, error)
        calls = steps_for(agent, reply.tool_calls)
        return Recorded(
            result=assistant_message(reply),
            then=Turn(calls=calls) if calls else Answer(output=reply.text),
            usage=reply.usage,
        )

    # --- a tool call

    def _execute_call(self, attempt: _Attempt) -> Executed:
        step = attempt.loaded.step
        name = step.tool or ""
        tool = attempt.agent.tool(name)
        effect = stricter(step.effect, self._registry.effects.effect_for(name))
        attempt = replace(attempt, effect=effect)
        if tool is None and self._was_handed_back(attempt, name):
            return NOTHING
        if effect.is_write and not self._call_limit.can_end_calls:
            self._hand_back(attempt.loaded, "this worker can't end a call, so it makes no writes")
            return NOTHING

        problem = tool.problem_with(step.arguments) if tool else None
        if problem:
            return self._settle(attempt, _error_result(problem))
        if not effect.is_write:
            assert tool is not None  # An unknown tool is a write.
            return self._settle(attempt, self._perform(attempt, tool, self._deadline_seconds(tool)))
        return self._execute_write(attempt, tool, name)

    def _execute_write(self, attempt: _Attempt, tool: Tool | None, name: str) -> Executed:
        began = self._clock.elapsed_seconds()  # Before the stamp is sent: the deadline in SQL can only be later.
        deadline_seconds = self._deadline_seconds(tool)
        attempt = self._fenced(attempt, tool, name, deadline_seconds)
        if attempt.fence_id is None:
            return NOTHING  # A write is in flight elsewhere, the run ended, or nothing could be stamped. No call.
        if tool is None:
            return self._settle(attempt, _error_result(f"there is no tool {name!r} any more"))

        left_seconds = began + deadline_seconds - self._clock.elapsed_seconds()
        if left_seconds <= 0 or not self._heartbeat.extend(attempt.lease, left_seconds):
            self._take_back(attempt)
            return NOTHING
        left_seconds = began + deadline_seconds - self._clock.elapsed_seconds()
        if left_seconds <= 0:
            self._take_back(attempt)
            return NOTHING
        with self._call_limit.within(left_seconds):
            change = self._perform(attempt, tool, left_seconds)
        return self._settle(attempt, change)

    def _fenced(self, attempt: _Attempt, tool: Tool | None, name: str, deadline_seconds: float) -> _Attempt:
        """Stamp the fence; without `fence_id` in what comes back, the tool must not be called."""
        request = FenceRequest(
            ref=attempt.ref,
            id=uuid.uuid4().hex,
            owner=attempt.lease.owner,
            tool=name,
            effect=attempt.effect,
            deadline_seconds=deadline_seconds,
            settles_within_seconds=tool.settles_within_seconds if tool else None,
            is_callable=tool is not None,
        )
        while True:
            try:
                verdict = self._store.fence(request)
                break
            except AuditRefusedError as error:
                logger.error("not calling run=%s step=%s: %s", request.ref.run_id, request.ref.number, error)
                return attempt
            except StoreUnavailableError as error:
                # It may stand all the same. Until that is known, lease and message are kept.
                logger.warning("asking for the fence again run=%s: %s", request.ref.run_id, error)
                self._clock.sleep(ASK_AGAIN_SECONDS)
        if verdict is not FenceVerdict.STAMPED:
            logger.info("fence refused run=%s step=%s: %s", request.ref.run_id, request.ref.number, verdict)
            return attempt
        return replace(attempt, fence_id=request.id)

    def _take_back(self, attempt: _Attempt) -> None:
        """Nothing was called, and only this process could have: that is an outcome too, and must reach the store."""
        assert attempt.fence_id is not None
        while True:
            try:
                self._store.take_back(attempt.ref, attempt.fence_id, attempt.lease.owner)
                return
            except StoreUnavailableError as error:
                logger.warning("taking the fence back again run=%s: %s", attempt.ref.run_id, error)
                self._clock.sleep(ASK_AGAIN_SECONDS)

    def _perform(self, attempt: _Attempt, tool: Tool, left_seconds: float) -> Recorded | Retried | Stopped:
        step = attempt.loaded.step
        context = self._context(attempt, left_seconds)
        try:
            result = tool.call(context, step.arguments)  # type: ignore[arg-type]  # Checked by problem_with.
        except ToolError as error:
            if not attempt.effect.is_write or error.nothing_happened:
                return _error_result(str(error))
            return self._unknown(attempt, error)
        except ResultNotJsonError as error:
            return not_kept(Recorded(result=None, then=Join()), str(error), is_write=attempt.effect.is_write)
        except (Exception, SystemExit) as error:
            return self._after_call_failed(attempt, tool, error)
        return self._kept(result, attempt.effect)

    def _kept(self, result: Json, effect: ToolEffect) -> Recorded:
        change = Recorded(result=result, then=Join())
        size = len(json.dumps(result))
        if size <= self._limits.result_bytes_max:
            return change
        why = f"it has {size} bytes, the limit is {self._limits.result_bytes_max}"
        return not_kept(change, why, is_write=effect.is_write)

    def _after_call_failed(self, attempt: _Attempt, tool: Tool, error: BaseException) -> Recorded | Retried | Stopped:
        change = self._after_failure(attempt, error)
        is_unknown = isinstance(change, Stopped) and change.failure_class is FailureClass.UNKNOWN
        if is_unknown and not attempt.effect.is_write and not tool.unknown_is_dead_letter:
            return _error_result(describe(error))
        return change

    def _unknown(self, attempt: _Attempt, error: ToolError) -> Stopped:
        return Stopped(
            reason=DeadLetterReason.NOT_RETRYABLE,
            failure_class=FailureClass.UNKNOWN,
            error=describe(error),
            outcome_unknown=attempt.effect.is_plain_write,
        )

    def _after_failure(self, attempt: _Attempt, error: BaseException) -> Retried | Stopped:
        step = attempt.loaded.step
        return self._policy.after_failure(
            error,
            effect=attempt.effect,
            tries=step.tries,
            throttled_seconds=attempt.loaded.throttled_seconds,
            chance=self._clock.random(),
        )

    def _context(self, attempt: _Attempt, left_seconds: float) -> ToolContext:
        step, run = attempt.loaded.step, attempt.loaded.run
        ends_at = self._clock.elapsed_seconds() + left_seconds
        return ToolContext(
            run_id=run.id,
            step=step.number,
            attempt=step.attempt,
            attempts_left=self._policy.attempts_left(step.tries),
            idempotency_key=idempotency_key(run.id, step.number, step.call_id),
            seconds_left=lambda: ends_at - self._clock.elapsed_seconds(),
            cancel_requested=lambda: attempt.lease.is_cancel_requested,
            metadata=run.metadata,
        )

    def _deadline_seconds(self, tool: Tool | None) -> float:
        declared = tool.deadline_seconds if tool else None
        return declared or self._limits.operation_deadline_seconds

    # --- the end of an attempt

    def _settle(self, attempt: _Attempt, change: Recorded | Retried | Stopped) -> Executed:
        settlement = Settlement(
            ref=attempt.ref,
            owner=attempt.lease.owner,
            effect=attempt.effect,
            change=change,
            fence_id=attempt.fence_id,
        )
        recorder = StepRecorder(self._store, self._clock, patience_seconds=self._limits.settle_patience_seconds)
        is_recorded = recorder.record_step(settlement, still_useful=lambda: not attempt.lease.is_lost)
        if not is_recorded and attempt.effect.is_write:
            return self._stop_unrecorded(attempt, recorder.error)
        if not is_recorded:
            logger.warning("dropped a read's result run=%s: %s", attempt.ref.run_id, recorder.error)
            return NOTHING
        assert recorder.answer is not None
        return self._wake(attempt, recorder.answer, change)

    def _wake(self, attempt: _Attempt, settled: Settled, change: Recorded | Retried | Stopped) -> Executed:
        self._log(attempt, settled)
        if settled.wakeups and self._dispatcher is not None:
            try:
                self._dispatcher.publish(settled.wakeups)
            except BrokerUnavailableError as error:
                logger.warning("couldn't wake the next steps of run=%s: %s", attempt.ref.run_id, error)
        has_stopped = isinstance(change, Stopped) and settled.verdict in (Verdict.APPLIED, Verdict.ALREADY)
        return Executed(
            wakeups=settled.wakeups,
            stopped=change if has_stopped and isinstance(change, Stopped) else None,
            agent=attempt.agent.name,
        )

    def _stop_unrecorded(self, attempt: _Attempt, error: Exception | None) -> Executed:
        """A write was performed and its record refused: the run must not go on over it, nor may it be run again."""
        failure = AuditPersistenceFailedException(
            f"the outcome of step {attempt.ref.number} of run {attempt.ref.run_id} could not be recorded"
        )
        failure.__cause__ = error
        logger.error("%s: %s", failure, error)
        change = self._after_failure(attempt, failure)
        assert isinstance(change, Stopped)  # The classifier calls it UNKNOWN, which is never retried.
        recorder = StepRecorder(self._store, self._clock, patience_seconds=0)
        is_recorded = recorder.record_step(
            Settlement(
                ref=attempt.ref,
                owner=attempt.lease.owner,
                effect=attempt.effect,
                change=change,
                fence_id=attempt.fence_id,
                with_events=False,
            )
        )
        if not is_recorded or recorder.answer is None:
            return Executed(stopped=change, agent=attempt.agent.name)  # The fence stands: the keeper will judge it.
        return self._wake(attempt, recorder.answer, change)

    def _was_handed_back(self, attempt: _Attempt, name: str) -> bool:
        """A tool that this worker doesn't know: another worker may, for as long as a deploy takes."""
        since = attempt.loaded.handed_back_seconds
        if since is not None and since >= self._limits.hand_back_seconds:
            return False
        self._hand_back(attempt.loaded, f"this worker's agent {attempt.agent.name!r} has no tool {name!r}")
        return True

    def _hand_back(self, loaded: Loaded, why: str) -> None:
        logger.error("handed back run=%s step=%s: %s", loaded.run.id, loaded.step.number, why)
        self._store.hand_back(loaded.step.ref, due_in_seconds=HAND_BACK_SECONDS, why=why)

    def _log(self, attempt: _Attempt, settled: Settled) -> None:
        ref, step = attempt.ref, attempt.loaded.step
        logger.info(
            "settled run=%s step=%s attempt=%s %s verdict=%s run_status=%s",
            ref.run_id,
            ref.number,
            ref.attempt,
            f"tool={step.tool}" if step.tool else "model",
            settled.verdict,
            settled.run_status,
        )


def idempotency_key(run_id: str, number: int, call_id: str | None) -> str:
    """The same for every attempt of a step, different for any other call."""
    return sha256(f"{run_id}/{number}/{call_id}".encode()).hexdigest()[:32]


def _error_result(text: str) -> Recorded:
    return Recorded(result=text, then=Join(), is_error=True)
