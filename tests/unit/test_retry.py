"""The retry policy as a table: which budget a failure spends, how long it waits, and when the run stops."""

import pytest

from agentq.domain.effects import ToolEffect
from agentq.domain.failures import (
    AuditPersistenceFailedException,
    CircuitOpenError,
    FailureClass,
    FailureClassifier,
    ModelError,
)
from agentq.domain.model import Charge, DeadLetterReason
from agentq.domain.outcomes import Retried, Stopped
from agentq.domain.retry import BACKOFF_SECONDS_MAX, ERROR_CHARACTERS_MAX, Budgets, RetryPolicy, describe
from tests.support.stage import KEYED, PLAIN, READ

POLICY = RetryPolicy(FailureClassifier(), Budgets(tries_max=3, crashes_max=3, backoff_seconds=1, patience_seconds=3600))
REFUSED = ConnectionRefusedError("refused")
LIMITED = ModelError("slow down", status=429)


def after(
    error: BaseException,
    effect: ToolEffect = READ,
    *,
    tries: int = 0,
    throttled_seconds: float | None = None,
    chance: float = 0.0,
) -> Retried | Stopped:
    return POLICY.after_failure(error, effect=effect, tries=tries, throttled_seconds=throttled_seconds, chance=chance)


def retried(change: Retried | Stopped) -> Retried:
    assert isinstance(change, Retried)
    return change


@pytest.mark.parametrize(
    ("error", "failure_class", "charge"),
    [
        (REFUSED, FailureClass.CONNECTION, Charge.TRY),
        (ModelError("down", status=500), FailureClass.SERVER_ERROR, Charge.TRY),
        (LIMITED, FailureClass.RATE_LIMIT, Charge.PATIENCE),
        (CircuitOpenError("open"), FailureClass.CIRCUIT_OPEN, Charge.PATIENCE),
    ],
)
def test_what_is_retryable_is_charged_to_its_budget(
    error: Exception, failure_class: FailureClass, charge: Charge
) -> None:
    """Waiting for who throttles costs no tries: an hour of limits is no failure of the step."""
    change = retried(after(error))
    assert (change.failure_class, change.charge) == (failure_class, charge)


@pytest.mark.parametrize(
    ("error", "failure_class"),
    [
        (ModelError("who?", status=401), FailureClass.AUTH),
        (ModelError("what?", status=400), FailureClass.CLIENT_ERROR),
        (ValueError("x"), FailureClass.UNKNOWN),
        (AuditPersistenceFailedException("lost"), FailureClass.UNKNOWN),
    ],
)
@pytest.mark.parametrize("effect", list(ToolEffect))
def test_what_is_not_retryable_stops_the_run(error: Exception, failure_class: FailureClass, effect: ToolEffect) -> None:
    """Trying again would end the same way, or do it twice."""
    assert after(error, effect) == Stopped(
        reason=DeadLetterReason.NOT_RETRYABLE,
        failure_class=failure_class,
        error=describe(error),
        outcome_unknown=effect is PLAIN,
    )


@pytest.mark.parametrize("error", [REFUSED, LIMITED, CircuitOpenError("open"), ModelError("down", status=503)])
def test_a_plain_write_is_never_retried(error: Exception) -> None:
    """Whatever the class, and with all budgets full: a lost reply looks like a refused request."""
    change = after(error, PLAIN)
    assert isinstance(change, Stopped)
    assert (change.reason, change.outcome_unknown) == (DeadLetterReason.NOT_RETRYABLE, True)


def test_a_lost_audit_record_is_never_retried_whatever_caused_it() -> None:
    """It is raised from a connection error, which alone would be retried."""
    error = AuditPersistenceFailedException("lost")
    error.__cause__ = REFUSED
    assert isinstance(after(error, KEYED), Stopped)


@pytest.mark.parametrize(("tries", "is_spent"), [(0, False), (2, False), (3, True), (9, True)])
def test_tries_have_an_end(tries: int, is_spent: bool) -> None:
    """Three requeues are four attempts."""
    change = after(REFUSED, tries=tries)
    assert isinstance(change, Stopped) == is_spent
    if isinstance(change, Stopped):
        assert (change.reason, change.outcome_unknown) == (DeadLetterReason.RETRIES_EXHAUSTED, False)


@pytest.mark.parametrize(("throttled_seconds", "is_spent"), [(None, False), (3599, False), (3600, True)])
def test_patience_has_an_end(throttled_seconds: float | None, is_spent: bool) -> None:
    """It is measured from the first throttling, however many tries are left or spent."""
    change = after(LIMITED, tries=99, throttled_seconds=throttled_seconds)
    assert isinstance(change, Stopped) == is_spent


@pytest.mark.parametrize(
    ("tries", "chance", "seconds"),
    [(0, 0, 0.5), (0, 1, 1), (1, 0, 1), (1, 0.5, 1.5), (2, 1, 4)],
)
def test_the_wait_doubles_and_is_spread(tries: int, chance: float, seconds: float) -> None:
    """So that a thousand steps that failed together don't come back together."""
    assert retried(after(REFUSED, tries=tries, chance=chance)).due_in_seconds == seconds


def test_the_wait_has_a_ceiling() -> None:
    """Throttled steps keep their tries, but a counter that ran high must not wait for days."""
    assert retried(after(LIMITED, tries=40, chance=1)).due_in_seconds == BACKOFF_SECONDS_MAX


@pytest.mark.parametrize(("asked", "seconds"), [(0.1, 0.5), (30, 30), (300, 300)])
def test_never_before_retry_after(asked: float, seconds: float) -> None:
    """Whoever asks for a wait gets it, and never a shorter one than ours."""
    error = ModelError("slow down", status=429, retry_after_seconds=asked)
    assert retried(after(error)).due_in_seconds == seconds


@pytest.mark.parametrize(
    ("effect", "error", "waits"),
    [(READ, REFUSED, False), (KEYED, REFUSED, True), (KEYED, LIMITED, False), (KEYED, CircuitOpenError("o"), False)],
)
def test_a_keyed_write_waits_for_its_receiver(effect: ToolEffect, error: Exception, waits: bool) -> None:
    """One that still works on the first request answers "key in use", which would be a dead letter for nothing."""
    assert retried(after(error, effect)).waits_for_fence == waits


@pytest.mark.parametrize(("crashes", "is_spent"), [(0, False), (1, False), (2, True), (7, True)])
def test_a_poison_step_ends_as_a_dead_letter(crashes: int, is_spent: bool) -> None:
    """Each crash costs a process; after three it is the step."""
    change = POLICY.after_crash(crashes)
    if is_spent:
        assert isinstance(change, Stopped) and change.reason is DeadLetterReason.RETRIES_EXHAUSTED
    else:
        assert retried(change).charge is Charge.CRASH


def test_who_left_without_dying_costs_nothing() -> None:
    """However often."""
    assert retried(POLICY.after_crash(99, is_charged=False)).charge is Charge.NOTHING


@pytest.mark.parametrize(("tries", "left"), [(0, 3), (2, 1), (3, 0), (9, 0)])
def test_a_tool_is_told_how_many_tries_are_left(tries: int, left: int) -> None:
    """After this one."""
    assert POLICY.attempts_left(tries) == left


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ValueError(), "ValueError: no message"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("x" * 9999), "ValueError: " + "x" * (ERROR_CHARACTERS_MAX - 12)),
    ],
)
def test_an_error_is_one_line(error: Exception, text: str) -> None:
    """It is shown in tables, logs and Flower."""
    assert describe(error) == text
