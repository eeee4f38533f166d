"""`agentq demo`: the product on real parts, in half a minute."""

import click


@click.command()
@click.option(
    "--model", metavar="PROVIDER:MODEL", help="A real model, such as openai:gpt-5-mini, instead of a function."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object with what happened; the story goes to stderr.")
def demo(model: str | None, as_json: bool) -> int:
    """See a crash and a recovery on real parts, in half a minute.

    Starts a Valkey, two workers and a small shop; kills a worker in the middle of a refund; shows what becomes of it.
    Asks nothing, needs no network, leaves nothing behind.
    """
    from agentq.demo.run import main  # noqa: PLC0415 - it brings servers and workers

    return main(model=model, as_json=as_json)
