"""What a running Celery worker really does, whoever configured it: said by the worker, asked by the doctor."""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from celery import Celery
from kombu.exceptions import KombuError
from redis import RedisError

from agentq.domain.errors import BrokerUnavailableError

QUESTION = "agentq_facts"  # The remote control command by which workers are asked.
ANSWER_SECONDS = 2.0  # A worker's main process answers at once, whatever its pool does.
OUR_TASKS = "agentq."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """`writers`: tools that write, of the agents that it serves. Limits in seconds, None without one. `is_told`
    False: the worker answered, but is of a version that doesn't know the question."""

    name: str = "this worker"
    is_told: bool = True
    pool: str = "prefork"
    can_end_calls: bool = True
    concurrency: int = 1
    queues: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    acks_late: bool = True
    acks_failures: bool = True
    repeats_lost_tasks: bool = False
    ends_tasks_on_connection_loss: bool = False
    prefetch_multiplier: int = 1
    has_prefetch_disabled: bool = True
    time_limit_seconds: float | None = None
    soft_time_limit_seconds: float | None = None
    soft_shutdown_seconds: float = 0.0
    visibility_timeout_seconds: float | None = 3600.0
    unacked_key: str | None = "agentq.unacked"
    has_result_backend: bool = False
    reads_only_json: bool = True


def facts_of(worker: Any, *, agents: tuple[str, ...], writers: tuple[str, ...]) -> WorkerFacts:
    """Those of this process's worker (a `WorkController`), with what its command line changed."""
    app = worker.app
    conf = app.conf
    tasks = [task for name, task in app.tasks.items() if name.startswith(OUR_TASKS)]
    options = conf.broker_transport_options or {}
    module = worker.pool_cls.__module__
    return WorkerFacts(
        name=worker.hostname,
        pool=module.rpartition(".")[2].replace("thread", "threads"),
        can_end_calls=module.endswith(".prefork"),
        concurrency=worker.concurrency or 1,
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        agents=agents,
        writers=writers,
        acks_late=all(task.acks_late for task in tasks),
        acks_failures=all(task.acks_on_failure and task.acks_on_timeout for task in tasks),
        repeats_lost_tasks=any(task.reject_on_worker_lost or task.retry_on_worker_lost for task in tasks),
        ends_tasks_on_connection_loss=bool(conf.worker_cancel_long_running_tasks_on_connection_loss),
        prefetch_multiplier=worker.prefetch_multiplier,
        has_prefetch_disabled=bool(conf.worker_disable_prefetch),
        time_limit_seconds=_shortest(worker.time_limit, *(task.time_limit for task in tasks)),
        soft_time_limit_seconds=_shortest(worker.soft_time_limit, *(task.soft_time_limit for task in tasks)),
        soft_shutdown_seconds=float(conf.worker_soft_shutdown_timeout or 0),
        visibility_timeout_seconds=options.get("visibility_timeout"),
        unacked_key=options.get("unacked_key"),
        has_result_backend=bool(conf.result_backend) and conf.result_backend != "disabled://",
        reads_only_json=set(conf.accept_content) <= {"json", "application/json"},
    )


def as_message(facts: WorkerFacts) -> dict[str, Any]:
    return asdict(facts)


def ask_workers(app: Celery) -> list[WorkerFacts]:
    """Those of all workers that answer in time, by name. Raises BrokerUnavailableError."""
    try:
        with app.connection_for_write() as connection:
            answers = app.control.broadcast(QUESTION, reply=True, timeout=ANSWER_SECONDS, connection=connection) or []
    except (KombuError, RedisError, OSError) as error:
        raise BrokerUnavailableError(f"the workers can't be asked ({type(error).__name__}: {error})") from error
    told = [(name, answer) for each in answers for name, answer in each.items()]
    return [facts_from(name, answer) for name, answer in sorted(told, key=lambda item: item[0])]


def facts_from(name: str, answer: Any) -> WorkerFacts:
    """What a worker of any version answered: what this one doesn't know is left out, what is missing is as it should
    be."""
    if not isinstance(answer, Mapping) or "queues" not in answer:
        return WorkerFacts(name=name, is_told=False)
    known = {field.name for field in fields(WorkerFacts)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in answer.items() if key in known
    }
    return WorkerFacts(**{**values, "name": name})


def _shortest(*limits: float | None) -> float | None:
    return min((float(limit) for limit in limits if limit), default=None)
