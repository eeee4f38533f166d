"""`agentq flower`: Flower in this process, with agentq's configuration."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from agentq.config import flower as flower_configuration
from agentq.config.settings import PREFIX, Settings, environment_of
from agentq.domain.errors import ConfigurationError


def run_flower(settings: Settings, arguments: Sequence[str] = ()) -> int:
    """Run Flower until it is told to stop; its exit code. `arguments` are Flower's own, and come before the settings.

    Raises ConfigurationError for an address that others can reach without credentials, and for a port that is taken.
    """
    flower_configuration.flower_options(settings)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    os.environ.update(environment_of(settings))  # Flower reads its configuration file by itself.

    from celery.bin.celery import celery  # noqa: PLC0415 (slow to import)

    configuration = f"--conf={Path(flower_configuration.__file__)}"
    try:
        code = celery.main(["--app=agentq.tasks.app:app", "flower", configuration, *arguments], standalone_mode=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigurationError(
            f"port {settings.flower_port} of {settings.flower_address} is in use: set AGENTQ_FLOWER_PORT to another one"
        ) from None
    return int(code or 0)
