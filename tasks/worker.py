"""What happens when a worker starts, forks and stops: checks first, a keeper beside it, nothing left behind."""

import gc
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from celery import signals

from agentq.adapters.embedded.supervision import Companion, die_with_parent, start_keeper_beside_worker
from agentq.config.settings import environment_of
from agentq.domain.errors import AgentqError
from agentq.tasks.app import settings
from agentq.tasks.wiring import remember_deployment, wiring

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2
PREFLIGHT_SECONDS_MAX = 60


@dataclass(slots=True)
class _State:
    """What the worker's main process remembers."""

    main_pid: int = 0
    keeper: Companion | None = None


_state = _State()


@signals.celeryd_after_setup.connect
def check_before_start(instance: Any, **_: Any) -> None:
    """Refuse to start on what breaks a promise; import agents once, before the pool forks."""
    _state.main_pid = os.getpid()
    work = wiring()
    try:
        serves = work.serves
        remember_deployment(_preflight(serves))
        work.refuse_unsafe_pool(can_end_calls=_ends_calls(instance), queues=set(instance.app.amqp.queues.consume_from))
        _load_before_fork()
    except AgentqError as error:
        sys.stderr.write(f"agentq: {error}\n")
        raise SystemExit(EXIT_REFUSED) from None


@signals.worker_process_init.connect
def begin_child(**_: Any) -> None:
    """In each pool child: die with the worker, whatever ends it, so that no orphan goes on writing."""
    die_with_parent(_state.main_pid)
    wiring().begin_pool_child()


@signals.worker_ready.connect
def start_keeper(**_: Any) -> None:
    if settings.keeper_beside_worker:
        command = (sys.executable, "-m", "agentq.keeper", "--serves", json.dumps(wiring().serves))
        _state.keeper = start_keeper_beside_worker(command, environ={**os.environ, **environment_of(settings)})


@signals.worker_shutdown.connect
def stop_keeper(**_: Any) -> None:
    if _state.keeper is not None:
        _state.keeper.stop()


@signals.task_unknown.connect
def report_unknown_task(name: str, id: str, **_: Any) -> None:
    """Celery drops such a message; a step's is only a wake-up call, so the keeper publishes it again."""
    logger.error("unknown task name=%s id=%s: is this worker of an older version than its senders?", name, id)


def _preflight(serves: dict[str, int]) -> str:
    """Check the database and register the agents, in a process of its own; returns the deployment's id.

    The pool's children must not inherit a connection, so this process never opens one.
    """
    answer = subprocess.run(
        [sys.executable, "-m", "agentq.preflight"],
        input=json.dumps(serves),
        env={**os.environ, **environment_of(settings)},
        capture_output=True,
        text=True,
        timeout=PREFLIGHT_SECONDS_MAX,
        check=False,
    )
    if answer.returncode:
        sys.stderr.write(answer.stderr)
        raise SystemExit(EXIT_REFUSED)
    return answer.stdout.strip()


def _load_before_fork() -> None:
    """Import and prepare what every child needs, once, and keep the collector from walking over it in each of them.

    Nothing of it connects: connections are made by whoever uses them first.
    """
    _ = wiring().executor
    gc.collect()
    gc.freeze()


def _ends_calls(worker: Any) -> bool:
    return bool(worker.pool_cls.__module__.endswith(".prefork"))
