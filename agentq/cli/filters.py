"""The filter options of commands that list runs: the grammar of `agentq.filters`, as options."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from agentq.domain.failures import FailureClass
from agentq.domain.model import DeadLetterReason, RunStatus

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WHY_IT_STOPPED = (
    click.option("--tool", help="Only those that called this tool."),
    click.option(
        "--reason", "--stop-reason", metavar="REASON", help=f"Only this reason: {', '.join(DeadLetterReason)}."
    ),
    click.option(
        "--failure-class", "--class", metavar="CLASS", help=f"Only this failure class: {', '.join(FailureClass)}."
    ),
    click.option("--fingerprint", metavar="HEX", help="Only errors like this one, by the name that groups show."),
    click.option("--outcome-unknown/--outcome-known", default=None, help="Only (without) an unknown write."),
)
_WHICH = (
    click.option("--agent", help="Only runs of this agent."),
    click.option("--since", metavar="TIME", help="Created since: RFC 3339 (UTC), or an age: 30m, 1h, 3d."),
    click.option("--until", metavar="TIME", help="Created before."),
    click.option("-m", "--metadata", multiple=True, metavar="KEY=VALUE", help="Only with this; may be repeated."),
    click.option("-n", "--limit", default=50, show_default=True, metavar="COUNT", help="How many at most."),
)
_STATUS = click.option(
    "-s",
    "--status",
    multiple=True,
    metavar="STATUS",
    help=f"Only this: {', '.join(RunStatus)}; may be repeated.",
)


def run_filters(function: _Function) -> _Function:
    """Adds the options that choose runs; the command gets them as keyword arguments for `parse_filters`."""
    return _add(function, (_STATUS, *_WHICH, *_WHY_IT_STOPPED))


def dead_letter_filters(function: _Function) -> _Function:
    """Adds the options that choose dead letters: those of runs, without the status, which is known."""
    return _add(function, (*_WHICH, *_WHY_IT_STOPPED))


def choose_many(function: _Function) -> _Function:
    """Adds the options that choose dead letters for a decision about many; `chosen_filters` reads them.

    The reason that they stopped for is `--stop-reason` here: `--reason` is why the decision is made.
    """
    stop_reason = click.option(
        "--stop-reason", metavar="REASON", help=f"Those with this reason: {', '.join(DeadLetterReason)}."
    )
    limit = click.option("-n", "--limit", type=int, metavar="COUNT", help="How many at most. [default: all of them]")
    every = click.option("--all", "everything", is_flag=True, help="Every open dead letter.")
    return _add(function, (*_WHICH[:-1], limit, _WHY_IT_STOPPED[0], stop_reason, *_WHY_IT_STOPPED[2:], every))


def chosen_filters(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options of `choose_many` that were given, by the names of the filter grammar.

    An empty one, such as a shell's unset variable, would choose more than was meant. Raises click.UsageError.
    """
    for name, value in options.items():
        if value == "":
            raise click.UsageError(f"--{name.replace('_', '-')} is empty: say what it takes, or leave it out")
    named = {"reason" if name == "stop_reason" else name: value for name, value in options.items()}
    return {name: value for name, value in named.items() if name != "everything" and value not in (None, ())}


def _add(function: _Function, options: tuple[Callable[[_Function], _Function], ...]) -> _Function:
    for option in reversed(options):
        function = option(function)
    return function
