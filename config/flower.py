"""Flower's configuration file, closed by default: `celery -A agentq.tasks.app flower --conf=<this file>`.

`agentq flower` does just that. Flower is for watching workers; what became of a run is in SQL, not here. Two pages ask
for no credentials in any case: `/healthcheck`, which says OK, and `/metrics`, with names of workers and tasks.
"""

import os
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from agentq.config.settings import Settings, load_settings
from agentq.domain.errors import ConfigurationError

TASKS_MAX = 10_000  # Some 30 MB in memory. Flower's own default is ten times that.
WORKERS_MAX = 1_000
OFFLINE_SECONDS_MAX = 86_400  # Then a worker leaves the metrics: each container has a name of its own.
SAVE_INTERVAL_MILLISECONDS = 60_000  # What a killed Flower forgets; a save stops it for a moment, so not every second.
TASKS_COLUMNS = "name,state,args,kwargs,exception,received,started,runtime,worker,uuid"  # Results are in SQL alone.


def flower_options(settings: Settings, *, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Flower's options of these settings. `given` are those of its command line and FLOWER_ variables: they come first,
    and are held to the same rule.

    Raises ConfigurationError for an address that others can reach when nobody has to say who they are.
    """
    given = given or {}
    address = given.get("address") or settings.flower_address
    credentials = given.get("basic_auth") or _credentials(settings)
    if not (_is_loopback(address) or credentials or given.get("auth")):
        raise ConfigurationError(
            f"Flower would be open to everyone who can reach {address!r}: set AGENTQ_FLOWER_BASIC_AUTH to "
            "user:password, or AGENTQ_FLOWER_ADDRESS to 127.0.0.1"
        )
    return {
        "address": address,
        "port": settings.flower_port,
        "basic_auth": credentials,
        "read_only": settings.flower_read_only,
        "persistent": True,
        "db": str(settings.home.absolute() / "flower"),
        "state_save_interval": SAVE_INTERVAL_MILLISECONDS,
        "max_tasks": TASKS_MAX,
        "max_workers": WORKERS_MAX,
        "purge_offline_workers": OFFLINE_SECONDS_MAX,
        "tasks_columns": TASKS_COLUMNS,
    }


def _credentials(settings: Settings) -> list[str]:
    """A list, because Flower would take a comma in a text for the beginning of the next user."""
    if not settings.flower_basic_auth:
        return []
    user, _, password = settings.flower_basic_auth.partition(":")
    if not user or not password:
        raise ConfigurationError("AGENTQ_FLOWER_BASIC_AUTH is no user:password; give both, with a colon between them")
    return [settings.flower_basic_auth]


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"  # Where another name leads to may change any time.


def _configure() -> dict[str, Any]:
    """What Flower finds in this file."""
    from tornado.options import options  # noqa: PLC0415 (Flower alone has it)

    try:
        settings = load_settings()
        found = flower_options(settings, given={name: options[name] for name in ("address", "basic_auth", "auth")})
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    os.environ.pop("FLOWER_UNAUTHENTICATED_API", None)  # It lets any web page that a person visits read the API.
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)  # Flower believes the file it finds there.
    return found


if __name__ not in ("agentq.config.flower", "config.flower"):  # Executed by Flower rather than imported.
    globals().update(_configure())
