"""Times as text, for programs and for people's messages: RFC 3339 in UTC."""

from datetime import UTC, datetime


def time_text(moment: datetime) -> str:
    """To the millisecond."""
    return _text(moment, "milliseconds")


def exact_time_text(moment: datetime) -> str:
    """To the microsecond: all that a database keeps of it. Seals are made over this text, so it stays as it is."""
    return _text(moment, "microseconds")


def _text(moment: datetime, precision: str) -> str:
    return f"{moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=precision)}Z"
