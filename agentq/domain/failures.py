"""What went wrong, as a class that says whether trying again may help: the errors and the one table that decides."""

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from agentq.domain.errors import (
    AgentqError,
    BrokerUnavailableError,
    ConfigurationError,
    InvalidInputError,
    LeasesUnavailableError,
    SchemaError,
    StoreUnavailableError,
)
from agentq.domain.retry_after import bounded, parse_retry_after, utc_now


class FailureClass(StrEnum):
    CONNECTION = "CONNECTION"
    RATE_LIMIT = "RATE_LIMIT"
    SERVER_ERROR = "SERVER_ERROR"
    CIRCUIT_OPEN = "CIRCUIT_OPEN"
    AUTH = "AUTH"
    CONFIGURATION = "CONFIGURATION"
    CLIENT_ERROR = "CLIENT_ERROR"
    UNKNOWN = "UNKNOWN"

    @property
    def is_retryable(self) -> bool:
        return self in _RETRYABLE


_RETRYABLE = frozenset(
    {FailureClass.CONNECTION, FailureClass.RATE_LIMIT, FailureClass.SERVER_ERROR, FailureClass.CIRCUIT_OPEN}
)

# From the laxest to the strictest, for groups: whatever forbids a retry outranks whatever allows one, a class that must
# wait outranks one that need not, and knowing nothing outranks everything.
_STRICTNESS = (
    FailureClass.CONNECTION,
    FailureClass.SERVER_ERROR,
    FailureClass.CIRCUIT_OPEN,
    FailureClass.RATE_LIMIT,
    FailureClass.CLIENT_ERROR,
    FailureClass.CONFIGURATION,
    FailureClass.AUTH,
    FailureClass.UNKNOWN,
)


class AuditPersistenceFailedException(AgentqError):
    """A write was made and its result or audit event could not be stored. Never to be repeated, whatever caused it."""


class ModelError(AgentqError):
    """A model gave no usable reply. `status` is the HTTP status, None when there was none."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class ModelConnectionError(ModelError):
    """The model's server could not be reached, or the connection broke before the reply was whole."""


class ModelTimeoutError(ModelConnectionError):
    """The reply was not there in time."""


class ModelNotFoundError(ModelError):
    """The server doesn't know the model, or doesn't speak this API at that address: correct the agent or the URL."""


class ModelReplyMalformedError(ModelError):
    """The server answered with something that isn't a reply: a fault of the server, so another try may help."""


class ModelReplyRefusedError(ModelError):
    """The reply was cut at the token limit or withheld by a filter: the same request would end the same way."""


class CircuitOpenError(AgentqError):
    """The breaker for a provider is open: nothing was sent."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class FailureWrapper(AgentqError):
    """The base of wrappers that declare themselves: what they wrap is classified in their place.

    No other exception is ever classified by its cause.
    """

    @property
    def wrapped(self) -> BaseException | None:
        """The exception to classify; None: there is none, which is UNKNOWN."""
        return self.__cause__


class FallbackError(FailureWrapper):
    """Every member of a fallback chain failed. `attempts` holds their errors in the order of the tries."""

    def __init__(self, message: str, attempts: Sequence[BaseException]) -> None:
        super().__init__(message)
        self.attempts = tuple(attempts)

    @property
    def wrapped(self) -> BaseException | None:
        return self.attempts[-1] if self.attempts else None


def _attribute(owner: object, name: str) -> object:
    """None for one that isn't there, or is a property that raises: a foreign class must not fail the classifier."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


_CLASSES_OF_STATUSES = {
    401: FailureClass.AUTH,
    403: FailureClass.AUTH,
    408: FailureClass.CONNECTION,  # The server's word for a connection that was too slow.
    429: FailureClass.RATE_LIMIT,
}
_CLASSES_OF_HUNDREDS = {4: FailureClass.CLIENT_ERROR, 5: FailureClass.SERVER_ERROR}


def failure_class_of_status(status: int | None) -> FailureClass:
    """The class of an HTTP status. None, and whatever is no failure: UNKNOWN."""
    if status is None:
        return FailureClass.UNKNOWN
    return _CLASSES_OF_STATUSES.get(status) or _CLASSES_OF_HUNDREDS.get(status // 100, FailureClass.UNKNOWN)


def _by_status(exc: BaseException) -> FailureClass:
    response = _attribute(exc, "response")
    candidates = (
        _attribute(exc, "status"),
        _attribute(exc, "status_code"),
        _attribute(response, "status_code"),
        _attribute(exc, "code"),  # Last: elsewhere `code` is often a name.
    )
    return failure_class_of_status(next((status for status in candidates if isinstance(status, int)), None))


_NETWORK_ERRNOS = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH})


def _by_errno(exc: BaseException) -> FailureClass:
    """An OSError in general says nothing; these are the network's, with no class of their own."""
    return FailureClass.CONNECTION if _attribute(exc, "errno") in _NETWORK_ERRNOS else FailureClass.UNKNOWN


