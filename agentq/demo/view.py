"""How the demo shows what happens: a live table on a terminal, plain lines elsewhere."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from agentq.demo.tickets import Ticket
from agentq.demo.watch import Sight
from agentq.domain.events import EventKind
from agentq.domain.model import Event, Run, RunStatus, Step, StepKind, StepState

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

WORKER_STYLES = {"A": "cyan", "B": "magenta"}
RUN_STYLES = {
    RunStatus.COMPLETED: "green",
    RunStatus.FAILED: "bold red",
    RunStatus.RUNNING: "",
    RunStatus.QUEUED: "dim",
}
TOOL_WORDS = {"look_up_order": "look up", "tag_order": "tag", "refund_order": "refund"}
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TOLD_MAX, TOLD_MIN = 9, 3
LINES_ABOVE = 20  # The table and what surrounds it, and the longer of the lines below it.


class View(Protocol):
    """What the story of the demo is told to. `tell` is for what nobody should miss."""

    stream: TextIO

    def tell(self, text: str, style: str = "") -> None: ...

    def show(self, sight: Sight) -> None: ...


@contextmanager
def opened_view(stream: TextIO) -> Iterator[View]:
    """The live table when a person watches that stream, else the plain lines; closed when the block is left."""
    if not is_for_person(stream):
        yield PlainView(stream)
        return
    view = LiveView(stream)
    with view.live:
        yield view


def is_for_person(stream: TextIO) -> bool:
    """True: a terminal that takes colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class PlainView:
    """One line for each thing that happens."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._began = time.monotonic()

    def tell(self, text: str, style: str = "") -> None:
        self.stream.write(f"{time.monotonic() - self._began:6.1f} s  {text}\n")
        self.stream.flush()

    def show(self, sight: Sight) -> None:
        for ticket, event in sight.events:
            text = event_text(sight, ticket, event)
            if text is not None:
                self.tell(text)


class LiveView:
    """One row for each ticket, with its steps as they happen; below it what nobody should miss."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415 - only terminals pay for it
        from rich.live import Live  # noqa: PLC0415

        self.stream = stream
        self._began = time.monotonic()
        self._sight: Sight | None = None
        self._told: deque[tuple[float, str, str]] = deque(maxlen=TOLD_MAX)
        self._console = Console(file=stream, highlight=False)
        self.live = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=10)

    def tell(self, text: str, style: str = "") -> None:
        self._told.append((time.monotonic() - self._began, text, style))

    def show(self, sight: Sight) -> None:
        self._sight = sight
        for ticket, event in sight.events:
            if event.kind in TOLD_EVENTS and (text := event_text(sight, ticket, event)):
                self.tell(text, TOLD_EVENTS[event.kind])

    def _drawn(self) -> "Group":
        from rich.console import Group  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        told = self._told_table()
        if self._sight is None:
            return Group(told, Text(_spinner(), style="cyan"))
        legend = Text.assemble(
            ("by ", "bright_black"),
            *_join([_worker_mark(self._sight, name) for name in WORKER_STYLES], ("  ", "")),
            ("     ✓ done  ○ waits  ☠ cut off  ↻ again  ✗ stopped", "bright_black"),
        )
        return Group(self._table(self._sight), legend, Text(""), told)

    def _told_table(self) -> "Table":
        """The latest of what was told, as much as the terminal has room for."""
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        told = Table.grid(padding=(0, 2, 0, 0))
        told.add_column(justify="right", style="bright_black", no_wrap=True, min_width=7)
        told.add_column(ratio=1)
        room = max(TOLD_MIN, self._console.size.height - LINES_ABOVE)
        for at, text, style in list(self._told)[-room:]:
            is_short = style == TOLD_EVENTS[EventKind.RUN_COMPLETED]  # An answer's beginning says enough.
            told.add_row(
                f"{at:.1f} s", Text(text, style, no_wrap=is_short, overflow="ellipsis" if is_short else "fold")
            )
        return told

    def _table(self, sight: Sight) -> "Table":
        from rich import box  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, expand=True)
        table.add_column("TICKET", no_wrap=True)
        table.add_column("STEPS", ratio=1, overflow="fold")
        table.add_column("RUN", no_wrap=True, min_width=11)
        for ticket, run in sight.runs.items():
            name = Text.assemble((f"{ticket.number} ", "bold"), ticket.customer)
            table.add_row(
                name, _trail(sight, run), Text(_run_word(run), style=RUN_STYLES.get(run.status, "bright_black"))
            )
        return table


