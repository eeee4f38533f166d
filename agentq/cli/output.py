"""How the CLI shows things: data on stdout in the format that was asked for, everything else on stderr."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from agentq.domain.errors import AgentqError

if TYPE_CHECKING:
    from rich.console import Console

View = dict[str, Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])

STATUS_STYLES = {
    "queued": "cyan",
    "running": "blue",
    "waiting_for_approval": "magenta",
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "waiting": "bright_black",
    "available": "blue",
    "dead_lettered": "red",
    "closed": "yellow",
}
EFFECT_STYLES = {"read_only": "green", "idempotent_write": "yellow", "non_idempotent_write": "red"}


SHRUNK_CHARACTERS = 12  # What a column that may shrink keeps: enough to recognise it by.


class ReaderGoneError(Exception):
    """Nobody reads stdout any more: the rest isn't wanted. (Click would call a broken pipe a failure.)"""


class OutputError(AgentqError):
    """What stdout was led to doesn't take any more."""


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    IDS = "ids"

    @property
    def is_for_people(self) -> bool:
        return self is Format.TABLE


@dataclass(frozen=True, slots=True)
class Cell:
    """A text to show; `style` is a colour for terminals."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cell: Callable[[View], Cell]
    may_shrink: bool = False  # A terminal that is too narrow cuts these; ids and states always stay whole.
    yields: int = 0  # Where cutting isn't enough the highest is left out first; 0 always stays.


def output_options(function: _Function) -> _Function:
    """Adds `-o` and `--json`; the command gets a `Format` as `output`."""
    function = click.option(
        "--json",
        "as_json",
        is_flag=True,
        expose_value=False,
        callback=_as_json,
        is_eager=True,
        help="Short for -o json.",
    )(function)
    return click.option(
        "-o",
        "--output",
        type=click.Choice([each.value for each in Format]),
        default=Format.TABLE.value,
        callback=_chosen_format,
        show_default=True,
        help="What to print on stdout.",
    )(function)


def say(text: str, *, style: str = "") -> None:
    """A message to the person, on stderr."""
    click.echo(painted(Cell(clean(text), style), sys.stderr), err=True)


def suggest(*commands: str) -> None:
    """The next useful command."""
    for command in commands:
        say(f"next: {command}", style="cyan")


def emit_list(
    views: Iterable[View], columns: Sequence[Column], output: Format, *, id_of: str = "id", none: str
) -> None:
    """Print records. `none` is said (on stderr) when a table would be empty."""
    if output is Format.JSONL:
        for view in views:
            emit_text(_json_line(view))
        return
    listed = list(views)
    match output:
        case Format.JSON:
            emit_text(json.dumps(listed, indent=2, ensure_ascii=False))
        case Format.IDS:
            for identifier in dict.fromkeys(str(view[id_of]) for view in listed):
                emit_text(identifier)
        case _ if not listed:
            say(none)
        case _:
            emit_table(listed, columns)


def emit_one(view: View, output: Format, show: Callable[[], None], *, id_of: str = "id") -> None:
    """Print one record; `show` prints it for people."""
    match output:
        case Format.JSON:
            emit_text(json.dumps(view, indent=2, ensure_ascii=False))
        case Format.JSONL:
            emit_text(_json_line(view))
        case Format.IDS:
            emit_text(str(view[id_of]))
        case _:
            show()


def emit_text(text: str) -> None:
    """Data, on stdout, at once. Raises ReaderGoneError or OutputError, after which stdout goes nowhere."""
    try:
        click.echo(text)
    except BrokenPipeError:
        _close_stdout()
        raise ReaderGoneError from None
    except OSError as error:
        _close_stdout()
        raise OutputError(f"stdout can't be written: {error.strerror}") from None


def _close_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, rather than complain once more."""
    with suppress(OSError):  # One that isn't a file has nothing left to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit_table(views: Sequence[View], columns: Sequence[Column]) -> None:
    """A table: aligned plain text, on a terminal with colours and cut to the window."""
    titles = [Cell(column.title, "bold") for column in columns]
    rows = [titles, *([_cleaned(column.cell(view)) for column in columns] for view in views)]
    widths = {column: max(len(row[index].text) for row in rows) for index, column in enumerate(columns)}
    if is_colourful(sys.stdout):
        widths = _fitted(widths, shutil.get_terminal_size().columns)
    for row in rows:
        cells = [(cell, widths[column]) for column, cell in zip(columns, row, strict=True) if column in widths]
        emit_text("  ".join(_filled(cell, width) for cell, width in cells).rstrip())


