"""The retry policy: what becomes of a step whose call failed, or whose process died, and of its run."""

from dataclasses import dataclass

from agentq.domain.effects import ToolEffect
from agentq.domain.failures import FailureClass, FailureClassifier
from agentq.domain.model import Charge, DeadLetterReason
from agentq.domain.outcomes import Retried, Stopped

BACKOFF_SECONDS_MAX = 60.0
ERROR_CHARACTERS_MAX = 2000

# The service answered without taking the request up, so that a keyed write need not wait for its receiver.
_NOT_TAKEN_UP = (FailureClass.RATE_LIMIT, FailureClass.CIRCUIT_OPEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a step may spend: requeues after failed calls, lost processes, and the wait for those who throttle."""

    tries_max: int
    crashes_max: int
    backoff_seconds: float
    patience_seconds: float


class RetryPolicy:
    """Consults the classifier, and nothing else retries."""

    def __init__(self, classifier: FailureClassifier, budgets: Budgets) -> None:
        self._classifier = classifier
        self._budgets = budgets

    def after_failure(
        self, error: BaseException, *, effect: ToolEffect, tries: int, throttled_seconds: float | None, chance: float
    ) -> Retried | Stopped:
        """A call was made and failed.

        `tries` were spent before, `throttled_seconds` is how long ago the step was throttled first, `chance` is uniform
        in [0, 1) and spreads the waits. The outcome of a plain write is unknown whatever the class.
        """
        failure_class = self._classifier.classify(error)
        text = describe(error)
        if effect.is_plain_write or not failure_class.is_retryable:
            return Stopped(
                reason=DeadLetterReason.NOT_RETRYABLE,
                failure_class=failure_class,
                error=text,
                outcome_unknown=effect.is_plain_write,
            )

        charge, is_spent = self._budget_for(failure_class, tries, throttled_seconds)
        if is_spent:
            return Stopped(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=failure_class, error=text)
        return Retried(
            charge=charge,
            error=text,
            failure_class=failure_class,
            due_in_seconds=self._wait_seconds(error, tries, chance),
            waits_for_fence=effect.is_write and failure_class not in _NOT_TAKEN_UP,
        )

    def after_crash(self, crashes: int, *, is_charged: bool = True) -> Retried | Stopped:
        """The process that held the step is gone; `crashes` were spent before."""
        if not is_charged:
            return Retried(charge=Charge.NOTHING, error="its worker left without an outcome")
        error = f"the process that ran it died ({crashes + 1} of {self._budgets.crashes_max})"
        if crashes + 1 >= self._budgets.crashes_max:
            return Stopped(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=FailureClass.UNKNOWN, error=error)
        return Retried(charge=Charge.CRASH, error=error)

    def after_ruled_out(
        self,
        failure_class: FailureClass | None,
        error: str,
        *,
        crashes: int,
        tries: int,
        throttled_seconds: float | None,
        chance: float,
    ) -> Retried | Stopped:
        """It is certain that a write didn't happen: its step goes on as if its call had only read.

        `failure_class` is how the call failed, None if the process that made it was lost.
        """
        if failure_class is None:
            return self.after_crash(crashes)
        if not failure_class.is_retryable:
            return Stopped(reason=DeadLetterReason.NOT_RETRYABLE, failure_class=failure_class, error=error)
        charge, is_spent = self._budget_for(failure_class, tries, throttled_seconds)
        if is_spent:
            return Stopped(reason=DeadLetterReason.RETRIES_EXHAUSTED, failure_class=failure_class, error=error)
        wait_seconds = _backoff_seconds(self._budgets.backoff_seconds, tries, chance)
        return Retried(charge=charge, error=error, failure_class=failure_class, due_in_seconds=wait_seconds)

    def is_retryable(self, error: BaseException) -> bool:
        """Making the same request again may help."""
        return self._classifier.classify(error).is_retryable

    def attempts_left(self, tries: int) -> int:
        """How often the call may still be made after the present attempt."""
        return max(0, self._budgets.tries_max - tries)

    def _budget_for(
        self, failure_class: FailureClass, tries: int, throttled_seconds: float | None
    ) -> tuple[Charge, bool]:
        if failure_class in _NOT_TAKEN_UP:
            return Charge.PATIENCE, (throttled_seconds or 0) >= self._budgets.patience_seconds
        return Charge.TRY, tries >= self._budgets.tries_max

    def _wait_seconds(self, error: BaseException, tries: int, chance: float) -> float:
        """Exponential, never before `Retry-After`."""
        wait_seconds = _backoff_seconds(self._budgets.backoff_seconds, tries, chance)
        return max(wait_seconds, self._classifier.retry_after_seconds(error) or 0)


def _backoff_seconds(first_seconds: float, times: int, chance: float) -> float:
    """Doubled each time, with full jitter above half, so that nobody waits nothing."""
    ceiling: float = min(BACKOFF_SECONDS_MAX, first_seconds * 2**times)
    return ceiling * (0.5 + chance / 2)


def describe(error: BaseException) -> str:
    """One line for a person: the error's type and text."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:ERROR_CHARACTERS_MAX]
