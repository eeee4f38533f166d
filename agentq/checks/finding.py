"""A finding: what was looked at, what was found, why it matters, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # Good to know; nothing has to be done.
    WARNING = "warning"  # Costs time or a person's work, at worst after a second fault.
    ERROR = "error"  # Something doesn't work, or a promise of agentq doesn't hold.


@dataclass(frozen=True, slots=True)
class Finding:
    """`breaks_promise`: with it a write may run twice or a run be lost, so that no worker starts on it."""

    subject: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""
    breaks_promise: bool = False

    @property
    def line(self) -> str:
        """All of it in one line."""
        advice = "; ".join(filter(None, (self.why, self.fix)))
        return f"{self.found}: {advice}" if advice else self.found


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, Level.OK, found)


def note(subject: str, found: str, *, why: str = "", fix: str = "") -> Finding:
    return Finding(subject, Level.NOTE, found, why, fix)


def warning(subject: str, found: str, *, why: str, fix: str) -> Finding:
    return Finding(subject, Level.WARNING, found, why, fix)


def error(subject: str, found: str, *, why: str = "", fix: str = "") -> Finding:
    return Finding(subject, Level.ERROR, found, why, fix)


def broken_promise(subject: str, found: str, *, why: str = "", fix: str = "") -> Finding:
    return Finding(subject, Level.ERROR, found, why, fix, breaks_promise=True)


def refusals(findings: Iterable[Finding]) -> list[Finding]:
    """Those on which a worker doesn't start."""
    return [finding for finding in findings if finding.breaks_promise]


def warnings(findings: Iterable[Finding]) -> list[Finding]:
    """Those that a worker only tells."""
    return [
        finding for finding in findings if finding.level in (Level.WARNING, Level.ERROR) and not finding.breaks_promise
    ]