def _cleaned(cell: Cell) -> Cell:
    return Cell(clean(cell.text), cell.style)


def _fitted(widths: dict[Column, int], window: int) -> dict[Column, int]:
    """Those widths, with columns cut, and as few as possible left out, until the line fits or none can give more."""
    kept = dict(widths)
    while _line_width(_least(kept)) > window:
        column = max(kept, key=lambda each: each.yields)
        if not column.yields:
            break
        del kept[column]
    least = _least(kept)
    while _line_width(kept) > window and kept != least:
        widest = max((column for column in kept if kept[column] > least[column]), key=kept.__getitem__)
        kept[widest] -= 1
    return kept


def _least(widths: dict[Column, int]) -> dict[Column, int]:
    return {column: min(width, SHRUNK_CHARACTERS) if column.may_shrink else width for column, width in widths.items()}


def _line_width(widths: dict[Column, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _filled(cell: Cell, width: int) -> str:
    text = cell.text if len(cell.text) <= width else f"{cell.text[: width - 1]}\u2026"
    return painted(Cell(text.ljust(width), cell.style), sys.stdout)


def emit_card(title: Cell, facts: Sequence[tuple[str, Cell]]) -> None:
    """Facts about one thing, as a panel on a terminal and as `name: value` lines elsewhere."""
    told = [(name, cell) for name, cell in facts if cell.text]
    if not is_colourful(sys.stdout):
        emit_text(clean(title.text))
        width = max((len(name) for name, _ in told), default=0)
        for name, cell in told:
            first, *rest = clean_block(cell.text).splitlines() or [""]
            emit_text(f"  {name:<{width}}  {first}".rstrip())
            for line in rest:
                emit_text(f"  {'':<{width}}  {line}".rstrip())
        return
    from rich.panel import Panel  # noqa: PLC0415 - only terminals pay for it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, cell in told:
        grid.add_row(name, Text(clean_block(cell.text), style=cell.style))
    heading = Text(clean(title.text), style=title.style or "bold")
    _console().print(Panel(grid, title=heading, title_align="left", border_style=title.style or "bright_black"))


def emit_heading(text: str) -> None:
    emit_text("")
    emit_text(painted(Cell(text, "bold"), sys.stdout))


def clean(text: str) -> str:
    """One line that can't steer a terminal, whatever a tool or a model wrote into it."""
    return "".join(
        character if character.isprintable() else " " if character.isspace() else "\ufffd" for character in text
    )


def clean_block(text: str) -> str:
    return "\n".join(clean(line) for line in text.splitlines())


def short(value: Any, characters_max: int = 60) -> str:
    """A value as a glance: texts as they are, the rest as JSON, both cut."""
    if value is None:
        return ""
    text = clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}\u2026"


def full(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def moment_cell(text: str | None) -> Cell:
    """A time as people read it: to the second, in UTC."""
    return Cell("" if text is None else f"{text[:10]} {text[11:19]}Z")


def ago(text: str | None) -> str:
    if text is None:
        return ""
    return f"{duration((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds())} ago"


def between(start: str | None, end: str | None) -> str:
    if start is None or end is None:
        return ""
    return duration((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())


def duration(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size * 1.5:
            return f"{seconds / size:.0f} {unit}"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 - tenths matter below that


def line_of(cells: Sequence[Cell], *, stream: IO[Any]) -> str:
    """Cells side by side as one line, coloured where that stream is a terminal; empty ones are left out."""
    return "  ".join(painted(_cleaned(cell), stream) for cell in cells if cell.text.strip()).rstrip()


def painted(cell: Cell, stream: IO[Any]) -> str:
    if not cell.style or not is_colourful(stream):
        return cell.text
    *is_bold, colour = cell.style.split()
    if colour == "bold":
        return click.style(cell.text, bold=True)
    return click.style(cell.text, fg=colour, bold=bool(is_bold) or None)


def is_terminal(stream: IO[Any] | None) -> bool:
    """None is what Python has for one that its caller closed."""
    return stream is not None and not stream.closed and stream.isatty()


def is_colourful(stream: IO[Any] | None) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _console() -> "Console":
    from rich.console import Console  # noqa: PLC0415 - only terminals pay for it

    return Console(highlight=False, soft_wrap=False)


def _json_line(view: View) -> str:
    return json.dumps(view, ensure_ascii=False, separators=(",", ":"))


def _as_json(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta["agentq.as_json"] = True


def _chosen_format(ctx: click.Context, _option: click.Parameter, value: str) -> Format:
    return Format.JSON if ctx.meta.get("agentq.as_json") else Format(value)
