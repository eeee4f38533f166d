"""`agentq dead-letters`: see what stopped, say what became of unknown writes, run again."""

from typing import Any

import click

from agentq.cli.cards import show_dead_letter
from agentq.cli.enqueue import parse_json
from agentq.cli.exit_codes import ExitCode
from agentq.cli.filters import dead_letter_filters
from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import (
    Cell,
    Column,
    Format,
    View,
    ago,
    emit_list,
    emit_one,
    output_options,
    say,
    short,
    suggest,
)
from agentq.cli.session import actor_option, ask, change_each, connected, given_ids, ids_argument, yes_option
from agentq.domain.errors import NotFoundError
from agentq.domain.model import RunStatus
from agentq.views import dead_letter_view, run_view

_COMMANDS = {
    "list": LazyCommand("agentq.cli.dead_letters:list_dead_letters", "What waits for a person, most urgent first."),
    "show": LazyCommand("agentq.cli.dead_letters:show", "Why it stopped, and what can be done."),
    "resolve": LazyCommand("agentq.cli.dead_letters:resolve", "Say whether an unknown write happened."),
    "replay": LazyCommand("agentq.cli.dead_letters:replay", "Run it again from the step that stopped it."),
}


@click.group("dead-letters", cls=LazyGroup, lazy_commands=_COMMANDS)
def dead_letters() -> None:
    """Runs that stopped and wait for a person."""


def _outcome(view: View) -> Cell:
    if view["has_contradiction"]:
        return Cell("CONTRADICTION", "bold red")
    return Cell("UNKNOWN", "bold red") if view["outcome_unknown"] else Cell("known", "green")


COLUMNS = (
    Column("RUN", lambda view: Cell(view["run_id"])),
    Column("STOPPED", lambda view: Cell(ago(view["created_at"]))),
    Column("AGENT", lambda view: Cell(view["agent"] or "")),
    Column("STEP", lambda view: Cell(f"{view['step']} {view['tool'] or 'model turn'}"), may_shrink=True),
    Column("OUTCOME", _outcome),
    Column("REASON", lambda view: Cell(view["reason"], "red")),
    Column("CLASS", lambda view: Cell(view["failure_class"])),
    Column("ERROR", lambda view: Cell(short(view["error"], 100)), may_shrink=True),
)


@click.command("list")
@dead_letter_filters
@output_options
def list_dead_letters(output: Format, **filters: object) -> None:
    """What waits for a person: contradictions first, then the newest."""
    with connected() as client:
        views = [dead_letter_view(letter) for letter in client.dead_letters(**filters)]
    emit_list(views, COLUMNS, output, id_of="run_id", none="no dead letters: nothing waits for a person")
    if output.is_for_people and views:
        suggest(f"agentq dead-letters show {views[0]['run_id']}")


@click.command()
@ids_argument
@output_options
def show(ids: tuple[str, ...], output: Format) -> None:
    """Why a run stopped, what is in doubt, and what can be done, with the very commands."""
    with connected() as client:
        for run_id in given_ids(ids):
            run = client.get(run_id)
            if run.dead_letter is None:
                raise NotFoundError(f"run {run_id} is {run.status} and no dead letter; see agentq runs show {run_id}")
            view = run_view(run)
            emit_one(view, output, lambda: show_dead_letter(view))  # noqa: B023 - called at once


_HAPPENED = click.option("--happened", metavar="RESULT", help="The write happened; this is its result, as JSON.")
_DID_NOT_HAPPEN = click.option("--did-not-happen", is_flag=True, help="The write did not happen, and won't any more.")
_LOOKED_AT = click.option(
    "--looked-at",
    metavar="TIME",
    help="When you looked and saw that it hadn't: RFC 3339, or an age such as 5m. [default: now]",
)
_REASON = click.option("--reason", default="", metavar="TEXT", help="How you know, for the audit log.")


@click.command()
@ids_argument
@_HAPPENED
@_DID_NOT_HAPPEN
@_LOOKED_AT
@_REASON
@actor_option
@yes_option
@output_options
def resolve(
    ids: tuple[str, ...],
    happened: str | None,
    did_not_happen: bool,
    looked_at: str | None,
    reason: str,
    actor: str,
    yes: bool,
    output: Format,
) -> ExitCode:
    """Say whether an unknown write happened. The run stays stopped until it is replayed.

    \b
      agentq dead-letters resolve ID --happened '{"refund_id": "re_17"}' --reason "seen at the provider"
      agentq dead-letters resolve ID --did-not-happen --reason "the provider has no such refund"
    """
    decision = _decision(happened, did_not_happen, looked_at)
    if not decision:
        raise click.UsageError("say what became of the write: --happened RESULT, or --did-not-happen")
    chosen = given_ids(ids)
    ask(f"Record for {_named(chosen)} that the write {_told(decision)}?", yes=yes)
    resolved: list[str] = []
    with connected(actor) as client:

        def change(run_id: str) -> View:
            step = client.resolve(run_id, **decision, reason=reason)
            resolved.append(run_id)
            say(f"{run_id}: recorded that step {step.number} ({step.tool}) {_told(decision)}")
            return {"step": step.number, "tool": step.tool}

        code = change_each(chosen, change, output)
        can_go_on = [run_id for run_id in resolved if client.status(run_id) is RunStatus.FAILED]
    if output.is_for_people and can_go_on:
        suggest(f"agentq dead-letters replay {' '.join(can_go_on)}")
    return code


@click.command()
@ids_argument
@_HAPPENED
@_DID_NOT_HAPPEN
@_LOOKED_AT
@_REASON
@actor_option
@yes_option
@output_options
def replay(
    ids: tuple[str, ...],
    happened: str | None,
    did_not_happen: bool,
    looked_at: str | None,
    reason: str,
    actor: str,
    yes: bool,
    output: Format,
) -> ExitCode:
    """Run a dead letter again from the step that stopped it; completed steps keep their results.

    With an unknown write, say first whether it happened: here, or by agentq dead-letters resolve.
    """
    decision = _decision(happened, did_not_happen, looked_at)
    chosen = given_ids(ids)
    told = f", recording that the write {_told(decision)}" if decision else ""
    ask(f"Replay {_named(chosen)}{told}?", yes=yes)
    with connected(actor) as client:

        def change(run_id: str) -> View:
            client.replay(run_id, **decision, reason=reason)
            say(f"{run_id}: runs again")
            return {}

        code = change_each(chosen, change, output)
    if output.is_for_people and code is ExitCode.DONE:
        suggest(f"agentq runs events {chosen[0]} --follow")
    return code


def _decision(happened: str | None, did_not_happen: bool, looked_at: str | None) -> dict[str, Any]:
    """The arguments of the client's own methods; empty when nothing was said."""
    if happened is not None and did_not_happen:
        raise click.UsageError("--happened and --did-not-happen contradict each other; say one of them")
    if looked_at is not None and not did_not_happen:
        raise click.UsageError("--looked-at goes with --did-not-happen")
    if happened is not None:
        return {"happened": parse_json("--happened", happened)}
    if did_not_happen:
        return {"did_not_happen": True, "looked_at": looked_at}
    return {}


def _told(decision: dict[str, Any]) -> str:
    return "happened" if "happened" in decision else "did not happen"


def _named(ids: list[str]) -> str:
    return f"run {ids[0]}" if len(ids) == 1 else f"{len(ids)} runs"
