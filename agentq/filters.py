"""The one filter grammar of CLI, client and API: names and texts in, a `RunFilter` out."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

from agentq.domain.errors import InvalidInputError
from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, RunStatus
from agentq.domain.times import time_text
from agentq.ports.runs import RunFilter

LIMIT_MAX = 100_000

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"(\d{1,6})([smhdw])")
_Choice = TypeVar("_Choice", bound=StrEnum)


def parse_filters(given: Mapping[str, Any], *, now: datetime | None = None) -> RunFilter:
    """The filter that these names and values ask for; empty values ask for nothing.

    | name | value |
    | --- | --- |
    | status | one or several statuses, comma-separated or as a sequence |
    | agent, tool | a name |
    | reason, failure_class | a dead letter's reason or failure class, in any case |
    | fingerprint | of a dead letter's error, as lists show it |
    | outcome_unknown | true or false |
    | since, until | RFC 3339, or an age: `90s`, `30m`, `1h`, `3d`, `2w` |
    | metadata | `key=value`, one or several, or a mapping |
    | limit | how many at most |

    Raises InvalidInputError that names the filter and what it takes.
    """
    now = now or datetime.now(UTC)
    asked = {name: value for name, value in given.items() if value is not None and value not in ("", (), [])}
    unknown = sorted(set(asked) - set(_PARSERS))
    if unknown:
        raise InvalidInputError(f"unknown filter {unknown[0]!r}; the filters are {', '.join(_PARSERS)}")
    parsed: dict[str, Any] = {}
    for name, value in asked.items():
        field, parser = _PARSERS[name]
        parsed[field] = parser(name, value, now)
    filters = RunFilter(**parsed)
    if filters.since and filters.until and filters.since >= filters.until:
        raise InvalidInputError(f"since {time_text(filters.since)} is not before until {time_text(filters.until)}")
    return filters


def parse_time(name: str, value: object, now: datetime) -> datetime:
    """A moment in UTC from RFC 3339 (UTC when it names no zone), from an age such as `1h`, or from `now`."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    text = str(value).strip()
    if text == "now":
        return now
    try:
        if age := _AGO.fullmatch(text):
            return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInputError(
            f"{name} is {text!r}; it takes a time such as 2026-01-31T12:00:00Z, an age such as 30m, 1h, 3d, or now"
        ) from None


def parse_age(name: str, value: timedelta | str) -> timedelta:
    """How long ago, from `90s`, `30m`, `1h`, `3d` or `2w`. Raises InvalidInputError."""
    if isinstance(value, timedelta):
        return value
    age = _AGO.fullmatch(value.strip())
    if age is None:
        raise InvalidInputError(f"{name} is {value!r}; it takes an age such as 12h, 30d, 8w")
    return timedelta(**{_UNITS[age[2]]: int(age[1])})


def _text(name: str, value: Any, _now: datetime) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"{name} is {value!r}; it takes a name")
    return value


def _statuses(name: str, value: Any, _now: datetime) -> tuple[RunStatus, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    words = [word.strip() for part in parts for word in str(part).split(",") if word.strip()]
    return tuple(dict.fromkeys(_choice(name, word.lower(), RunStatus) for word in words))


def _reason(name: str, value: Any, _now: datetime) -> DeadLetterReason:
    return _choice(name, str(value).upper(), DeadLetterReason)


def _failure_class(name: str, value: Any, _now: datetime) -> FailureClass:
    return _choice(name, str(value).upper(), FailureClass)


def _choice(name: str, word: str, choices: type[_Choice]) -> _Choice:
    try:
        return choices(word.replace("-", "_"))
    except ValueError:
        raise InvalidInputError(f"{name} is {word!r}; it takes one of {', '.join(choices)}") from None


def _truth(name: str, value: Any, _now: datetime) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in known:
        raise InvalidInputError(f"{name} is {value!r}; it takes true or false")
    return known[str(value).lower()]


def _metadata(name: str, value: Any, _now: datetime) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(key): str(text) for key, text in value.items()}
    pairs: Sequence[str] = [value] if isinstance(value, str) else list(value)
    return dict(parse_pair(name, pair) for pair in pairs)


def parse_pair(name: str, pair: str) -> tuple[str, str]:
    """`key=value` as the two. Raises InvalidInputError."""
    key, equals, text = pair.partition("=")
    if not equals or not key:
        raise InvalidInputError(f"{name} is {pair!r}; it takes key=value")
    return key, text


def _limit(name: str, value: Any, _now: datetime) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if not 0 < number <= LIMIT_MAX:
        raise InvalidInputError(f"{name} is {value!r}; it takes a whole number from 1 to {LIMIT_MAX}")
    return number


_PARSERS: dict[str, tuple[str, Callable[[str, Any, datetime], object]]] = {
    "status": ("statuses", _statuses),
    "agent": ("agent", _text),
    "tool": ("tool", _text),
    "reason": ("reason", _reason),
    "failure_class": ("failure_class", _failure_class),
    "fingerprint": ("fingerprint", _text),
    "outcome_unknown": ("outcome_unknown", _truth),
    "since": ("since", parse_time),
    "until": ("until", parse_time),
    "metadata": ("metadata", _metadata),
    "limit": ("limit", _limit),
}
