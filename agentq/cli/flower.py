"""`agentq flower`: Flower with agentq's configuration."""

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FLOWER OPTION]...")
def flower(arguments: tuple[str, ...]) -> int:
    """Watch the workers in a browser.

    Closed by default: it listens on this machine only, and shows without changing. AGENTQ_FLOWER_ADDRESS,
    AGENTQ_FLOWER_PORT, AGENTQ_FLOWER_BASIC_AUTH and AGENTQ_FLOWER_READ_ONLY say otherwise; Flower's own options can
    follow.
    """
    from agentq.config.settings import load_settings  # noqa: PLC0415 - `--help` doesn't need it
    from agentq.flower_command import run_flower  # noqa: PLC0415

    return run_flower(load_settings(), arguments)
