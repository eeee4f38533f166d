"""How long a server asks to wait: `Retry-After`, read from a reply's headers."""

from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite

RETRY_AFTER_SECONDS_MAX = 86_400.0  # Beyond a day a server's wish is a mistake; the patience budget ends far earlier.


def utc_now() -> datetime:
    return datetime.now(UTC)


def parse_retry_after(headers: object, now: Callable[[], datetime] = utc_now) -> float | None:
    """The wait that a reply's headers ask for, from 0 to a day. None: they don't, or not in a way to be understood.

    Takes `retry-after-ms`, or `Retry-After` as seconds or as an HTTP date. A date is compared with the reply's own
    `Date`, since only durations should cross clocks; with `now()` where that is missing.
    """
    milliseconds = _number(_header(headers, "retry-after-ms"))
    if milliseconds is not None:
        return bounded(milliseconds / 1000)
    text = _header(headers, "retry-after")
    seconds = _number(text)
    if seconds is not None:
        return bounded(seconds)
    until = _date(text)
    if until is None:
        return None
    return bounded((until - (_date(_header(headers, "date")) or now())).total_seconds())


def bounded(seconds: float) -> float | None:
    return min(max(float(seconds), 0.0), RETRY_AFTER_SECONDS_MAX) if isfinite(seconds) else None


def _header(headers: object, name: str) -> str | None:
    get = getattr(headers, "get", None)
    if get is None:
        return None
    value = get(name) or get(name.title())  # A plain dict minds the case, the libraries' own don't.
    return value.strip() if isinstance(value, str) else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if isfinite(value) else None


def _date(text: str | None) -> datetime | None:
    try:
        value = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
