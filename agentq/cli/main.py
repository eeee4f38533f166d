"""The entry point of the `agentq` command: its list of commands, and how each kind of error ends it."""

import sys
from typing import NoReturn

import click

from agentq.cli.exit_codes import ExitCode, exit_code_of
from agentq.cli.lazy import LazyCommand, LazyGroup
from agentq.cli.output import ReaderGoneError, say, suggest
from agentq.domain.errors import (
    AgentqError,
    BrokerUnavailableError,
    LeasesUnavailableError,
    StoreUnavailableError,
)

_EPILOG = """\b
Exit codes: 0 done, 1 failed, 2 usage or refused, 3 partly done,
            4 a watched run failed, 5 waited too long.
Settings:   AGENTQ_DATABASE_URL, AGENTQ_BROKER_URL, AGENTQ_AGENTS, ... in the environment;
            with none set, everything lives in .agentq/ of the current folder.
Completion: eval "$(_AGENTQ_COMPLETE=bash_source agentq)" (or zsh_source, fish_source).
"""


_COMMANDS = {
    "demo": LazyCommand("agentq.cli.demo:demo", "See a crash and a recovery on real parts, in half a minute."),
    "up": LazyCommand("agentq.cli.up:up", "Start everything on this machine: Valkey, workers, Flower."),
    "worker": LazyCommand("agentq.cli.worker:worker", "Execute steps of runs."),
    "keeper": LazyCommand("agentq.cli.keeper:keeper", "Dispatch what is due and reap what is lost."),
    "flower": LazyCommand("agentq.cli.flower:flower", "Watch the workers in a browser."),
    "enqueue": LazyCommand("agentq.cli.enqueue:enqueue", "Queue a run, or many."),
    "run": LazyCommand("agentq.cli.run:run", "Execute a run in this terminal and watch its steps."),
    "runs": LazyCommand("agentq.cli.runs:runs", "List, show, follow and cancel runs."),
    "dead-letters": LazyCommand("agentq.cli.dead_letters:dead_letters", "Runs that stopped and wait for a person."),
    "tools": LazyCommand("agentq.cli.tools:tools", "The tools of the agents here, and what they do to the world."),
    "audit": LazyCommand("agentq.cli.audit:audit", "Prove the audit log, and take it elsewhere."),
    "reap": LazyCommand("agentq.cli.reap:reap", "Find lost steps and fences now."),
    "purge": LazyCommand("agentq.cli.purge:purge", "Delete runs that finished long ago, with all they own."),
    "db": LazyCommand("agentq.cli.db:db", "Prepare the database."),
    "doctor": LazyCommand("agentq.cli.doctor:doctor", "Check settings, database, broker and workers."),
}


@click.group(
    cls=LazyGroup, lazy_commands=_COMMANDS, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="agentq", message="%(prog)s %(version)s")
def cli() -> None:
    """AI-agent runs on Celery that never repeat a write they can't prove safe to repeat."""


def main() -> NoReturn:
    """Run the command of `sys.argv`; a person's mistake is one clear line, never a traceback."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    try:
        _check_readable(arguments)
        code = cli.main(arguments, prog_name="agentq", standalone_mode=False)
    except ReaderGoneError:
        return ExitCode.DONE  # Whoever reads has what they wanted.
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        _show_usage_error(error)
        return ExitCode.REFUSED
    except AgentqError as error:
        say("error: " + " ".join([str(error), *getattr(error, "__notes__", [])]), style="red")
        code = exit_code_of(error)
        if isinstance(error, StoreUnavailableError | BrokerUnavailableError | LeasesUnavailableError):
            suggest("agentq doctor")  # Something is away: that is what it looks at.
    return code if isinstance(code, int) else ExitCode.DONE


def _show_usage_error(error: click.ClickException) -> None:
    say(f"error: {error.format_message()}", style="red")
    if isinstance(error, click.UsageError) and error.ctx is not None:
        say(f"see {error.ctx.command_path} --help")


def _check_readable(arguments: list[str]) -> None:
    """Here for all commands: no name, id or reason of a database can be what isn't text."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise click.UsageError(f"{argument!r} isn't valid UTF-8 text") from None


if __name__ == "__main__":
    main()
