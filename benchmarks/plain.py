"""What agentq is measured against: Celery tasks that chain themselves, with no SQL or one naive transaction a step.

The same settings, queues, pools and messages' sizes as agentq's; Celery's own transport and `apply_async`.
"""

import os
import threading

import psycopg
from celery import Celery

from agentq.config.celery import celery_config
from agentq.config.settings import load_settings

settings = load_settings()
STEPS = int(os.environ.get("BENCH_STEPS", "5"))
ROW = "z" * 200
FINISHED_KEY = "benchmark:finished"

app = Celery("plain")
app.conf.update(celery_config(settings))
if os.environ.get("BENCH_EVENTS") == "off":
    app.conf.worker_send_task_events = False

_local = threading.local()


def queue_for(number: int) -> str:
    """Model turns and tool calls take turns, like in agentq's runs."""
    return settings.queue("model" if number % 2 else "tools")


@app.task(name="plain.step")
def plain_step(run_id: str, number: int) -> None:
    """One step with no state at all."""
    _go_on(plain_step, run_id, number)


@app.task(name="plain.sql_step")
def sql_step(run_id: str, number: int) -> None:
    """One step with one transaction: the run's row updated, a row of 200 bytes inserted."""
    with _connection().transaction(), _connection().cursor() as cursor:
        cursor.execute("UPDATE naive_runs SET step = %s, updated_at = now() WHERE id = %s", (number, run_id))
        cursor.execute("INSERT INTO naive_steps (run_id, number, data) VALUES (%s, %s, %s)", (run_id, number, ROW))
    _go_on(sql_step, run_id, number)


def _go_on(task: "object", run_id: str, number: int) -> None:
    if number < STEPS:
        task.apply_async((run_id, number + 1), queue=queue_for(number + 1))  # type: ignore[attr-defined]
    else:
        with app.connection_for_write() as connection:
            connection.default_channel.client.incr(FINISHED_KEY)


def _connection() -> "psycopg.Connection[tuple[object, ...]]":
    """One a thread, or a process: the fastest pool there is."""
    if getattr(_local, "process", None) != os.getpid():
        _local.connection = psycopg.connect(settings.database_url, autocommit=True)
        _local.process = os.getpid()
    return _local.connection  # type: ignore[no-any-return]
