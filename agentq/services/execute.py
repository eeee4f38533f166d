"""Execute one attempt of a step: lease, read, fence, perform, settle, wake. The order is the protocol."""

import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from agentq.domain.agents import Agent, Registry
from agentq.domain.effects import ToolEffect, stricter
from agentq.domain.errors import (
    BrokerUnavailableError,
    LeasesUnavailableError,
    OutcomeNotKeptError,
    StoreRefusedError,
    StoreUnavailableError,
)
from agentq.domain.failures import AuditPersistenceFailedException, FailureClass
from agentq.domain.loop import assistant_message, conversation, steps_for
from agentq.domain.model import DeadLetterReason, Fence, Json, RunMode, RunStatus, StepKind, StepRef
from agentq.domain.outcomes import Answer, Join, Recorded, Retried, Stopped, Turn
from agentq.domain.probes import ProbeReport, ProbeVerdict
from agentq.domain.retry import RetryPolicy, describe
from agentq.domain.tools import ResultNotJsonError, Tool, ToolContext, ToolError
from agentq.ports.dispatch import Dispatcher, Wakeup
from agentq.ports.steps import (
    FenceRequest,
    FenceVerdict,
    Loaded,
    NextProbe,
    OutcomeFiles,
    ProbeWord,
    Settled,
    Settlement,
    StepStore,
    Verdict,
)
from agentq.ports.world import CallLimit, Clock, Models
from agentq.services.heartbeat import Heartbeat, Lease
from agentq.services.pauses import PauseBoard
from agentq.services.probe import AskAgain, Prober
from agentq.services.record import StepRecorder, not_kept

logger = logging.getLogger(__name__)

HAND_BACK_SECONDS = 2.0
ASK_AGAIN_SECONDS = 0.5
PROBE_AGAIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how much a step may take."""

    operation_deadline_seconds: float
    settle_patience_seconds: float
    hand_back_seconds: float
    result_bytes_max: int
    turns_max: int
    probe_deadline_seconds: float
    probes_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What a delivery came to. `wakeups` are the next steps; `stopped` is set when this step ended its run."""

    wakeups: tuple[Wakeup, ...] = ()
    stopped: Stopped | None = None
    agent: str | None = None


