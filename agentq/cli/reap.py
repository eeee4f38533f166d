"""`agentq reap`: don't wait for the keeper's next look."""

import click

from agentq.cli.output import say


@click.command()
def reap() -> None:
    """Tell the keeper to look for lost steps and fences now. Safe at any time: each verdict checks again."""
    from agentq.bootstrap import Wiring  # noqa: PLC0415 - `--help` doesn't need it
    from agentq.config.settings import load_settings  # noqa: PLC0415

    with Wiring(load_settings()) as wiring:
        wiring.nudges.nudge()
    say("the keeper looks now; what it does is in the audit log: agentq runs events ID")