_Decision: TypeAlias = "FailureClass | Callable[[BaseException], FailureClass]"

# The table. Classes of the standard library and of others are named by module and class, so that nothing is imported
# to be compared with; an exception is looked up along its class's MRO, so the most specific entry decides.
_TABLE: dict[type | str, _Decision] = {
    # agentq's own.
    ModelError: _by_status,
    ModelConnectionError: FailureClass.CONNECTION,
    ModelNotFoundError: FailureClass.CONFIGURATION,
    ModelReplyMalformedError: FailureClass.SERVER_ERROR,
    ModelReplyRefusedError: FailureClass.CLIENT_ERROR,
    CircuitOpenError: FailureClass.CIRCUIT_OPEN,
    ConfigurationError: FailureClass.CONFIGURATION,
    SchemaError: FailureClass.CONFIGURATION,
    InvalidInputError: FailureClass.CLIENT_ERROR,
    StoreUnavailableError: FailureClass.CONNECTION,
    LeasesUnavailableError: FailureClass.CONNECTION,
    BrokerUnavailableError: FailureClass.CONNECTION,
    # The standard library.
    ConnectionError: FailureClass.CONNECTION,
    TimeoutError: FailureClass.CONNECTION,
    OSError: _by_errno,
    "socket.gaierror": FailureClass.CONNECTION,
    "socket.herror": FailureClass.CONNECTION,
    "ssl.SSLError": FailureClass.CONNECTION,
    "ssl.SSLCertVerificationError": FailureClass.CONFIGURATION,  # A wrong certificate doesn't heal in seconds.
    "asyncio.exceptions.IncompleteReadError": FailureClass.CONNECTION,
    "http.client.IncompleteRead": FailureClass.CONNECTION,
    "http.client.BadStatusLine": FailureClass.CONNECTION,
    "urllib.error.ContentTooShortError": FailureClass.CONNECTION,
    "urllib.error.HTTPError": _by_status,
    # httpx, and httpx2 that the openai SDK is built on.
    "httpx.TransportError": FailureClass.CONNECTION,
    "httpx.UnsupportedProtocol": FailureClass.CLIENT_ERROR,
    "httpx.LocalProtocolError": FailureClass.CLIENT_ERROR,
    "httpx.InvalidURL": FailureClass.CLIENT_ERROR,
    "httpx.HTTPStatusError": _by_status,
    "httpx2.TransportError": FailureClass.CONNECTION,
    "httpx2.UnsupportedProtocol": FailureClass.CLIENT_ERROR,
    "httpx2.LocalProtocolError": FailureClass.CLIENT_ERROR,
    "httpx2.InvalidURL": FailureClass.CLIENT_ERROR,
    "httpx2.HTTPStatusError": _by_status,
    # requests and urllib3.
    "requests.exceptions.ConnectionError": FailureClass.CONNECTION,
    "requests.exceptions.Timeout": FailureClass.CONNECTION,
    "requests.exceptions.ChunkedEncodingError": FailureClass.CONNECTION,
    "requests.exceptions.InvalidURL": FailureClass.CLIENT_ERROR,
    "requests.exceptions.MissingSchema": FailureClass.CLIENT_ERROR,
    "requests.exceptions.InvalidSchema": FailureClass.CLIENT_ERROR,
    "requests.exceptions.HTTPError": _by_status,
    "urllib3.exceptions.TimeoutError": FailureClass.CONNECTION,
    "urllib3.exceptions.ProtocolError": FailureClass.CONNECTION,
    "urllib3.exceptions.NewConnectionError": FailureClass.CONNECTION,
    "urllib3.exceptions.ProxyError": FailureClass.CONNECTION,
    "urllib3.exceptions.SSLError": FailureClass.CONNECTION,
    # SDKs of models, aiohttp, redis, breakers.
    "openai.APIConnectionError": FailureClass.CONNECTION,
    "openai.APIStatusError": _by_status,
    "anthropic.APIConnectionError": FailureClass.CONNECTION,
    "anthropic.APIStatusError": _by_status,
    "aiohttp.client_exceptions.ClientConnectionError": FailureClass.CONNECTION,
    "aiohttp.client_exceptions.ClientPayloadError": FailureClass.CONNECTION,
    "aiohttp.client_exceptions.ClientResponseError": _by_status,
    "redis.exceptions.ConnectionError": FailureClass.CONNECTION,
    "redis.exceptions.TimeoutError": FailureClass.CONNECTION,
    "redis.exceptions.AuthenticationError": FailureClass.AUTH,
    "pybreaker.CircuitBreakerError": FailureClass.CIRCUIT_OPEN,
}

# Foreign wrappers that declare what they wrap: the attribute that holds it, where it is an exception.
_WRAPPERS = {"urllib.error.URLError": "reason", "urllib3.exceptions.MaxRetryError": "reason"}