NOTHING = Executed()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What the parts of an execution share. `tool` None: a model turn, or a tool that this process doesn't know."""

    loaded: Loaded
    lease: Lease
    agent: Agent
    tool: Tool | None = None
    effect: ToolEffect = ToolEffect.READ_ONLY
    fence_id: str | None = None

    @property
    def ref(self) -> StepRef:
        return self.loaded.step.ref

    @property
    def may_have_written(self) -> bool:
        return self.fence_id is not None and self.tool is not None


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
        outcome_files: OutcomeFiles | None = None,
    ) -> None:
        """Without a dispatcher nothing is published: the caller drives the next steps itself. Without outcome files an
        outcome that the database doesn't take is lost, and its write unknown."""
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
        self._pauses = PauseBoard(store, clock)
        self._outcome_files = outcome_files
        self._prober = Prober(
            store=store,
            policy=policy,
            clock=clock,
            call_limit=call_limit,
            deadline_seconds=limits.probe_deadline_seconds,
            probes_max=limits.probes_max,
        )

    def execute(self, ref: StepRef) -> Executed:
        """Execute one attempt. Safe to call any number of times: who comes too late or too often leaves quietly."""
        try:
            with self._heartbeat.hold(ref, self._new_owner()) as lease:
                if lease is None:
                    return NOTHING  # Somebody is at it; if not, the keeper will find it.
                loaded = self._store.load(ref)
                if loaded is None:
                    lease.comes_to_nothing = True
                    return NOTHING  # Finished, cancelled, or a newer attempt.
                if loaded.fence is not None:
                    return self._probe(loaded, loaded.fence, lease)
                return self._execute(loaded, lease)
        except (LeasesUnavailableError, StoreUnavailableError) as error:
            # No call was made here: the step stays available, and the keeper publishes it again.
            logger.warning("left run=%s step=%s attempt=%s: %s", ref.run_id, ref.number, ref.attempt, error)
            return NOTHING

    def _execute(self, loaded: Loaded, lease: Lease) -> Executed:
        agent = self._registry.agent(loaded.run.agent)
        if agent is None:
            self._hand_back(loaded, lease, f"this worker serves no agent {loaded.run.agent!r}")
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
            message, calls = assistant_message(reply), steps_for(agent, reply.tool_calls)
        except (Exception, SystemExit) as error:
            return self._after_failure(attempt, error)
        return Recorded(
            result=message, then=Turn(calls=calls) if calls else Answer(output=reply.text), usage=reply.usage
        )

    # --- a tool call

    def _execute_call(self, attempt: _Attempt) -> Executed:
        step = attempt.loaded.step
        name = step.tool or ""
        tool = attempt.agent.tool(name)
        effect = stricter(step.effect, self._registry.effects.effect_for(name))
        attempt = replace(attempt, tool=tool, effect=effect)
        if tool is None:
            return NOTHING if self._was_handed_back(attempt, name) else self._refuse_unknown(attempt, name)
        if effect.is_write and not self._call_limit.can_end_calls:
            self._hand_back(attempt.loaded, attempt.lease, "this worker can't end a call, so it makes no writes")
            return NOTHING

        problem = tool.problem_with(step.arguments)
        if problem:
            return self._settle(attempt, _error_result(problem))
        if effect.is_write:
            return self._execute_write(attempt, tool)
        if self._pauses.stops(agent=attempt.agent.name, tool=name, is_write=False):
            self._store.park(attempt.ref)
            return NOTHING
        ends_at = self._clock.elapsed_seconds() + self._deadline_seconds(tool)
        return self._settle(attempt, self._perform(attempt, tool, ends_at))

    def _refuse_unknown(self, attempt: _Attempt, name: str) -> Executed:
        """Nobody knows the tool: the model is told. Fenced all the same, because it fails closed as a plain write."""
        attempt = replace(attempt, effect=ToolEffect.NON_IDEMPOTENT_WRITE)
        request = self._fence_request(attempt, name, self._limits.operation_deadline_seconds)
        if not self._fence(request):
            return NOTHING
        attempt = replace(attempt, fence_id=request.id)
        return self._settle(attempt, _error_result(f"there is no tool {name!r} any more"))

    def _execute_write(self, attempt: _Attempt, tool: Tool) -> Executed:
        deadline_seconds = self._deadline_seconds(tool)
        # Before the stamp is sent: the deadline in SQL can only be later.
        ends_at = self._clock.elapsed_seconds() + deadline_seconds
        request = self._fence_request(attempt, tool.name, deadline_seconds)
        if not self._fence(request):
            return NOTHING  # A write is in flight elsewhere, the run ended, or nothing could be stamped. No call.
        attempt = replace(attempt, fence_id=request.id)
        change = self._perform_in_time(attempt, tool, ends_at)
        if change is None:
            self._take_back(attempt.ref, request)
            return NOTHING
        if tool.has_probe and isinstance(change, Stopped) and change.outcome_unknown:
            return self._probe_failed_call(attempt, tool, change)
        return self._settle(attempt, change)

    def _perform_in_time(self, attempt: _Attempt, tool: Tool, ends_at: float) -> Recorded | Retried | Stopped | None:
        """None: the fence got old or the lease was lost before the call, so it wasn't made."""
        if not self._heartbeat.extend(attempt.lease, ends_at - self._clock.elapsed_seconds()):
            return None
        left_seconds = ends_at - self._clock.elapsed_seconds()
        if left_seconds <= 0:
            return None
        with self._call_limit.within(left_seconds):
            # The last look comes after the limit is set: who sleeps between the two finds out here, who sleeps later
            # is ended.
            if attempt.lease.is_lost or self._clock.elapsed_seconds() >= ends_at:
                return None
            return self._perform(attempt, tool, ends_at)

    def _fence_request(self, attempt: _Attempt, name: str, deadline_seconds: float) -> FenceRequest:
        tool = attempt.tool
        return FenceRequest(
            ref=attempt.ref,
            id=uuid.uuid4().hex,
            owner=attempt.lease.owner,
            tool=name,
            effect=attempt.effect,
            deadline_seconds=deadline_seconds,
            settles_within_seconds=tool.settles_within_seconds if tool else None,
            is_callable=tool is not None,
            has_probe=tool is not None and tool.has_probe,
        )

    def _fence(self, request: FenceRequest) -> bool:
        """Stamp it. False: it doesn't stand, so the tool must not be called."""
        ref = request.ref
        while True:
            try:
                verdict = self._store.fence(request)
                break
            except StoreRefusedError as error:
                logger.error("not calling run=%s step=%s: %s", ref.run_id, ref.number, error)
                return False
            except StoreUnavailableError as error:
                # It may stand all the same. Until that is known, lease and message are kept.
                logger.warning("asking for the fence again run=%s: %s", ref.run_id, error)
                self._clock.sleep(ASK_AGAIN_SECONDS)
        if verdict is not FenceVerdict.STAMPED:
            logger.info("fence refused run=%s step=%s: %s", ref.run_id, ref.number, verdict)
        if verdict is FenceVerdict.PAUSED:
            self._store.park(ref)
        return verdict is FenceVerdict.STAMPED

    def _take_back(self, ref: StepRef, request: FenceRequest) -> None:
        """Nothing was called, and only this process could have: that is an outcome too, and must reach the store."""
        while True:
            try:
                self._store.take_back(ref, request.id, request.owner)
                return
            except StoreUnavailableError as error:
                logger.warning("taking the fence back again run=%s: %s", ref.run_id, error)
                self._clock.sleep(ASK_AGAIN_SECONDS)

    def _perform(self, attempt: _Attempt, tool: Tool, ends_at: float) -> Recorded | Retried | Stopped:
        arguments: Any = attempt.loaded.step.arguments  # An object: checked before.
        try:
            result = tool.call(self._context(attempt.loaded, attempt.lease, ends_at), arguments)
        except ResultNotJsonError as error:
            return not_kept(Recorded(result=None, then=Join()), str(error), is_write=attempt.effect.is_write)
        except (Exception, SystemExit) as error:
            return self._after_call_failed(attempt, tool, error)
        return self._kept(result, attempt.effect)

    def _kept(self, result: Json, effect: ToolEffect) -> Recorded:
        change = Recorded(result=result, then=Join())
        try:
            size = len(json.dumps(result))
        except (ValueError, RecursionError) as error:  # A number with too many digits, or too deep.
            return not_kept(change, f"it is not JSON: {error}", is_write=effect.is_write)
        if size <= self._limits.result_bytes_max:
            return change
        why = f"it has {size} bytes, the limit is {self._limits.result_bytes_max}"
        return not_kept(change, why, is_write=effect.is_write)

    def _after_call_failed(self, attempt: _Attempt, tool: Tool, error: BaseException) -> Recorded | Retried | Stopped:
        is_read = not attempt.effect.is_write
        if isinstance(error, ToolError) and (is_read or error.nothing_happened):
            return _error_result(str(error))
        change = self._after_failure(attempt, error)
        is_unknown = isinstance(change, Stopped) and change.failure_class is FailureClass.UNKNOWN
        if is_unknown and is_read and not tool.unknown_is_dead_letter:
            return _error_result(describe(error))
        return change

    def _after_failure(self, attempt: _Attempt, error: BaseException) -> Retried | Stopped:
        step = attempt.loaded.step
        return self._policy.after_failure(
            error,
            effect=attempt.effect,
            tries=step.tries,
            throttled_seconds=attempt.loaded.throttled_seconds,
            chance=self._clock.random(),
        )

    def _context(self, loaded: Loaded, lease: Lease, ends_at: float) -> ToolContext:
        step, run = loaded.step, loaded.run
        return ToolContext(
            run_id=run.id,
            step=step.number,
            attempt=step.attempt,
            attempts_left=self._policy.attempts_left(step.tries),
            idempotency_key=idempotency_key(run.id, step.number, step.call_id),
            seconds_left=lambda: ends_at - self._clock.elapsed_seconds(),
            cancel_requested=lambda: lease.is_cancel_requested,
            metadata=run.metadata,
        )

    def _deadline_seconds(self, tool: Tool) -> float:
        return tool.deadline_seconds or self._limits.operation_deadline_seconds

    # --- a write whose outcome is unknown

    def _probe(self, loaded: Loaded, fence: Fence, lease: Lease) -> Executed:
        """A write may be in flight: this delivery makes no call, it asks the tool's probe what became of that one."""
        step, agent = loaded.step, self._registry.agent(loaded.run.agent)
        if (fence.number, fence.attempt) != (step.number, step.attempt) or not fence.has_probe:
            lease.comes_to_nothing = True
            return NOTHING  # For the keeper to judge.
        tool = agent.tool(step.tool or "") if agent else None
        report, word = self._ask_probe(tool, loaded, lease)
        if report.verdict is ProbeVerdict.HAPPENED:
            return self._settle_probed(loaded, fence, lease, word, self._happened(report, fence.effect))
        change = self._prober.after(report, fence, loaded)
        if not isinstance(change, AskAgain):
            return self._settle_probed(loaded, fence, lease, word, change)
        self._prober.ask_again(
            NextProbe(
                ref=step.ref,
                fence_id=fence.id,
                owner=lease.owner,
                verdict=report.verdict,
                wait_seconds=change.wait_seconds,
                waits_for_fence=change.waits_for_fence,
            )
        )
        return NOTHING

    def _probe_failed_call(self, attempt: _Attempt, tool: Tool, stopped: Stopped) -> Executed:
        """The call raised, so its outcome is unknown: asked at once, and if that decides nothing again later, where
        somebody takes the step up later."""
        loaded, lease = attempt.loaded, attempt.lease
        report, word = self._ask_probe(tool, loaded, lease)
        if report.verdict is ProbeVerdict.HAPPENED:
            change: Recorded | Stopped = self._happened(report, attempt.effect)
        elif loaded.run.mode is RunMode.INTERACTIVE or not report.may_change:
            change = stopped
        else:
            assert attempt.fence_id is not None
            self._prober.ask_again(
                NextProbe(
                    ref=attempt.ref,
                    fence_id=attempt.fence_id,
                    owner=lease.owner,
                    verdict=report.verdict,
                    wait_seconds=PROBE_AGAIN_SECONDS,
                    waits_for_fence=False,
                    failure_class=stopped.failure_class,
                    error=stopped.error,
                )
            )
            return NOTHING
        return self._settle(attempt, change, probe=word)

    def _ask_probe(self, tool: Tool | None, loaded: Loaded, lease: Lease) -> tuple[ProbeReport, ProbeWord]:
        return self._prober.ask(tool, loaded, lambda ends_at: self._context(loaded, lease, ends_at), began=lease.began)

    def _happened(self, report: ProbeReport, effect: ToolEffect) -> Recorded:
        if report.error is not None:
            return not_kept(Recorded(result=None, then=Join()), report.error, is_write=effect.is_write)
        return self._kept(report.result, effect)

    def _settle_probed(
        self, loaded: Loaded, fence: Fence, lease: Lease, word: ProbeWord, change: Recorded | Retried | Stopped
    ) -> Executed:
        settlement = Settlement(
            ref=loaded.step.ref,
            owner=lease.owner,
            effect=fence.effect,
            change=change,
            fence_id=fence.id,
            probe=word,
            suppressed=lease.suppressed(run_age_seconds=loaded.run_age_seconds),
        )
        recorder = StepRecorder(self._store, self._clock, patience_seconds=self._limits.settle_patience_seconds)
        if recorder.record_step(settlement):
            return self._wake(loaded, recorder.answer, change)
        # The fence stands, and the world can be asked again.
        logger.error("couldn't record what the probe said run=%s: %s", loaded.run.id, recorder.error)
        return NOTHING

    # --- the end of an attempt

    def _settle(
        self, attempt: _Attempt, change: Recorded | Retried | Stopped, *, probe: ProbeWord | None = None
    ) -> Executed:
        recorder = StepRecorder(self._store, self._clock, patience_seconds=self._limits.settle_patience_seconds)
        settlement = replace(self._settlement(attempt, change), probe=probe)
        if recorder.record_step(settlement, still_useful=lambda: not attempt.lease.is_lost):
            return self._wake(attempt.loaded, recorder.answer, change)
        assert recorder.error is not None
        is_kept = attempt.may_have_written and isinstance(change, Recorded) and self._is_kept(settlement)
        if attempt.may_have_written or not isinstance(recorder.error, StoreUnavailableError):
            return self._stop_unrecorded(attempt, recorder.error, is_kept=is_kept)
        # Redone later, at no charge.
        logger.warning("dropped what nobody could store run=%s: %s", attempt.ref.run_id, recorder.error)
        return NOTHING

    def _is_kept(self, settlement: Settlement) -> bool:
        """The outcome waits in a file, for the keeper to bring home."""
        if self._outcome_files is None:
            return False
        ref = settlement.ref
        try:
            self._outcome_files.keep(settlement)
        except OutcomeNotKeptError as error:
            logger.error("lost an outcome, its fence stays run=%s step=%s: %s", ref.run_id, ref.number, error)
            return False
        logger.warning("kept the outcome of a write in a file run=%s step=%s", ref.run_id, ref.number)
        return True

    def _stop_unrecorded(self, attempt: _Attempt, error: Exception, *, is_kept: bool) -> Executed:
        """The outcome was refused: the run must not go on over it, nor may a write be made again. One that is kept
        comes later, and heals the run."""
        failure = error
        if attempt.may_have_written:
            failure = AuditPersistenceFailedException(
                f"the outcome of step {attempt.ref.number} of run {attempt.ref.run_id} could not be recorded"
            )
            failure.__cause__ = error
        logger.error("stopping run=%s step=%s: %s", attempt.ref.run_id, attempt.ref.number, error)
        change = self._after_failure(attempt, failure)
        recorder = StepRecorder(self._store, self._clock, patience_seconds=0)
        # By another owner: the outcome, should it come after all, must not look as if it was recorded by this.
        stop = replace(self._settlement(attempt, change), with_events=False, owner=f"{attempt.lease.owner}/stop")
        if recorder.record_step(stop):
            return self._wake(attempt.loaded, recorder.answer, change)
        if attempt.may_have_written and not is_kept and isinstance(change, Stopped):
            return Executed(stopped=change, agent=attempt.agent.name)  # The fence stands: the keeper will judge it.
        return NOTHING

    def _settlement(self, attempt: _Attempt, change: Recorded | Retried | Stopped) -> Settlement:
        return Settlement(
            ref=attempt.ref,
            owner=attempt.lease.owner,
            effect=attempt.effect,
            change=change,
            fence_id=attempt.fence_id,
            suppressed=attempt.lease.suppressed(run_age_seconds=attempt.loaded.run_age_seconds),
            held_seconds=self._clock.elapsed_seconds() - attempt.lease.began,
        )

    def _wake(self, loaded: Loaded, settled: Settled | None, change: Recorded | Retried | Stopped) -> Executed:
        assert settled is not None  # It was recorded.
        self._log(loaded, settled)
        if settled.wakeups and self._dispatcher is not None:
            try:
                self._dispatcher.publish(settled.wakeups)
            except BrokerUnavailableError as error:
                logger.warning("couldn't wake the next steps of run=%s: %s", loaded.run.id, error)
        has_ended_run = settled.run_status is RunStatus.FAILED and settled.verdict in (Verdict.APPLIED, Verdict.ALREADY)
        return Executed(
            wakeups=settled.wakeups,
            stopped=change if isinstance(change, Stopped) and has_ended_run else None,
            agent=loaded.run.agent,
        )

    def _was_handed_back(self, attempt: _Attempt, name: str) -> bool:
        """A tool that this worker doesn't know: another worker may, for as long as a deploy takes."""
        since = attempt.loaded.handed_back_seconds
        if since is not None and since >= self._limits.hand_back_seconds:
            return False
        why = f"this worker's agent {attempt.agent.name!r} has no tool {name!r}"
        self._hand_back(attempt.loaded, attempt.lease, why)
        return True

    def _hand_back(self, loaded: Loaded, lease: Lease, why: str) -> None:
        logger.error("handed back run=%s step=%s: %s", loaded.run.id, loaded.step.number, why)
        self._store.hand_back(loaded.step.ref, due_in_seconds=HAND_BACK_SECONDS, why=why, owner=lease.owner)

    def _log(self, loaded: Loaded, settled: Settled) -> None:
        ref, step = loaded.step.ref, loaded.step
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
