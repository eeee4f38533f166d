"""The classifier over every shape of exception: wrapped, grouped, chained, in circles."""

from hypothesis import given
from hypothesis import strategies as st

from agentq.domain.failures import (
    AuditPersistenceFailedException,
    CircuitOpenError,
    FailureClass,
    FailureClassifier,
    FailureWrapper,
    FallbackError,
    ModelError,
)

CLASSIFIER = FailureClassifier()


class Wrapper(FailureWrapper):
    """Any wrapper that declares itself."""


def _leaf(number: int) -> Exception:
    makers = (
        lambda: ConnectionError("refused"),
        lambda: TimeoutError("late"),
        lambda: ModelError("no", status=429),
        lambda: ModelError("no", status=500),
        lambda: ModelError("no", status=401),
        lambda: CircuitOpenError("open"),
        lambda: ValueError("odd"),
        lambda: OSError(28, "full"),
    )
    return makers[number % len(makers)]()


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


leaves = st.integers(0, 7).map(_leaf)
shapes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda errors: ExceptionGroup("group", errors)),
        st.lists(inner, max_size=3).map(lambda errors: FallbackError("chain", errors)),
        st.tuples(leaves, inner).map(lambda pair: _caused(*pair)),
        inner.map(lambda error: _caused(Wrapper("wrapper"), error)),
    ),
    max_leaves=12,
)


@given(shapes)
def test_every_exception_has_a_class_and_always_the_same(error: Exception) -> None:
    """A classifier that raises, or changes its mind, would take the retry policy with it."""
    first = CLASSIFIER.classify(error)
    assert isinstance(first, FailureClass)
    assert CLASSIFIER.classify(error) is first
    wait = CLASSIFIER.retry_after_seconds(error)
    assert wait is None or wait >= 0


@given(st.lists(shapes, min_size=1, max_size=4))
def test_a_group_is_retryable_only_if_each_member_is(errors: list[Exception]) -> None:
    """Trying again repeats every one of them, the one that must not be repeated too."""
    group = CLASSIFIER.classify(ExceptionGroup("group", errors))
    members = [CLASSIFIER.classify(error) for error in errors]
    assert group in members
    assert group.is_retryable == all(member.is_retryable for member in members)


@given(st.lists(shapes, min_size=1, max_size=4))
def test_a_chain_is_what_its_last_attempt_is(errors: list[Exception]) -> None:
    """The attempts before it are history."""
    assert CLASSIFIER.classify(FallbackError("chain", errors)) is CLASSIFIER.classify(errors[-1])


@given(shapes, st.lists(st.integers(0, 5), max_size=6))
def test_a_lost_audit_record_is_found_under_any_wrapping(beside: Exception, wrappings: list[int]) -> None:
    """Whatever a library wraps around it, its write is never made again."""
    error: Exception = AuditPersistenceFailedException("not stored")
    for number in wrappings:
        match number:
            case 0:
                error = ExceptionGroup("group", [beside, error])
            case 1:
                error = FallbackError("chain", [error, beside])
            case 2:
                error = _caused(ConnectionError("refused"), error)
            case 3:
                error = _caused(Wrapper("wrapper"), error)
            case 4:
                error = ConnectionError("refused", error)
            case _:
                outer = TimeoutError("late")
                outer.__context__ = error
                error = outer
    assert CLASSIFIER.classify(error) is FailureClass.UNKNOWN


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.booleans())
def test_circles_come_to_an_end(links: list[tuple[int, int]], wrapped: bool) -> None:
    """Any graph of causes and contexts is walked once: a worker must not hang over an exception."""
    errors: list[Exception] = [Wrapper("w") if wrapped else _leaf(number) for number in range(6)]
    for number, (source, target) in enumerate(links):
        if number % 2:
            errors[source].__cause__ = errors[target]
        else:
            errors[source].__context__ = errors[target]
    for error in errors:
        assert isinstance(CLASSIFIER.classify(error), FailureClass)
