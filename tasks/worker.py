"""What happens when a worker starts, forks and stops: checks first, a keeper beside it, nothing left behind."""

import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery import signals
from celery.worker.control import inspect_command

from agentq.adapters.embedded.supervision import Companion, die_with_parent, start_keeper_beside_worker
from agentq.adapters.worker_facts import QUESTION, WorkerFacts, as_message, facts_of
from agentq.checks.finding import refusals, warnings
from agentq.checks.settings import judge_settings, tool_deadlines
from agentq.checks.worker import judge_worker
from agentq.config.settings import environment_of
from agentq.domain.errors import AgentqError, StoreUnavailableError
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
    try:
        _check_this_worker(instance)
        remember_deployment(_preflight(wiring().serves))
        _load_before_fork()
    except AgentqError as error:
        sys.stderr.write(f"agentq: {error}\n")
        raise SystemExit(EXIT_REFUSED) from None


@inspect_command(name=QUESTION)
def tell_facts(state: Any, **_: Any) -> dict[str, Any]:
    """What `agentq doctor` asks of every worker."""
    return as_message(_facts(state.consumer.controller))


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


def _check_this_worker(instance: Any) -> None:
    """What needs no connection: the settings, and what Celery makes of its own."""
    findings = [*judge_settings(settings, tool_deadlines(wiring().registry)), *judge_worker(_facts(instance), settings)]
    refused = refusals(findings)
    for finding in refused:
        sys.stderr.write(f"agentq: {finding.line}\n")
    if refused:
        raise SystemExit(EXIT_REFUSED)
    _warn(f"{finding.subject}: {finding.line}" for finding in warnings(findings))


def _facts(worker: Any) -> WorkerFacts:
    registry = wiring().registry
    writers = tuple(tool.name for tool in registry.tools() if tool.effect.is_write)
    return facts_of(worker, agents=tuple(registry.names()), writers=writers)


def _preflight(serves: dict[str, int]) -> str:
    """Check the servers and register the agents, in a process of its own; returns the deployment's id.

    The pool's children must not inherit a connection, so this process never opens one.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "agentq.preflight"],
            input=json.dumps(serves),
            env={**os.environ, **environment_of(settings)},
            capture_output=True,
            text=True,
            timeout=PREFLIGHT_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StoreUnavailableError(
            f"the database and the broker couldn't be checked within {PREFLIGHT_SECONDS_MAX} s: see agentq doctor"
        ) from None
    if answer.returncode:
        sys.stderr.write(answer.stderr)
        raise SystemExit(EXIT_REFUSED)
    told = json.loads(answer.stdout)
    _warn(told["warnings"])
    deployment: str = told["deployment"]
    return deployment


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        logger.warning("%s", line)


def _load_before_fork() -> None:
    """Import and prepare what every child needs, once, and keep the collector from walking over it in each of them.

    Nothing of it connects: connections are made by whoever uses them first.
    """
    _ = wiring().executor
    wiring().database.load_driver()
    gc.collect()
    gc.freeze()