class FailureClassifier:
    """Maps an exception to its `FailureClass`: the only place that decides whether trying again may help."""

    def __init__(
        self,
        registered: Mapping[type[BaseException], FailureClass] | None = None,
        *,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """`now` is asked only for a `Retry-After` date whose reply doesn't say what time its server thinks it is."""
        self._registered: dict[type, FailureClass] = {}
        self._now = now
        for exception_type, failure_class in (registered or {}).items():
            self.register(exception_type, failure_class)

    @property
    def registered(self) -> Mapping[type[BaseException], FailureClass]:
        """What was registered here, beyond the table."""
        return dict(self._registered)

    def register(self, exception_type: type[BaseException], failure_class: FailureClass) -> None:
        """Classify exceptions of this type, and of its subclasses that have no entry of their own, as `failure_class`.

        Raises ConfigurationError, changing nothing, for what is no exception type, would decide over everything, or
        has a class already.
        """
        if not _is_exception_type(exception_type):
            raise ConfigurationError(f"can't classify {exception_type!r}: it is not an exception type")
        name = _qualified_name(exception_type)
        if not isinstance(failure_class, FailureClass):
            raise ConfigurationError(f"can't classify {name} as {failure_class!r}: give a FailureClass")
        if issubclass(exception_type, AuditPersistenceFailedException):
            if failure_class is not FailureClass.UNKNOWN:
                raise ConfigurationError(f"{name} is always UNKNOWN: its write must not be repeated")
            return
        if exception_type in (BaseException, Exception, AgentqError):
            raise ConfigurationError(f"can't classify {name}: what nobody knows stays UNKNOWN; name a narrower type")
        if issubclass(exception_type, FailureWrapper | BaseExceptionGroup) or name in _WRAPPERS:
            raise ConfigurationError(f"can't classify {name}: it is classified by what it holds")
        known = self._registered.get(exception_type) or _TABLE.get(exception_type) or _TABLE.get(name)
        if known is not None and known is not failure_class:
            as_what = known.value if isinstance(known, FailureClass) else "what the error says"
            raise ConfigurationError(f"{name} is classified as {as_what} already; register a subclass of it")
        self._registered[exception_type] = failure_class

    def classify(self, exc: BaseException) -> FailureClass:
        """The exception's class. The same exception always gets the same class."""
        if any(isinstance(found, AuditPersistenceFailedException) for found in _related(exc)):
            return FailureClass.UNKNOWN
        classes = [self._look_up(leaf) for leaf in _leaves(exc)]
        return max(classes, key=_STRICTNESS.index, default=FailureClass.UNKNOWN)

    def retry_after_seconds(self, exc: BaseException) -> float | None:
        """How long the other side asks to wait, from 0 to a day; of a group the longest. None: it doesn't say."""
        waits = [wait for leaf in _leaves(exc) if (wait := self._wait_of(leaf)) is not None]
        return max(waits, default=None)

    def _look_up(self, exc: BaseException) -> FailureClass:
        for exception_type in type(exc).__mro__:
            found = (
                self._registered.get(exception_type)
                or _TABLE.get(exception_type)
                or _TABLE.get(_qualified_name(exception_type))
            )
            if found is not None:
                return found if isinstance(found, FailureClass) else found(exc)
        return FailureClass.UNKNOWN

    def _wait_of(self, exc: BaseException) -> float | None:
        told = _attribute(exc, "retry_after_seconds")
        if isinstance(told, int | float):
            return bounded(told)
        headers = _attribute(_attribute(exc, "response"), "headers") or _attribute(exc, "headers")
        return parse_retry_after(headers, self._now) if headers is not None else None


def _is_exception_type(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseException)


def _qualified_name(exception_type: type) -> str:
    return f"{exception_type.__module__}.{exception_type.__qualname__}"


def _related(exc: BaseException) -> Iterator[BaseException]:
    """Everything that the exception came from, holds or was given, itself first, each once.

    Contexts count, even suppressed ones: whoever failed while handling a lost audit record must not be retried.
    """
    seen: set[int] = set()
    pending = [exc]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        held = (
            current.__cause__,
            current.__context__,
            *_wrapped(current),
            *(current.attempts if isinstance(current, FallbackError) else ()),
            *(inner for part in current.args for inner in (part if isinstance(part, list | tuple) else [part])),
        )
        pending.extend(inner for inner in held if isinstance(inner, BaseException))


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    """The exceptions to look up in the table: wrappers and groups taken off, each once."""
    seen: set[int] = set()
    pending = [exc]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        wrapped = _wrapped(current)
        if wrapped:
            pending.extend(wrapped)
        else:
            yield current


def _wrapped(exc: BaseException) -> tuple[BaseException, ...]:
    """What is classified in the place of this exception; empty for one that is classified itself."""
    if isinstance(exc, BaseExceptionGroup):
        return tuple(exc.exceptions)
    if isinstance(exc, FailureWrapper):
        return (exc.wrapped,) if exc.wrapped is not None else ()
    attribute = _WRAPPERS.get(_qualified_name(type(exc)))
    inner = _attribute(exc, attribute) if attribute else None
    return (inner,) if isinstance(inner, BaseException) else ()
