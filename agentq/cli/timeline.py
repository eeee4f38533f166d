"""A run as a timeline in 80 columns: the facts, each step with its attempts, and what happened."""

import sys
import textwrap
from collections.abc import Iterator, Sequence

from agentq.cli.cards import arguments_text, result_text
from agentq.cli.output import (
    STATUS_STYLES,
    Cell,
    View,
    ago,
    between,
    clean,
    clean_block,
    duration,
    emit_card,
    emit_heading,
    emit_text,
    full,
    is_colourful,
    moment_cell,
    painted,
    short,
)
from agentq.cli.watch import event_style, step_text, worker_text
from agentq.domain.ledger import AttemptEnd

WIDTH = 80
STEP_INDENT, ATTEMPT_INDENT, TOLD_INDENT = 5, 7, 20
_END_STYLES = {
    AttemptEnd.SETTLED: "green",
    AttemptEnd.SETTLED_LATE: "green",
    AttemptEnd.RESOLVED: "green",
    AttemptEnd.DEAD_LETTERED: "red",
    AttemptEnd.FAILED: "red",
    AttemptEnd.DIED: "red",
}
_NOW = {True: "under way", False: "nobody is at it now", None: "under way, as far as is known"}
_ANSWERS = {"failed": "the probe itself failed"}
NOTHING_CAME = "came to nothing"
FACT_WIDTH = 62  # Of what a card says of one thing, where no panel folds it.


def show_run(view: View, events: Sequence[View]) -> None:
    """A run, as `views.ledger_view` has it, and its audit log."""
    day = view["created_at"][:10]
    emit_card(Cell(f"run {view['id']}", STATUS_STYLES[view["status"]]), [*_folded(_facts(view))])
    if view["steps"]:
        emit_heading("Steps")
        for step in view["steps"]:
            _show_step(step, view, day)
    if events:
        emit_heading("What happened")
        for event in events:
            _show_event(event, day)


# --- Facts ----------------------------------------------------------------------------------------------------------


def _facts(view: View) -> list[tuple[str, Cell]]:
    style = STATUS_STYLES[view["status"]]
    lost = f"{view['events_lost']} audit events of reads could not be stored" if view["events_lost"] else ""
    doubt = "two answers about one write don't agree: see below" if view["has_contradiction"] else ""
    tokens = sum(step["input_tokens"] + step["output_tokens"] for step in view["steps"])
    return [
        ("status", Cell(f"{view['status']}{', cancel requested' if view['cancel_requested'] else ''}", style)),
        ("CONTRADICTION", Cell(doubt, "bold red")),
        ("agent", Cell(view["agent"] + (" (interactive)" if view["mode"] == "interactive" else ""))),
        ("created", Cell(f"{moment_cell(view['created_at']).text} ({ago(view['created_at'])})")),
        ("took", Cell(between(view["created_at"], view["finished_at"]))),
        ("copied from", Cell(_origin(view))),
        ("key", Cell(view["idempotency_key"] or "")),
        ("metadata", Cell(", ".join(f"{key}={value}" for key, value in (view["metadata"] or {}).items()))),
        ("input", Cell(full(view["input"])[:2000])),
        ("output", Cell(full(view["output"])[:2000], "green")),
        ("error", Cell(view["error"] or "", "red")),
        ("in doubt" if view["dead_letter"] else "in flight", _fence_cell(view)),
        ("tokens", Cell(f"{tokens:,}" if tokens else "")),
        ("suppressed", _suppressed_cell(view)),
        ("lost", Cell(lost, "yellow")),
    ]


def _folded(facts: list[tuple[str, Cell]]) -> Iterator[tuple[str, Cell]]:
    for name, cell in facts:
        lines = [folded for line in clean_block(cell.text).splitlines() for folded in textwrap.wrap(line, FACT_WIDTH)]
        yield name, cell if is_colourful(sys.stdout) else Cell("\n".join(lines), cell.style)


def _origin(view: View) -> str:
    if view["copied_from"] is None:
        return ""
    last = view["copied_steps"]
    return f"run {view['copied_from']}, the results of its steps 1 to {last}" if last else f"run {view['copied_from']}"


def _fence_cell(view: View) -> Cell:
    fence = view["pending_effect"]
    if fence is None:
        return Cell("")
    return Cell(f"{fence['tool']} (step {fence['step']}), since {moment_cell(fence['stamped_at']).text}", "yellow")


def _suppressed_cell(view: View) -> Cell:
    """Never a number that could be too small without saying so."""
    steps = [step for step in view["steps"] if step["attempts"]]
    if not steps:
        return Cell("")
    is_exact = all(step["suppressed_is_exact"] for step in steps)
    total = sum(step["suppressed"] or 0 for step in steps)
    if total:
        return Cell(f"{'' if is_exact else 'at least '}{_deliveries(total)} {NOTHING_CAME}", "yellow")
    if is_exact:
        return Cell(f"no delivery {NOTHING_CAME}")
    if any(step["suppressed"] is None for step in steps):
        return Cell("not known: Redis doesn't have the counts of the whole run")
    return Cell("none until its steps ended; later ones are not known")


def _deliveries(count: int) -> str:
    return f"{count} {'delivery' if count == 1 else 'deliveries'}"


# --- Steps ----------------------------------------------------------------------------------------------------------


