"""Tell somebody by a Celery task of their own, sent to the broker."""

from collections.abc import Mapping
from typing import Any

from celery import Celery
from kombu.utils.uuid import uuid
from redis import RedisError

from agentq.adapters.celery_dispatcher import TIMEOUT_SECONDS, as_message
from agentq.adapters.redis.client import redis_client
from agentq.domain.errors import NotToldError


class NotifyTask:
    """`ports.Channel`. Told is what the broker took: whether a worker serves the queue, nobody knows here."""

    name = "AGENTQ_NOTIFY_TASK"

    def __init__(self, app: Celery, broker_url: str, *, task: str, queue: str) -> None:
        self._app = app
        self._client = redis_client(broker_url, timeout_seconds=TIMEOUT_SECONDS)
        self._task = task
        self._queue = queue

    def tell(self, notification: Mapping[str, Any]) -> None:
        """The notification is the task's one argument."""
        count = len(notification["dead_letters"])
        task = self._app.amqp.as_task_v2(
            uuid(), self._task, args=[notification], argsrepr=f"dead_letters={count}", ignore_result=True
        )
        try:
            self._client.lpush(self._queue, as_message(task, self._task, self._queue))
        except (RedisError, OSError) as error:
            raise NotToldError(f"the broker doesn't take it now ({type(error).__name__}: {error})") from error
