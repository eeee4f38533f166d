"""`agentq worker`: the Celery worker in a role, which is what it consumes and how it runs it."""

import math
import os
import sys
from dataclasses import dataclass

import click

from agentq.config.settings import PREFIX, Settings, load_settings
from agentq.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a worker consumes, and the pool that runs it."""

    pool: str
    queues: tuple[str, ...]

    def concurrency(self, settings: Settings) -> int:
        match self.queues:
            case ("model", *_):
                return settings.model_concurrency
            case ("isolated", *_):
                return 1  # A step that may kill its process must be the only one there.
            case _:
                return settings.tools_concurrency


ROLES = {
    "model": Role(pool="threads", queues=("model",)),
    "tools": Role(pool="prefork", queues=("tools", "control")),
    "isolated": Role(pool="prefork", queues=("isolated",)),
}

KEEPERS_ROLE = "tools"  # Of several workers on one machine one brings the keeper: more would only cost memory.
KEEPER_BESIDE_WORKER = f"{PREFIX}KEEPER_BESIDE_WORKER"


@click.command()
@click.argument("role", type=click.Choice([*ROLES, "all"]), default="all")
@click.option("-c", "--concurrency", type=click.IntRange(min=1), help="Threads (model) or processes (tools).")
@click.option("--without-keeper", is_flag=True, help="Start no keeper beside it: one runs elsewhere.")
@click.option("-n", "--hostname", metavar="NAME", help="Its name in Flower, such as tools@%h.")
@click.option(
    "-l",
    "--loglevel",
    default="INFO",
    show_default=True,
    metavar="LEVEL",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
)
def worker(role: str, concurrency: int | None, without_keeper: bool, hostname: str | None, loglevel: str) -> int:
    """Execute steps of the agents in AGENTQ_AGENTS.

    \b
    model     model turns: threads, because they wait for the network
    tools     tool calls and the messages of other services: processes, because a call must be possible to end
    isolated  steps that died in a process they shared: one at a time
    all       one of each, supervised (default)
    """
    settings = load_settings()
    if not settings.agents:
        raise ConfigurationError(
            f"{PREFIX}AGENTS is empty, so this worker would serve nobody: set it to the modules that define your agents"
        )
    if without_keeper:
        os.environ[KEEPER_BESIDE_WORKER] = "false"
    if role == "all":
        if concurrency is not None or hostname is not None:
            raise click.UsageError("--concurrency and --hostname belong to one role; name it: model, tools or isolated")
        return _supervise(loglevel)
    return _work(role, settings, concurrency, hostname, loglevel)


def _work(role: str, settings: Settings, concurrency: int | None, hostname: str | None, loglevel: str) -> int:
    from celery.bin.celery import celery  # noqa: PLC0415 - slow to import

    chosen = ROLES[role]
    arguments = [
        "--app=agentq.tasks.app:app",
        "worker",
        f"--pool={chosen.pool}",
        f"--concurrency={concurrency or chosen.concurrency(settings)}",
        f"--queues={','.join(settings.queue(name) for name in chosen.queues)}",
        f"--hostname={hostname or f'{role}-{os.getpid()}@%h'}",
        f"--loglevel={loglevel}",
        # Workers have nothing to tell each other: what one needs to know of another is in SQL or in Redis.
        "--without-mingle",
        "--without-gossip",
    ]
    # Not `app.worker_main`, which drops the exit code of a worker that refused to start.
    return int(celery.main(arguments, standalone_mode=False) or 0)


def _supervise(loglevel: str) -> int:
    """One worker of each role, each a process of its own that is started again when it dies, and ends with this one."""
    from agentq.adapters.embedded.supervision import Program, Supervisor  # noqa: PLC0415 - only this role needs it

    programs = [
        Program(
            name=role,
            argv=(sys.executable, "-m", "agentq.cli.main", "worker", role, f"--loglevel={loglevel}"),
            environ={**os.environ, **({} if role == KEEPERS_ROLE else {KEEPER_BESIDE_WORKER: "false"})},
            grace_seconds=math.inf,  # Each call has a limit of its own, and only its tool knows it.
        )
        for role in ROLES
    ]
    return Supervisor(programs, write=_write_line).run()


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
