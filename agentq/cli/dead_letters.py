"""`agentq dead-letters`: see what stopped and why, and what a replay would do."""

import click

from agentq.cli.cards import show_dead_letter
from agentq.cli.filters import dead_letter_filters
from agentq.cli.hints import say_paused, suggest_about_each, suggest_about_groups
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
    short,
)
from agentq.cli.session import connected, given_ids, ids_argument
from agentq.domain.errors import NotFoundError
from agentq.views import dead_letter_view, group_view, run_view

SCREENFUL = 20  # More dead letters than that are shown by what they have in common, unless each is asked for.

_COMMANDS = {
    "list": LazyCommand("agentq.cli.dead_letters:list_dead_letters", "What waits for a person, most urgent first."),
    "show": LazyCommand("agentq.cli.dead_letters:show", "Why it stopped, and what can be done."),
    "plan": LazyCommand("agentq.cli.dead_letters:plan", "What a replay would do to the outside world."),
    "resolve": LazyCommand("agentq.cli.decisions:resolve", "Say whether an unknown write happened."),
    "replay": LazyCommand("agentq.cli.decisions:replay", "Run it again from the step that stopped it."),
    "discard": LazyCommand("agentq.cli.decisions:discard", "Give it up for good: it leaves the list."),
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
    Column("AGENT", lambda view: Cell(view["agent"] or ""), yields=3),
    Column("STEP", lambda view: Cell(f"{view['step']} {view['tool'] or 'model turn'}"), may_shrink=True),
    Column("OUTCOME", _outcome),
    Column("REASON", lambda view: Cell(view["reason"], "red"), yields=2),
    Column("CLASS", lambda view: Cell(view["failure_class"]), yields=1),
    Column("ERROR", lambda view: Cell(short(view["error"], 100)), may_shrink=True),
)


def _worst(view: View) -> Cell:
    if view["contradicted_count"]:
        return Cell(f"{view['contradicted_count']:,} CONTRADICT", "bold red")
    return Cell(f"{view['unknown_count']:,} unknown", "bold red") if view["unknown_count"] else Cell("known", "green")


GROUP_COLUMNS = (
    Column("COUNT", lambda view: Cell(f"{view['count']:,}")),
    Column("TOOL", lambda view: Cell(view["tool"] or "model turn")),
    Column("OUTCOME", _worst),
    Column("REASON", lambda view: Cell(view["reason"], "red"), yields=2),
    Column("CLASS", lambda view: Cell(view["failure_class"])),
    Column("FINGERPRINT", lambda view: Cell(view["fingerprint"])),
    Column("OLDEST", lambda view: Cell(ago(view["oldest_at"])), yields=3),
    Column("NEWEST", lambda view: Cell(ago(view["newest_at"])), yields=1),
    Column("ERROR", lambda view: Cell(short(view["newest_error"], 100)), may_shrink=True),
)


@click.command("list")
@dead_letter_filters
@click.option(
    "--group/--each",
    "grouped",
    default=None,
    help=f"By what they have in common, or one by one. [default: a table of more than {SCREENFUL} is by group]",
)
@output_options
def list_dead_letters(output: Format, grouped: bool | None, **filters: object) -> None:
    """What waits for a person: contradictions first, then the newest.

    A table of many shows groups: the same tool, failure class, reason and kind of error.
    """
    with connected() as client:
        unlimited = {name: value for name, value in filters.items() if name != "limit"}
        if grouped is None:
            grouped = output.is_for_people and client.count_dead_letters(**unlimited) > SCREENFUL
        if grouped:
            groups = [group_view(group) for group in client.dead_letter_groups(**unlimited)]
            emit_list(groups, GROUP_COLUMNS, output, id_of="newest_run_id", none="no dead letters match")
            if output.is_for_people and groups:
                suggest_about_groups(client, groups)
            return
        views = [dead_letter_view(letter) for letter in client.dead_letters(**filters)]
        emit_list(views, COLUMNS, output, id_of="run_id", none="no dead letters: nothing waits for a person")
        if output.is_for_people and not views:
            say_paused(client)
    if output.is_for_people and views:
        suggest_about_each(views)


@click.command()
@ids_argument
@click.option("--from-step", type=int, metavar="STEP", help="Of a new run that begins with the results before STEP.")
@click.option(
    "--repeat-write", type=int, multiple=True, metavar="STEP", help="This write may happen again; may be repeated."
)
@output_options
def plan(ids: tuple[str, ...], from_step: int | None, repeat_write: tuple[int, ...], output: Format) -> None:
    """What a replay would do, step by step, before you do it; a replay can be bound to its digest."""
    from agentq.cli.plans import show_plan, suggest_next  # noqa: PLC0415 - `--help` and lists don't need it
    from agentq.views import plan_view  # noqa: PLC0415

    with connected() as client:
        for run_id in given_ids(ids):
            view = plan_view(client.replay_plan(run_id, from_step=from_step, repeat_writes=repeat_write))
            emit_one(view, output, lambda: show_plan(view), id_of="run_id")  # noqa: B023 - called at once
            if output.is_for_people:
                suggest_next(client, view)


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
