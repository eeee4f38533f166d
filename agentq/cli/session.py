"""What most commands begin with: a client for the settings of the environment, ids, and a person's consent."""

import gc
import getpass
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentq.cli.exit_codes import ExitCode, exit_code_of
from agentq.cli.output import Format, View, emit_list, is_terminal, say, suggest
from agentq.domain.errors import AgentqError, DecisionRequiredError, InvalidInputError, RefusedError

if TYPE_CHECKING:
    from agentq.client import AgentQ

_Function = TypeVar("_Function", bound=Callable[..., Any])

ID_SHOWN_MAX = 100


class DeclinedError(RefusedError):
    """The person at the terminal was asked, and said no."""


@contextmanager
def connected(actor: str | None = None) -> Iterator["AgentQ"]:
    """A client for the deployment that the environment describes; decisions are written down for `actor`."""
    gc.set_threshold(50_000)  # What is imported now stays: collecting amid it would cost a tenth of a list's time.
    from agentq.client import AgentQ  # noqa: PLC0415 - `--help` doesn't pay for the database's library

    with AgentQ.from_env(actor=actor or person()) as client:
        yield client


def person() -> str:
    """Who sits at this terminal, as far as the operating system knows."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def actor_option(function: _Function) -> _Function:
    return click.option("--actor", default=person, show_default="your user name", help="Who decides this.")(function)


def yes_option(function: _Function) -> _Function:
    return click.option("-y", "--yes", is_flag=True, help="Don't ask; needed away from a terminal.")(function)


def ids_argument(function: _Function) -> _Function:
    return click.argument("ids", nargs=-1, required=True, metavar="ID...|-")(function)


def given_ids(arguments: Sequence[str]) -> list[str]:
    """The ids of the command line; `-` stands for those on stdin, one a line. Each only once."""
    ids: list[str] = []
    for argument in arguments:
        ids += [line.strip() for line in text_of_stdin().splitlines()] if argument == "-" else [argument]
    ids = list(dict.fromkeys(identifier for identifier in ids if identifier))
    if not ids:
        raise InvalidInputError("no ids on stdin; nothing to do")
    for identifier in ids:
        if not identifier.isprintable():
            raise InvalidInputError(f"{identifier[:ID_SHOWN_MAX]!r} is no id: ids are printable characters")
    return ids


def text_of_stdin() -> str:
    """Raises InvalidInputError."""
    if sys.stdin is None:
        raise InvalidInputError("stdin is closed: nothing can be read from it")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"stdin isn't valid UTF-8 text: {error}") from None


def ask(question: str, *, yes: bool) -> None:
    """Go on only with a person's consent: `--yes`, or an answer at the terminal."""
    if yes:
        return
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        raise click.UsageError(f"{question} Nobody is at the terminal to ask: add --yes")
    if not click.confirm(question, err=True):
        raise DeclinedError("nothing was changed")


def change_each(ids: Sequence[str], change: Callable[[str], View], output: Format) -> ExitCode:
    """Make one change to each; the ones that fail don't stop the others. Machines get one record for each.

    `change` returns what there is to tell about one that went well, or raises.
    """
    views: list[View] = []
    errors: list[AgentqError] = []
    for identifier in ids:
        try:
            views.append({"id": identifier, "done": True, **change(identifier)})
        except AgentqError as error:
            errors.append(error)
            views.append({"id": identifier, "done": False, "error": str(error)})
            say(f"error: {error}" if identifier in str(error) else f"error: {identifier}: {error}", style="red")
            if isinstance(error, DecisionRequiredError):
                suggest(f"agentq dead-letters show {identifier}")
    if not output.is_for_people:
        emit_list([view for view in views if view["done"] or output is not Format.IDS], [], output, none="")
    if not errors:
        return ExitCode.DONE
    if len(errors) < len(ids):
        say(f"{len(ids) - len(errors)} done, {len(errors)} not")
        return ExitCode.PARTLY_DONE
    return exit_code_of(errors[0])
