"""`agentq keeper`: the keeper as a process of its own."""

import logging

import click


@click.command()
def keeper() -> None:
    """Dispatch what is due and reap what is lost, until told to stop.

    Every worker starts one beside it by default; one leads, the others wait to take over.
    """
    from agentq.config.settings import load_settings  # noqa: PLC0415 - `--help` doesn't need it
    from agentq.keeper import LOG_FORMAT, keep  # noqa: PLC0415

    settings = load_settings()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    keep(settings, {})
