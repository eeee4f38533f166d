"""`agentq demo`: the product on real parts, in half a minute."""

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> int:
    """See runs, a crash and a recovery on real parts, in half a minute."""
    from agentq.demo.run import main  # noqa: PLC0415 - it brings servers and workers

    return main(arguments)
