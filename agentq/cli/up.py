"""`agentq up`: everything on this machine."""

import sys

import click


@click.command()
def up() -> int:
    """Start everything on this machine: Valkey, the workers for AGENTQ_AGENTS, Flower. Ctrl-C ends all of it.

    State stays in .agentq/ (or AGENTQ_HOME) and is there the next time.
    """
    from agentq.config.settings import load_settings  # noqa: PLC0415 - `--help` doesn't need it
    from agentq.up import run_up  # noqa: PLC0415

    return run_up(load_settings(), write=_write_line)


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
