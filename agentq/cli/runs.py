"""`agentq runs`: list, show, follow and cancel runs."""

import sys

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.filters import run_filters
from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import (
    STATUS_STYLES,
    Cell,
    Column,
    Format,
    View,
    ago,
    between,
    emit_list,
    emit_one,
    emit_text,
    output_options,
    say,
    short,
    suggest,
)
from agentq.cli.session import actor_option, ask, change_each, connected, given_ids, ids_argument, yes_option
from agentq.cli.timeline import show_run
from agentq.cli.tools import say_parked
from agentq.cli.watch import event_line
from agentq.domain.pauses import parked_steps
from agentq.views import event_view, ledger_view, parked_view, run_view

SEQUENCE_MAX = 2**31 - 1  # The largest that a database holds.

_COMMANDS = {
    "list": LazyCommand("agentq.cli.runs:list_runs", "Runs, newest first."),
    "show": LazyCommand("agentq.cli.runs:show", "One run: its steps, every attempt at them, and what happened."),
    "events": LazyCommand("agentq.cli.runs:events", "A run's audit log, or what happens to it from now on."),
    "cancel": LazyCommand("agentq.cli.runs:cancel", "Stop runs; a write that is in flight ends first."),
}


@click.group(cls=LazyGroup, lazy_commands=_COMMANDS)
def runs() -> None:
    """List, show, follow and cancel runs."""


def note_on(view: View) -> Cell:
    """Why a run needs somebody, in a few words."""
    letter = view["dead_letter"]
    if view["has_contradiction"]:
        return Cell("CONTRADICTION", "bold red")
    if letter and letter["outcome_unknown"]:
        return Cell("outcome unknown", "bold red")
    if letter:
        return Cell(f"{letter['reason']}: {short(letter['error'], 60)}", "red")
    if view["error"]:
        return Cell(short(view["error"], 60), "red")
    if view["cancel_requested"] and view["status"] == "running":
        return Cell("cancel requested", "yellow")
    return Cell("")


COLUMNS = (
    Column("RUN", lambda view: Cell(view["id"])),
    Column("STATUS", lambda view: Cell(view["status"], STATUS_STYLES[view["status"]])),
    Column("AGENT", lambda view: Cell(view["agent"]), yields=2),
    Column("CREATED", lambda view: Cell(ago(view["created_at"]))),
    Column("TOOK", lambda view: Cell(between(view["created_at"], view["finished_at"])), yields=3),
    Column("INPUT", lambda view: Cell(short(view["input"], 40)), may_shrink=True, yields=1),
    Column("NOTE", note_on, may_shrink=True),
)


@click.command("list")
@run_filters
@output_options
def list_runs(output: Format, **filters: object) -> None:
    """Runs, newest first."""
    with connected() as client:
        views = [run_view(run, with_steps=False) for run in client.runs(**filters)]
    emit_list(views, COLUMNS, output, none="no runs match")
    if output.is_for_people and len(views) == filters["limit"]:
        say(f"these are the newest {len(views)}; --limit shows more, --since and --status narrow them down")


@click.command()
@click.argument("ids", nargs=-1, metavar="ID...|-")
@click.option("-k", "--idempotency-key", "keys", multiple=True, metavar="KEY", help="The run that this key started.")
@click.option("--events/--no-events", default=True, show_default=True, help="The audit log as well.")
@output_options
def show(ids: tuple[str, ...], keys: tuple[str, ...], events: bool, output: Format) -> None:
    """One run: its steps, every attempt at them, and what happened."""
    if not ids and not keys:
        raise click.UsageError("name a run by its id, or by --idempotency-key")
    with connected() as client:
        wanted = [client.get_by_key(key).id for key in keys] + (given_ids(ids) if ids else [])
        found = []
        for ledger in [client.ledger(run_id) for run_id in wanted]:
            run = ledger.run
            found.append(run)
            waiting = [] if run.status.is_terminal else parked_steps(run, client.pauses())
            view = {**ledger_view(ledger), "parked": [parked_view(each) for each in waiting]}
            log = view.pop("events")
            emit_one(
                {**view, "events": log} if events else view,
                output,
                lambda: show_run(view, log if events else []),  # noqa: B023 - called at once
            )
            if output.is_for_people:
                say_parked(view["parked"])
    if output.is_for_people:
        for run in found:
            if run.dead_letter:
                suggest(f"agentq dead-letters show {run.id}")
            elif not run.status.is_terminal:
                suggest(f"agentq runs events {run.id} --follow")


@click.command()
@click.argument("run_id", metavar="ID")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option(
    "--after",
    type=click.IntRange(0, SEQUENCE_MAX),
    default=0,
    show_default=True,
    metavar="SEQUENCE",
    help="Only what comes after this one.",
)
@output_options
def events(run_id: str, follow: bool, after: int, output: Format) -> None:
    """A run's audit log, or what happens to it from now on."""
    with connected() as client:
        log = client.events(run_id, after, follow=follow)
        if output.is_for_people:
            for event in log:
                emit_text(event_line(event_view(event), stream=sys.stdout))
        else:
            emit_list((event_view(event) for event in log), [], output, id_of="sequence", none="")


@click.command()
@ids_argument
@click.option("--reason", default="", metavar="TEXT", help="Why, for the audit log.")
@actor_option
@yes_option
@output_options
def cancel(ids: tuple[str, ...], reason: str, actor: str, yes: bool, output: Format) -> ExitCode:
    """Stop runs; a write that is in flight ends first."""
    chosen = given_ids(ids)
    with connected(actor) as client:
        ask(f"Cancel {len(chosen)} runs?" if len(chosen) > 1 else f"Cancel run {chosen[0]}?", yes=yes)

        def change(run_id: str) -> View:
            status = client.cancel(run_id, reason=reason)
            say(
                f"{run_id}: {status}"
                if status.is_terminal
                else f"{run_id}: {status}, cancelled when its write has ended"
            )
            return {"status": status.value}

        return change_each(chosen, change, output)