TOLD_EVENTS: Mapping[str, str] = {
    EventKind.STEP_REQUEUED: "yellow",
    EventKind.RUN_DEAD_LETTERED: "bold red",
    EventKind.WRITE_RESOLVED: "green",
    EventKind.RUN_REPLAYED: "green",
    EventKind.RUN_COMPLETED: "green",
}


def event_text(sight: Sight, ticket: Ticket, event: Event) -> str | None:
    """One event of a run as a person says it; None: it goes without saying."""
    run = sight.runs[ticket]
    step = next((step for step in run.steps if step.number == event.number), None)
    worker = sight.workers.get((event.run_id, event.number or 0), "?")
    what = f"ticket {ticket.number}: "
    match event.kind, step:
        case EventKind.FENCE_STAMPED, Step():
            return f"{what}{step_words(step)}: fence stamped, called by worker {worker}"
        case EventKind.STEP_SETTLED, Step():
            return f"{what}{step_words(step)}: done by worker {worker}"
        case EventKind.STEP_REQUEUED, Step():
            return f"{what}{step_words(step)}: nobody holds it any more, taken up again as attempt {step.attempt}"
        case EventKind.RUN_DEAD_LETTERED, Step():
            letter = run.dead_letter
            why = f"{letter.reason}, {letter.error}" if letter else "since replayed"
            return f"{what}dead letter at {step_words(step)}: {why}"
        case EventKind.WRITE_RESOLVED, Step():
            return f"{what}{step_words(step)}: recorded as happened, by {event.actor}"
        case EventKind.RUN_REPLAYED, _:
            return f"{what}runs again from where it stopped"
        case EventKind.RUN_COMPLETED, _:
            return f"{what}answered: {run.output}"
        case _:
            return None


def step_words(step: Step) -> str:
    """A step in few words: `refund 1003`."""
    if step.kind is StepKind.MODEL:
        return "model"
    order_id = step.arguments.get("order_id", "") if isinstance(step.arguments, dict) else ""
    return f"{TOOL_WORDS.get(step.tool or '', step.tool)} {order_id}".rstrip()


def _trail(sight: Sight, run: Run) -> "Text":
    from rich.text import Text  # noqa: PLC0415

    marks = [_step_mark(sight, run, step) for step in run.steps]
    # A mark stays beside its words when the line is broken.
    whole = [(text.replace(" ", "\N{NO-BREAK SPACE}"), style) for text, style in marks]
    return Text.assemble(*_join(whole, ("  ", "")))


def _step_mark(sight: Sight, run: Run, step: Step) -> tuple[str, str]:
    style = WORKER_STYLES.get(sight.workers.get((run.id, step.number), ""), "")
    again = "↻" if step.attempt > 1 else ""
    words = f"{again}{step_words(step) if step.tool == 'look_up_order' else TOOL_WORDS.get(step.tool or '', 'model')}"
    match step.state:
        case StepState.COMPLETED:
            return f"✓ {words}", style
        case StepState.AVAILABLE if sight.killed is not None and sight.held.get(step.ref) == sight.killed:
            return f"☠ {words}", "bold red"
        case StepState.AVAILABLE if step.ref in sight.held:
            return f"{_spinner()} {words}", f"bold {style}"
        case StepState.DEAD_LETTERED:
            return f"✗ {words}", "bold red"
        case _:
            return f"○ {words}", "bright_black"


def _worker_mark(sight: Sight, name: str) -> tuple[str, str]:
    return (f"worker {name} ☠ killed", "bold red") if name == sight.killed else (f"worker {name}", WORKER_STYLES[name])


def _run_word(run: Run) -> str:
    return "dead letter" if run.dead_letter else run.status.value


def _spinner() -> str:
    return SPINNER[int(time.monotonic() * 10) % len(SPINNER)]


def _join(parts: Iterable[tuple[str, str]], between: tuple[str, str]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for part in parts:
        joined += [between, part] if joined else [part]
    return joined
