"""How far a change of many is, on stderr."""

import sys
import time

import click

from agentq.cli.output import is_terminal, say

SAID_EVERY_SECONDS = 5.0  # Where stderr is no terminal.


class Progress:
    """A line that moves on a terminal, and now and then a line elsewhere."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()
        self._moves = is_terminal(sys.stderr)

    def show(self, told: str) -> None:
        if self._moves:
            click.echo(f"\r{told} ", nl=False, err=True)
        elif time.monotonic() - self._said_at >= SAID_EVERY_SECONDS:
            self._said_at = time.monotonic()
            say(told)

    def end(self) -> None:
        """The line that moved is gone; safe to repeat."""
        if self._moves:
            click.echo("\r\033[K", nl=False, err=True)
