"""The failure table: which exceptions may be tried again, and which must not."""

import asyncio
import errno
import http.client
import socket
import ssl
import urllib.error
from datetime import UTC, datetime
from email.message import Message
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
import requests
import urllib3

from agentq.domain.errors import AgentqError, ConfigurationError, InvalidInputError, StoreUnavailableError
from agentq.domain.failures import (
    AuditPersistenceFailedException,
    CircuitOpenError,
    FailureClass,
    FailureClassifier,
    FailureWrapper,
    FallbackError,
    ModelConnectionError,
    ModelError,
    ModelNotFoundError,
    ModelReplyMalformedError,
    ModelReplyRefusedError,
    ModelTimeoutError,
)
from agentq.domain.retry_after import RETRY_AFTER_SECONDS_MAX

REQUEST = httpx2.Request("GET", "http://example.invalid")
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://example.invalid", status, "no", Message(), None)


def requests_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("no", response=response)


def httpx2_error(status: int) -> httpx2.HTTPStatusError:
    return httpx2.HTTPStatusError("no", request=REQUEST, response=httpx2.Response(status, request=REQUEST))


def openai_error(status: int) -> openai.APIStatusError:
    return openai.APIStatusError("no", response=httpx2.Response(status, request=REQUEST), body=None)


TABLE: list[tuple[BaseException, FailureClass]] = [
    (ConnectionRefusedError(), FailureClass.CONNECTION),
    (ConnectionResetError(), FailureClass.CONNECTION),
    (BrokenPipeError(), FailureClass.CONNECTION),
    (TimeoutError(), FailureClass.CONNECTION),
    (asyncio.IncompleteReadError(b"", 1), FailureClass.CONNECTION),
    (socket.gaierror(), FailureClass.CONNECTION),
    (ssl.SSLEOFError(), FailureClass.CONNECTION),
    (ssl.SSLCertVerificationError(), FailureClass.CONFIGURATION),
    (OSError(errno.EHOSTUNREACH, "no route"), FailureClass.CONNECTION),
    (OSError(errno.ENOSPC, "disk full"), FailureClass.UNKNOWN),
    (FileNotFoundError(), FailureClass.UNKNOWN),
    (http.client.RemoteDisconnected(""), FailureClass.CONNECTION),
    (http.client.IncompleteRead(b""), FailureClass.CONNECTION),
    (urllib.error.URLError(ConnectionRefusedError()), FailureClass.CONNECTION),
    (urllib.error.URLError("unknown url type: gopher"), FailureClass.UNKNOWN),
    (http_error(503), FailureClass.SERVER_ERROR),
    (http_error(302), FailureClass.UNKNOWN),
    (requests.ConnectionError(), FailureClass.CONNECTION),
    (requests.ReadTimeout(), FailureClass.CONNECTION),
    (requests_error(429), FailureClass.RATE_LIMIT),
    (requests.HTTPError("without a response"), FailureClass.UNKNOWN),
    (urllib3.exceptions.ProtocolError(), FailureClass.CONNECTION),
    (
        urllib3.exceptions.MaxRetryError(None, "/", urllib3.exceptions.ProtocolError()),  # type: ignore[arg-type]
        FailureClass.CONNECTION,
    ),
    (httpx2.ConnectError("no"), FailureClass.CONNECTION),
    (httpx2.ReadTimeout("no"), FailureClass.CONNECTION),
    (httpx2.UnsupportedProtocol("no"), FailureClass.CLIENT_ERROR),
    (httpx2_error(401), FailureClass.AUTH),
    (openai.APITimeoutError(REQUEST), FailureClass.CONNECTION),
    (openai_error(404), FailureClass.CLIENT_ERROR),
    (openai_error(500), FailureClass.SERVER_ERROR),
    (ModelError("no"), FailureClass.UNKNOWN),
    (ModelError("no", status=400), FailureClass.CLIENT_ERROR),
    (ModelError("no", status=401), FailureClass.AUTH),
    (ModelError("no", status=403), FailureClass.AUTH),
    (ModelError("no", status=408), FailureClass.CONNECTION),
    (ModelError("no", status=409), FailureClass.CLIENT_ERROR),
    (ModelError("no", status=413), FailureClass.CLIENT_ERROR),
    (ModelError("no", status=429), FailureClass.RATE_LIMIT),
    (ModelError("no", status=500), FailureClass.SERVER_ERROR),
    (ModelError("no", status=529), FailureClass.SERVER_ERROR),
    (ModelError("no", status=200), FailureClass.UNKNOWN),
    (ModelConnectionError("no"), FailureClass.CONNECTION),
    (ModelTimeoutError("no"), FailureClass.CONNECTION),
    (ModelNotFoundError("no", status=404), FailureClass.CONFIGURATION),
    (ModelReplyMalformedError("no"), FailureClass.SERVER_ERROR),
    (ModelReplyRefusedError("no"), FailureClass.CLIENT_ERROR),
    (CircuitOpenError("no"), FailureClass.CIRCUIT_OPEN),
    (ConfigurationError("no"), FailureClass.CONFIGURATION),
    (InvalidInputError("no"), FailureClass.CLIENT_ERROR),
    (StoreUnavailableError("no"), FailureClass.CONNECTION),
    (AuditPersistenceFailedException("no"), FailureClass.UNKNOWN),
    (ValueError(), FailureClass.UNKNOWN),
    (KeyboardInterrupt(), FailureClass.UNKNOWN),
]


