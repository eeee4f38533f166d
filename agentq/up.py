"""`agentq up`: everything on this machine, supervised, with its state in one folder."""

import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from agentq.adapters.embedded.supervision import Program, Supervisor
from agentq.adapters.embedded.valkey import READY_TEXT, claimed_folder, embedded_valkey
from agentq.adapters.sql.migration import upgrade
from agentq.config.flower import flower_options
from agentq.config.settings import PREFIX, Settings, environment_of
from agentq.domain.errors import ConfigurationError

AGENTQ = (sys.executable, "-m", "agentq.cli.main")
READY_SECONDS = 60.0  # A busy machine imports an SDK for some seconds.
SERVER, OTHERS = 0, 1  # Stages: the server starts first and ends last.


def run_up(settings: Settings, *, write: Callable[[str], None]) -> int:
    """Run the servers that these settings don't place elsewhere, the workers and Flower, until Ctrl-C; the exit code.

    `write` takes lines: the programs' output, each with its name before it, and the addresses once all is up. Nothing
    that is started outlives this call or this process. Raises ConfigurationError, before anything is started, when the
    settings can't work or another `agentq up` holds the folder.
    """
    settings = replace(settings, home=settings.home.absolute())
    if not settings.agents:
        raise ConfigurationError(
            "AGENTQ_AGENTS is empty, so there is nothing to run: set it to the modules that define your agents, "
            "comma-separated (agentq demo shows agentq without any)"
        )
    flower_options(settings)
    _check_flower_port(settings)
    with ExitStack() as stack:
        lock = stack.enter_context(claimed_folder(settings.home, "agentq up"))
        if not settings.database_url:
            upgrade(settings.effective_database_url)
        programs = []
        if not settings.broker_url:
            programs.append(_valkey(settings, lock))
        environ = _environment(settings)
        programs += [
            _worker("model", environ),
            _worker("tools", environ),
            _worker("isolated", {**environ, f"{PREFIX}KEEPER_BESIDE_WORKER": "false"}),  # Two keepers are enough.
            _flower(environ),
        ]
        supervisor = Supervisor(programs, write=write)
        return supervisor.run(when_ready=lambda: _show_addresses(settings, write))


def _valkey(settings: Settings, lock: int) -> Program:
    server = embedded_valkey(settings.home)
    return Program(
        name="valkey",
        argv=server.argv,
        environ=os.environ,
        stage=SERVER,
        ready_text=READY_TEXT,
        hasten_signal=signal.SIGTERM,  # It ends within moments; by force it could lose a second of leases.
        descriptors=(lock,),
    )


def _worker(role: str, environ: Mapping[str, str]) -> Program:
    return Program(
        name=f"{role} worker",
        argv=(*AGENTQ, "worker", role),
        environ=environ,
        stage=OTHERS,
        ready_text=" ready.",  # How a Celery worker says it.
        ready_seconds=READY_SECONDS,
        grace_seconds=math.inf,  # Each call has a limit of its own, and only its tool knows it; Ctrl-C again hastens.
    )


def _flower(environ: Mapping[str, str]) -> Program:
    return Program(
        name="flower",
        argv=(*AGENTQ, "flower"),
        environ=environ,
        stage=OTHERS,
        ready_text="Visit me at",
        ready_seconds=READY_SECONDS,
    )


def _environment(settings: Settings) -> dict[str, str]:
    """These settings, whatever this process's own environment says of them."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return {**inherited, "PYTHONUNBUFFERED": "1", **environment_of(settings)}


def _check_flower_port(settings: Settings) -> None:
    try:
        family, *_, address = socket.getaddrinfo(
            settings.flower_address, settings.flower_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"Flower can't listen on {settings.flower_address}:{settings.flower_port} ({error}): "
            "set AGENTQ_FLOWER_PORT or AGENTQ_FLOWER_ADDRESS to another"
        ) from None


def _show_addresses(settings: Settings, write: Callable[[str], None]) -> None:
    # A URL that was set may hold a password, so its setting's name stands for it.
    database = "as AGENTQ_DATABASE_URL says" if settings.database_url else settings.effective_database_url
    broker = "as AGENTQ_BROKER_URL says" if settings.broker_url else settings.effective_broker_url
    for line in (
        "",
        "agentq is up; Ctrl-C ends all of it.",
        f"  agents    {', '.join(settings.agents)}",
        f"  Flower    http://{settings.flower_address}:{settings.flower_port}",
        f"  database  {database}",
        f"  broker    {broker}",
        f"  state     {settings.home}",
        "Next, in another terminal of this folder: agentq enqueue AGENT INPUT",
        "",
    ):
        write(line)