def _show_step(step: View, view: View, day: str) -> None:
    what = "model turn" if step["tool"] is None else f"{step['tool']}({arguments_text(step['arguments'])})"
    state = f"  {step['state']}"
    room = WIDTH - STEP_INDENT - len(state)
    what = short(what, room)
    colour = "bright_black" if step["tool"] is None else ""
    head = painted(Cell(f"{step['number']:>3}  "), sys.stdout) + painted(Cell(what.ljust(room), colour), sys.stdout)
    emit_text(head + painted(Cell(state, STATUS_STYLES.get(step["state"], "")), sys.stdout))
    if step["number"] <= view["copied_steps"]:
        _line(Cell("its result came with the copy", "bright_black"), "", STEP_INDENT)
    effect = step["effect"] if step["effect"] not in (None, "read_only") else ""
    result = result_text(step)
    if effect or result.text:
        _line(result, f"{effect}{'  ' if effect and result.text else ''}", STEP_INDENT)
    for attempt in step["attempts"]:
        _show_attempt(attempt, day)
    counted = _counted(step)
    if counted:
        _line(Cell(counted, "yellow"), "", ATTEMPT_INDENT)


def _counted(step: View) -> str:
    """Nothing, where none is the whole truth, or the run's own line says that it isn't known."""
    if not step["suppressed"]:
        return ""
    return f"{'' if step['suppressed_is_exact'] else 'at least '}{_deliveries(step['suppressed'])} {NOTHING_CAME}"


def _show_attempt(attempt: View, day: str) -> None:
    began = f"attempt {attempt['number']}  {_clock(attempt['started_at'], day)}  "
    end = attempt["end"]
    told = Cell(_how_it_ended(attempt), _END_STYLES.get(end, "yellow"))
    worker = f"  ({worker_text(attempt['worker'])})" if attempt["worker"] else ""
    _line(told, began, ATTEMPT_INDENT, behind=worker)
    for line in words_of(attempt["told"]):
        _line(Cell(line), "", TOLD_INDENT)
    for each in attempt["happenings"]:
        told = Cell(each["what"], "red" if each["what"] == "contradicted" else "yellow")
        why = "; ".join(words_of(each["told"]))
        behind = f"{': ' if why else ''}{why}  ({worker_text(each['by'])})"
        _line(told, f"{_clock(each['at'], day)}  ", TOLD_INDENT, behind=behind)


def _how_it_ended(attempt: View) -> str:
    end, took = attempt["end"], attempt["seconds"]
    if end is None:
        return (
            _NOW[attempt["is_held"]] if attempt["worker"] or attempt["is_held"] is not None else "not known to be held"
        )
    if attempt["ended_at"] is None:
        return str(end)
    if end == AttemptEnd.DIED:
        return f"died, seen after {duration(took)}" if took is not None else "died"
    return f"{end} after {duration(took)}" if took is not None else f"{end} at {attempt['ended_at'][11:23]}"


def words_of(told: View) -> Iterator[str]:
    """What an event says of why, in words."""
    known = {name: value for name, value in told.items() if value not in (None, "")}
    charge, due, error = known.pop("charge", None), known.pop("due_in_seconds", None), known.pop("error", None)
    answer, asked_again = known.pop("answer", None), known.pop("asked_again_in_seconds", None)
    known.pop("effect", None)
    if known.pop("is_error", False):
        yield "its result is an error"
    if known.pop("outcome_unknown", False):
        yield "whether it happened is not known"
    if error:
        kind = known.pop("failure_class", None)
        yield f"{error} [{kind}]" if kind else error
    if charge:
        charged = "nothing was charged" if charge == "nothing" else f"charged: {charge}"
        yield f"{charged}; due again {'at once' if not due else f'in {duration(due)}'}"
    if answer:
        again = "" if asked_again is None else f", asked again in {duration(asked_again)}"
        yield f"{_ANSWERS.get(answer, str(answer).replace('_', ' '))}{again}"
    rest = ", ".join(f"{name.replace('_', ' ')} {short(value, 200)}" for name, value in known.items())
    if rest:
        yield rest


# --- Events ---------------------------------------------------------------------------------------------------------


def _show_event(event: View, day: str) -> None:
    data = {name: _glance(name, value) for name, value in event["data"].items()}
    told = "  ".join(f"{name}={short(value, 200)}" for name, value in data.items())
    behind = "".join(f"  {part}" for part in (step_text(event), told, f"({worker_text(event['actor'])})") if part)
    _line(Cell(event["kind"], event_style(event["kind"])), f"{_clock(event['at'], day)}  ", 2, behind=behind, hang=16)


def _glance(name: str, value: object) -> object:
    """Ids are long: a person compares their beginnings, and looks for a machine."""
    match name:
        case "fence":
            return str(value)[:8]
        case "worker":
            return worker_text(str(value))
        case _:
            return value


# --- Lines ----------------------------------------------------------------------------------------------------------


def _line(cell: Cell, before: str, indent: int, *, behind: str = "", hang: int | None = None) -> None:
    """One line, folded at the width of the timeline; the cell alone is coloured."""
    text = clean(f"{before}{cell.text}{behind}")
    hanging = " " * (hang if hang is not None else indent + (len(before) if behind or before else 0))
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=hanging,
        drop_whitespace=True,
        break_on_hyphens=False,
    )
    for line in lines:
        emit_text(line.replace(cell.text, painted(cell, sys.stdout), 1) if cell.text in line else line)
        cell = cell if cell.text not in line else Cell("")


def _clock(at: str | None, day: str) -> str:
    """A time of the run's first day, or a day and a time, equally long."""
    if at is None:
        return "-".ljust(12)
    return at[11:23] if at[:10] == day else f"{at[5:10]} {at[11:16]} "
