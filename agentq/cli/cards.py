"""A dead letter as a person reads it: a card of facts, and what can be done."""

import shlex
from datetime import datetime, timedelta

from agentq.cli.output import (
    Cell,
    View,
    ago,
    emit_card,
    emit_heading,
    emit_text,
    full,
    moment_cell,
    short,
)
from agentq.cli.watch import worker_text
from agentq.domain.times import time_text


def show_dead_letter(view: View) -> None:
    """A dead-lettered run: what stopped it, what is in doubt, and the commands for what can be done next."""
    emit_card(Cell(f"dead letter {view['id']}", "red"), _dead_letter_facts(view))
    emit_heading("What you can do")
    for what, command in next_moves(view):
        emit_text(f"  {what}")
        emit_text(f"    {command}")


def next_moves(view: View) -> list[tuple[str, str]]:
    """What can be done about a dead-lettered run, each with the command that does it."""
    run_id = shlex.quote(view["id"])
    moves = [
        ("See every step and event:", f"agentq runs show {run_id}"),
        ("See what a replay would do to the outside world:", f"agentq dead-letters plan {run_id}"),
    ]
    resolve = f"agentq dead-letters resolve {run_id}"
    if is_in_doubt(view):
        if view["pending_effect"]["has_probe"] and view["mode"] == "queued":
            moves.append(("Its probe can be asked again, and the run goes on by its answer:", f"{resolve} --by-probe"))
        moves += [
            ("If the write happened, say so with its result (JSON):", f"{resolve} --happened '{{...}}' --reason '...'"),
            (
                f"If it did not happen{_not_before(view)}:",
                f"{resolve} --did-not-happen --looked-at TIME --reason '...'",
            ),
        ]
        if not view["cancel_requested"]:
            moves.append(("Then, to run it on from there:", f"agentq dead-letters replay {run_id}"))
    elif not view["cancel_requested"]:
        moves.append(
            ("When the cause is gone, run it on from where it stopped:", f"agentq dead-letters replay {run_id}")
        )
    return [*moves, ("To give it up for good:", f"agentq dead-letters discard {run_id} --reason '...'")]


def is_in_doubt(view: View) -> bool:
    """True: a write of this dead-lettered run may or may not have happened, and nobody has said which."""
    return bool(view["dead_letter"] and view["dead_letter"]["outcome_unknown"] and view["pending_effect"])


def _not_before(view: View) -> str:
    fence = view["pending_effect"]
    if fence["settles_within_seconds"] is None:
        return " (its tool doesn't say how long a request may still act: look, and say when you looked)"
    settled = datetime.fromisoformat(fence["operation_deadline"]) + timedelta(seconds=fence["settles_within_seconds"])
    return f", seen at {moment_cell(time_text(settled)).text} or later"


def _dead_letter_facts(view: View) -> list[tuple[str, Cell]]:
    letter, fence = view["dead_letter"], view["pending_effect"]
    step = next((step for step in view["steps"] if step["number"] == letter["step"]), None)
    outcome = (
        Cell("UNKNOWN: the write may have happened, or not", "bold red")
        if is_in_doubt(view)
        else Cell("known, and recorded: a replay goes on from there", "green")
        if step is not None and step["state"] == "completed"
        else Cell("nothing is in doubt", "green")
    )
    facts = [
        ("agent", Cell(view["agent"])),
        ("stopped", Cell(f"{moment_cell(letter['created_at']).text} ({ago(letter['created_at'])})")),
        ("reason", Cell(letter["reason"], "red")),
        ("class", Cell(letter["failure_class"])),
        ("error", Cell(letter["error"], "red")),
        ("outcome", outcome),
    ]
    if view["has_contradiction"]:
        facts.append(
            ("CONTRADICTION", Cell("two answers about one write don't agree: see agentq runs show", "bold red"))
        )
    if step is not None:
        what = f"{step['tool']} ({step['effect']})" if step["tool"] else "model turn"
        facts += [
            ("step", Cell(f"{step['number']}, attempt {step['attempt']}: {what}")),
            ("arguments", Cell(full(step["arguments"])[:2000])),
            ("result", Cell(full(step["result"])[:2000])),
            ("spent", Cell(f"{step['tries']} tries, {step['crashes']} crashes")),
        ]
    if fence is not None:
        facts += [
            ("fence", Cell(f"stamped {moment_cell(fence['stamped_at']).text} by {worker_text(fence['owner'])}")),
            ("deadline", Cell(f"its call ended by {moment_cell(fence['operation_deadline']).text}")),
        ]
    if view["cancel_requested"]:
        facts.append(("cancelled", Cell("yes: it can be resolved, not replayed", "yellow")))
    return [*facts, ("input", Cell(full(view["input"])[:2000]))]


def arguments_text(arguments: object) -> str:
    if isinstance(arguments, dict):
        return short(", ".join(f"{key}={short(value, 24)}" for key, value in arguments.items()), 60)
    return short(arguments, 60)


def result_text(step: View) -> Cell:
    result = step["result"]
    if step["may_have_happened"]:
        return Cell("may have happened", "bold red")
    if step["tool"] is None and isinstance(result, dict):
        calls = [call["function"]["name"] for call in result.get("tool_calls") or []]
        return Cell(short(f"asks for {', '.join(calls)}" if calls else result.get("content"), 60))
    return Cell(short(result, 60), "red" if step["is_error"] else "")
