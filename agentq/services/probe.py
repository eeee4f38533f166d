"""Ask the outside world what became of a write whose outcome nobody recorded, and say what follows from its answer."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from agentq.domain.errors import StoreUnavailableError
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, Fence, Step
from agentq.domain.outcomes import Retried, Stopped
from agentq.domain.probes import ProbeReport, ProbeVerdict
from agentq.domain.retry import RetryPolicy, describe
from agentq.domain.tools import ResultNotJsonError, Tool, ToolContext
from agentq.ports.steps import Loaded, NextProbe, ProbeWord, StepStore
from agentq.ports.world import CallLimit, Clock

logger = logging.getLogger(__name__)

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 2.0, 60.0
STORE_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAgain:
    """Nothing follows yet: ask again after a while, with `waits_for_fence` not before "did not happen" would count."""

    wait_seconds: float = 0.0
    waits_for_fence: bool = False


class Prober:
    """Asks tools' probes in this process. Its caller holds the step's lease, and makes no call."""

    def __init__(
        self,
        *,
        store: StepStore,
        policy: RetryPolicy,
        clock: Clock,
        call_limit: CallLimit,
        deadline_seconds: float,
        probes_max: int,
    ) -> None:
        self._store = store
        self._policy = policy
        self._clock = clock
        self._call_limit = call_limit
        self._deadline_seconds = deadline_seconds
        self._probes_max = probes_max

    def ask(
        self, tool: Tool | None, loaded: Loaded, context: Callable[[float], ToolContext], *, began: float
    ) -> tuple[ProbeReport, ProbeWord]:
        """What the tool's probe says of this step's call; never raises. One that hangs ends this process: then the
        keeper has it asked again.

        `context` makes one that ends at that moment of the clock; `began` is one before the step was read.
        """
        report = self._ask(tool, loaded.step, context)
        since_seconds = self._clock.elapsed_seconds() - began
        word = ProbeWord(
            verdict=report.verdict,
            looked_after=loaded.loaded_at,
            looked_before=loaded.loaded_at + timedelta(seconds=since_seconds),
        )
        return report, word

    def after(self, report: ProbeReport, fence: Fence, loaded: Loaded) -> Retried | Stopped | AskAgain:
        """What follows from what it said, other than that the call happened, when it was asked after that reading."""
        return after_probe(
            report,
            fence,
            loaded,
            policy=self._policy,
            probes_max=self._probes_max,
            chance=self._clock.random(),
        )

    def ask_again(self, request: NextProbe) -> None:
        """Returns once it is stored: how the call failed is known here alone, and decides what is charged for it."""
        logger.info(
            "asked the probe run=%s step=%s attempt=%s: %s, asking again",
            request.ref.run_id,
            request.ref.number,
            request.ref.attempt,
            request.verdict,
        )
        while True:
            try:
                self._store.ask_again(request)
                return
            except StoreUnavailableError as error:
                logger.warning("storing what the probe said again run=%s: %s", request.ref.run_id, error)
                self._clock.sleep(STORE_AGAIN_SECONDS)

    def _ask(self, tool: Tool | None, step: Step, context: Callable[[float], ToolContext]) -> ProbeReport:
        if tool is None or not tool.has_probe or not self._call_limit.can_end_calls:
            why = f"this worker can't ask the probe of {step.tool!r}"
            return ProbeReport(verdict=ProbeVerdict.FAILED, error=why, is_worth_repeating=True)
        try:
            with self._call_limit.within(self._deadline_seconds):
                arguments = step.arguments
                assert isinstance(arguments, dict)  # Or the call would not have been made.
                return tool.ask(context(self._clock.elapsed_seconds() + self._deadline_seconds), arguments)
        except ResultNotJsonError as error:
            return ProbeReport(verdict=ProbeVerdict.HAPPENED, error=str(error))
        except (Exception, SystemExit) as error:
            logger.warning("the probe of %s raised run=%s step=%s: %s", tool.name, step.run_id, step.number, error)
            return ProbeReport(
                verdict=ProbeVerdict.FAILED,
                error=describe(error),
                is_worth_repeating=self._policy.is_retryable(error),
            )


def after_probe(
    report: ProbeReport, fence: Fence, loaded: Loaded, *, policy: RetryPolicy, probes_max: int, chance: float
) -> Retried | Stopped | AskAgain:
    """Showing is not believing: a look that finds nothing counts only when it was later than whatever the call may do.

    Before the deadline the caller may still be alive, so the run doesn't end over it. Half of the budget may be spent
    before "did not happen" counts: a request that was under way mostly arrives at once.
    """
    is_early, is_over = not fence.is_over_by(loaded.loaded_at), loaded.loaded_at > fence.deadline_at
    if report.verdict is ProbeVerdict.DID_NOT_HAPPEN and not is_early:
        return policy.after_ruled_out(
            fence.failure_class,
            fence.error or f"the process that called {fence.tool!r} is gone; its probe says that nothing happened",
            crashes=loaded.step.crashes,
            tries=loaded.step.tries,
            throttled_seconds=loaded.throttled_seconds,
            chance=chance,
        )
    may_help = _may_help(report, fence, is_over=is_over)
    if is_over and (not may_help or fence.probes >= probes_max):
        return unknown(fence, report)
    if not may_help or (is_early and fence.probes >= probes_max // 2):
        return AskAgain(waits_for_fence=True)
    return AskAgain(wait_seconds=min(WAIT_SECONDS_MAX, WAIT_SECONDS_MIN * 2**fence.probes))


def unknown(fence: Fence, report: ProbeReport | None) -> Stopped:
    """A person must say what became of the write. `report`: the probe's last word, None if it never answered."""
    cause = fence.error or f"the process that called {fence.tool!r} is gone"
    return Stopped(
        reason=DeadLetterReason.NOT_RETRYABLE,
        failure_class=fence.failure_class or FailureClass.UNKNOWN,
        error=f"{cause}: whether the write happened is not known{_last_word(report, fence)}",
        outcome_unknown=True,
    )


def _may_help(report: ProbeReport, fence: Fence, *, is_over: bool) -> bool:
    """Another answer may come later, and decide."""
    match report.verdict:
        case ProbeVerdict.NOT_YET:
            return True
        case ProbeVerdict.DID_NOT_HAPPEN:
            return not is_over or fence.settled_at is not None
        case ProbeVerdict.FAILED:
            return report.is_worth_repeating
        case _:
            return False


def _last_word(report: ProbeReport | None, fence: Fence) -> str:
    if report is None:
        return f"; its probe was asked {fence.probes} times and never answered" if fence.has_probe else ""
    match report.verdict:
        case ProbeVerdict.NOT_YET:
            return "; its probe only says: not yet"
        case ProbeVerdict.DID_NOT_HAPPEN:
            return "; its probe found nothing, but the tool doesn't declare settles_within, so it may still come"
        case ProbeVerdict.FAILED:
            return f"; its probe failed: {report.error}"
        case _:
            return f"; its probe can't tell{f': {report.error}' if report.error else ''}"
