"""A click group that imports a command when it is called, so that `agentq --help` stays quick."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command lives ("module:attribute"), and the line that a list of commands shows of it."""

    target: str
    summary: str

    def load(self) -> click.Command:
        module, _, attribute = self.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


class LazyGroup(click.Group):
    """Knows its commands by name and summary; the code of one is imported when that one is called."""

    def __init__(self, *args: Any, lazy_commands: Mapping[str, LazyCommand], **options: Any) -> None:
        super().__init__(*args, **options)
        self.lazy_commands = dict(lazy_commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = self.lazy_commands.get(cmd_name)
        return lazy.load() if lazy else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.lazy_commands:
            similar = difflib.get_close_matches(args[0], self.lazy_commands, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in self.lazy_commands.items()])