@pytest.mark.parametrize(("error", "expected"), TABLE, ids=lambda value: getattr(value, "value", type(value).__name__))
def test_an_exception_has_its_class(error: BaseException, expected: FailureClass) -> None:
    """The retry policy has nothing else to go by."""
    assert FailureClassifier().classify(error) is expected


def test_only_four_classes_are_retryable() -> None:
    """A retry of anything else repeats what can't succeed, or what must not happen twice."""
    assert [each for each in FailureClass if each.is_retryable] == [
        FailureClass.CONNECTION,
        FailureClass.RATE_LIMIT,
        FailureClass.SERVER_ERROR,
        FailureClass.CIRCUIT_OPEN,
    ]


def raised_from(error: BaseException, cause: BaseException | None) -> BaseException:
    error.__cause__ = cause
    return error


def with_context(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    error.__suppress_context__ = True  # As `raise ... from None` does.
    return error


AUDIT = AuditPersistenceFailedException("not stored")
HIDDEN_AUDITS = [
    raised_from(AuditPersistenceFailedException("not stored"), ConnectionError()),
    raised_from(ConnectionError(), AUDIT),
    raised_from(ModelError("no", status=503), raised_from(TimeoutError(), AUDIT)),
    with_context(ConnectionError(), AUDIT),
    ExceptionGroup("several", [ConnectionError(), ExceptionGroup("more", [AUDIT])]),
    FallbackError("all failed", [AUDIT, TimeoutError()]),
    ConnectionError("wrapped", AUDIT),
    ConnectionError("wrapped", [AUDIT]),
]


@pytest.mark.parametrize("error", HIDDEN_AUDITS)
def test_a_lost_audit_record_is_found_wherever_it_hides(error: BaseException) -> None:
    """It is raised from a connection error, mostly; read as one, the write behind it would be made again."""
    assert FailureClassifier().classify(error) is FailureClass.UNKNOWN


def test_a_cause_alone_decides_nothing() -> None:
    """Code that turned a connection error into something else said something about it: it isn't undone."""
    error = raised_from(ValueError("the reply makes no sense"), ConnectionError())
    assert FailureClassifier().classify(error) is FailureClass.UNKNOWN


class Wrapped(FailureWrapper):
    """A wrapper of somebody's own."""


def test_wrappers_that_declare_themselves_are_unwrapped() -> None:
    """What they hold is what went wrong."""
    classify = FailureClassifier().classify
    assert classify(raised_from(Wrapped("no"), ConnectionError())) is FailureClass.CONNECTION
    assert classify(Wrapped("empty")) is FailureClass.UNKNOWN
    assert classify(FallbackError("none tried", [])) is FailureClass.UNKNOWN


def test_a_fallback_chain_is_classified_by_its_last_attempt() -> None:
    """The earlier ones were answered by trying the next; the last is what stands in the way."""
    classify = FailureClassifier().classify
    assert classify(FallbackError("all", [ModelError("a", status=401), TimeoutError()])) is FailureClass.CONNECTION
    assert classify(FallbackError("all", [TimeoutError(), ModelError("a", status=401)])) is FailureClass.AUTH


def test_a_group_is_as_strict_as_its_strictest_member() -> None:
    """Trying again repeats all of them."""
    classify = FailureClassifier().classify
    group = ExceptionGroup("several", [TimeoutError(), ExceptionGroup("more", [ModelError("a", status=401)])])
    assert classify(group) is FailureClass.AUTH
    assert classify(ExceptionGroup("several", [group, ValueError()])) is FailureClass.UNKNOWN
    assert classify(ExceptionGroup("several", [TimeoutError(), CircuitOpenError("open")])) is FailureClass.CIRCUIT_OPEN


def test_a_cycle_of_causes_comes_to_an_end() -> None:
    """Retry libraries raise an error from itself now and then; a worker must not hang over it."""
    first, second = ConnectionError(), Wrapped("no")
    first.__cause__, second.__cause__ = second, first
    assert FailureClassifier().classify(first) is FailureClass.CONNECTION
    itself = Wrapped("no")
    itself.__cause__ = itself
    assert FailureClassifier().classify(itself) is FailureClass.UNKNOWN


def test_a_very_long_chain_is_followed_to_its_end() -> None:
    """Recursion would end it halfway, with an error of its own."""
    error: BaseException = AUDIT
    for _ in range(5000):
        error = raised_from(ConnectionError(), error)
    assert FailureClassifier().classify(error) is FailureClass.UNKNOWN


class OutOfStock(Exception):
    """An error of somebody's own."""


class SoldOutToday(OutOfStock):
    """... and a special case of it."""


def test_a_registered_type_counts_for_its_subclasses_and_the_narrower_one_wins() -> None:
    """Authors know their own errors best."""
    classifier = FailureClassifier({OutOfStock: FailureClass.SERVER_ERROR})
    assert classifier.classify(SoldOutToday()) is FailureClass.SERVER_ERROR
    classifier.register(SoldOutToday, FailureClass.CLIENT_ERROR)
    assert classifier.classify(SoldOutToday()) is FailureClass.CLIENT_ERROR
    assert classifier.classify(OutOfStock()) is FailureClass.SERVER_ERROR
    assert FailureClassifier().classify(OutOfStock()) is FailureClass.UNKNOWN


def test_registering_the_same_again_changes_nothing() -> None:
    """A module that is imported twice must not stop a worker."""
    classifier = FailureClassifier({OutOfStock: FailureClass.SERVER_ERROR})
    classifier.register(OutOfStock, FailureClass.SERVER_ERROR)
    classifier.register(AuditPersistenceFailedException, FailureClass.UNKNOWN)
    assert dict(classifier.registered) == {OutOfStock: FailureClass.SERVER_ERROR}


class WorseAudit(AuditPersistenceFailedException):
    """A narrower audit failure."""


REFUSED: list[tuple[Any, Any, str]] = [
    (OutOfStock, FailureClass.CLIENT_ERROR, "classified as SERVER_ERROR already"),
    (ConnectionError, FailureClass.UNKNOWN, "classified as CONNECTION already"),
    (openai.APIStatusError, FailureClass.CLIENT_ERROR, "classified as what the error says already"),
    (AuditPersistenceFailedException, FailureClass.CONNECTION, "always UNKNOWN"),
    (WorseAudit, FailureClass.CONNECTION, "always UNKNOWN"),
    (Exception, FailureClass.CONNECTION, "narrower"),
    (BaseException, FailureClass.CONNECTION, "narrower"),
    (AgentqError, FailureClass.CONNECTION, "narrower"),
    (ExceptionGroup, FailureClass.CONNECTION, "by what it holds"),
    (FallbackError, FailureClass.CONNECTION, "by what it holds"),
    (int, FailureClass.CONNECTION, "not an exception type"),
    ("OutOfStock", FailureClass.CONNECTION, "not an exception type"),
    (SoldOutToday, "CONNECTION", "give a FailureClass"),
]


@pytest.mark.parametrize(("exception_type", "failure_class", "why"), REFUSED)
def test_what_must_not_be_registered_is_refused(exception_type: Any, failure_class: Any, why: str) -> None:
    """One careless line could make every unknown failure retryable, a lost audit record among them."""
    classifier = FailureClassifier({OutOfStock: FailureClass.SERVER_ERROR})
    with pytest.raises(ConfigurationError, match=why):
        classifier.register(exception_type, failure_class)
    assert dict(classifier.registered) == {OutOfStock: FailureClass.SERVER_ERROR}


class Guarded(ModelError):
    """Its properties work only inside of its library."""

    @property
    def response(self) -> object:
        raise RuntimeError("no response was set")


def test_a_foreign_property_that_raises_is_none() -> None:
    """Several libraries have such; the retry policy must not fall over one."""
    error = Guarded("no", status=503)
    assert FailureClassifier().classify(error) is FailureClass.SERVER_ERROR
    assert FailureClassifier().retry_after_seconds(error) is None


HEADERS: list[tuple[dict[str, str], float | None]] = [
    ({"Retry-After": "7"}, 7),
    ({"retry-after": " 1.5 "}, 1.5),
    ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
    ({"Retry-After": "-3"}, 0),
    ({"Retry-After": "99999999"}, RETRY_AFTER_SECONDS_MAX),
    ({"Retry-After": "inf"}, None),
    ({"Retry-After": "nan"}, None),
    ({"Retry-After": "soon"}, None),
    ({"Retry-After": ""}, None),
    ({}, None),
    ({"Retry-After": "Tue, 01 Jan 2030 00:01:00 GMT"}, 60),
    ({"Retry-After": "Tue, 01 Jan 2030 00:01:00 GMT", "Date": "Tue, 01 Jan 2030 00:00:50 GMT"}, 10),
    ({"Retry-After": "Tue, 01 Jan 2030 00:01:00 -0000"}, 60),
    ({"Retry-After": "Mon, 31 Dec 2029 00:00:00 GMT"}, 0),
    ({"Retry-After": "Mon, 31 Dec 9999 00:00:00 GMT"}, RETRY_AFTER_SECONDS_MAX),
]


@pytest.mark.parametrize(("headers", "expected"), HEADERS)
def test_retry_after_is_read_in_all_its_forms(headers: dict[str, str], expected: float | None) -> None:
    """Asking again too early keeps the door shut; a mistaken year must not park a run for ever."""
    error = requests_error(429)
    assert error.response is not None
    error.response.headers.update(headers)
    assert FailureClassifier(now=lambda: NOW).retry_after_seconds(error) == expected
    plain = ModelError("no", status=429)
    plain.response = SimpleNamespace(headers=headers)  # type: ignore[attr-defined]
    assert FailureClassifier(now=lambda: NOW).retry_after_seconds(plain) == expected


def test_retry_after_of_a_group_is_the_longest_and_of_a_chain_the_lasts() -> None:
    """Everybody who asked for patience must have had it."""
    short, long = ModelError("a", retry_after_seconds=2), CircuitOpenError("b", retry_after_seconds=9)
    wait = FailureClassifier().retry_after_seconds
    assert wait(ExceptionGroup("several", [short, long])) == 9
    assert wait(FallbackError("all", [long, short])) == 2
    assert wait(ValueError()) is None
    assert wait(ModelError("a", retry_after_seconds=-1)) == 0
