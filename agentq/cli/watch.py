"""Watch a run from a terminal: one line for each thing that happens to it, until it has ended."""

import sys
from typing import IO, TYPE_CHECKING, Any

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.output import (
    Cell,
    Format,
    View,
    emit_one,
    emit_text,
    full,
    line_of,
    say,
    short,
    suggest,
)
from agentq.domain.events import EventKind
from agentq.domain.model import Run, RunStatus
from agentq.views import event_view, run_view

if TYPE_CHECKING:
    from agentq.client import AgentQ

_BAD = frozenset(
    {
        EventKind.RUN_REFUSED,
        EventKind.RUN_FAILED,
        EventKind.RUN_DEAD_LETTERED,
        EventKind.OUTCOME_CONTRADICTED,
        EventKind.DECISION_REFUSED,
    }
)
_GOOD = frozenset(
    {
        EventKind.RUN_COMPLETED,
        EventKind.DEAD_LETTER_WITHDRAWN,
        EventKind.DEAD_LETTER_HEALED,
        EventKind.OUTCOME_AGREED,
        EventKind.WRITE_RESOLVED,
    }
)
_ODD = frozenset(
    {
        EventKind.FENCE_TAKEN_BACK,
        EventKind.STEP_REQUEUED,
        EventKind.STEP_HANDED_BACK,
        EventKind.OUTCOME_LATE,
        EventKind.CANCEL_REQUESTED,
        EventKind.RUN_CANCELLED,
        EventKind.RUN_RESUMED,
        EventKind.RUN_REPLAYED,
        EventKind.RUN_COPIED,
        EventKind.DEAD_LETTER_DISCARDED,
        EventKind.PROBE_REQUESTED,
        EventKind.WRITE_GIVEN_UP,
    }
)


def event_line(event: View, *, stream: IO[Any]) -> str:
    """One event as a line for that stream: when, what, which step, what is known about it, and who did it."""
    at = event["at"][11:23]
    told = "  ".join(f"{key}={short(value, 80)}" for key, value in event["data"].items())
    cells = (
        Cell(at, "bright_black"),
        Cell(f"{event['kind']:<20}", event_style(event["kind"])),
        Cell(f"{step_text(event):<8}"),
        Cell(told),
        Cell(f"({worker_text(event['actor'])})", "bright_black"),
    )
    return line_of(cells, stream=stream)


def step_text(event: View) -> str:
    """Which step an event tells of, and which attempt at it when it isn't the first."""
    if event["step"] is None:
        return ""
    is_again = event["attempt"] is not None and event["attempt"] > 1
    again = f" (attempt {event['attempt']})" if is_again else ""
    return f"step {event['step']}{again}"


def event_style(kind: str) -> str:
    if kind in _BAD:
        return "red"
    if kind in _GOOD:
        return "green"
    return "yellow" if kind in _ODD else ""


def worker_text(owner: str) -> str:
    """An owner is `host/boot/pid-start/delivery`; people look for a host and a pid. Of a keeper's settlement that it is
    one is enough. Other actors stay as they are."""
    parts = owner.split("/")
    if len(parts) == 2 and parts[0] == "keeper":  # noqa: PLR2004 - `keeper/settlement`
        return parts[0]
    return f"{parts[0]}, pid {parts[2].partition('-')[0]}" if len(parts) == 4 else owner  # noqa: PLR2004 - the four above


def watch(client: "AgentQ", run_id: str, *, timeout_seconds: float | None, shows_events: bool) -> Run:
    """The run once it has ended; meanwhile what happens is said on stderr. Raises WaitTimeoutError."""
    if not shows_events:
        return client.wait(run_id, timeout_seconds)
    for event in client.events(run_id, follow=True, timeout=timeout_seconds):
        click.echo(event_line(event_view(event), stream=sys.stderr), err=True)
    return client.get(run_id)


def conclude(run: Run, output: Format) -> ExitCode:
    """Print a run that has ended, its answer alone for people, and what to do about one that failed."""
    view = run_view(run)

    def show() -> None:
        if run.status is RunStatus.COMPLETED:
            emit_text(full(run.output))

    emit_one(view, output, show)
    if run.status is RunStatus.COMPLETED:
        return ExitCode.DONE
    say(f"run {run.id} {run.status}: {run.error or 'no reason was given'}", style="red")
    suggest(f"agentq dead-letters show {run.id}" if run.dead_letter else f"agentq runs show {run.id}")
    return ExitCode.WATCHED_RUN_FAILED
