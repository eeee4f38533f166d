"""`agentq reap`: don't wait for the keeper's next look."""

import click

from agentq.cli.output import say
from agentq.domain.errors import LeasesUnavailableError


@click.command()
def reap() -> None:
    """Tell the keeper to look for lost steps and fences now. Safe at any time: each verdict checks again."""
    from redis import RedisError  # noqa: PLC0415 - `--help` doesn't need it

    from agentq.adapters.redis.client import redis_client  # noqa: PLC0415
    from agentq.bootstrap import Wiring  # noqa: PLC0415
    from agentq.config.settings import load_settings  # noqa: PLC0415

    settings = load_settings()
    try:
        redis_client(settings.effective_lease_url).ping()  # A nudge itself never fails; a person wants to know.
    except (RedisError, OSError) as error:
        raise LeasesUnavailableError(f"the keeper can't be reached: {error}") from None
    with Wiring(settings) as wiring:
        wiring.nudges.nudge()
    say("the keeper looks now; what it does is in the audit log: agentq runs events ID")
