"""Publish steps' wake-up calls as Celery tasks, in one round trip however many they are."""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery, signals
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid
from redis import RedisError

from agentq.adapters.redis.client import redis_client
from agentq.domain.errors import BrokerUnavailableError
from agentq.domain.model import StepKind
from agentq.ports.dispatch import Wakeup

TASK = "agentq.step"
TIMEOUT_SECONDS = 1.0  # What isn't published now is published by the keeper: nobody waits long for the broker.


class CeleryDispatcher:
    """`ports.Dispatcher` for threads to share. A message is Celery's own (protocol 2), wrapped as kombu wraps it for
    Redis; only the way there is shorter: one client for all, no connection of kombu's, no retries."""

    def __init__(
        self, app: Celery, broker_url: str, *, key_prefix: str, step_limit_seconds: Callable[[float | None], float]
    ) -> None:
        """`key_prefix` begins the queues' names; `step_limit_seconds` says when the parent ends a call that has this
        deadline (None: the default one)."""
        self._app = app
        self._client = redis_client(broker_url, timeout_seconds=TIMEOUT_SECONDS)
        self._step_limit_seconds = step_limit_seconds
        self._unacked = f"{key_prefix}.unacked"
        self._model, self._tools, self._isolated = (f"{key_prefix}.{name}" for name in ("model", "tools", "isolated"))

    def publish(self, wakeups: Sequence[Wakeup]) -> None:
        messages = [self._message(wakeup) for wakeup in wakeups]
        try:
            if len(messages) == 1:
                self._client.lpush(*messages[0])
            elif messages:
                with self._client.pipeline(transaction=False) as pipeline:
                    for queue, message in messages:
                        pipeline.lpush(queue, message)
                    pipeline.execute()
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    def backlog(self) -> Mapping[StepKind, int]:
        """Isolated steps count as tools: they are few, and most are calls."""
        model, tools, isolated, _ = self._counts()
        return {StepKind.MODEL: model, StepKind.TOOL: tools + isolated}

    def is_drained(self) -> bool:
        return not any(self._counts())

    def _counts(self) -> list[int]:
        try:
            with self._client.pipeline(transaction=True) as pipeline:  # A message on its way is in one or the other.
                for queue in (self._model, self._tools, self._isolated):
                    pipeline.llen(queue)
                pipeline.hlen(self._unacked)
                counts: list[int] = pipeline.execute()
                return counts
        except (RedisError, OSError) as error:
            raise _unavailable(error) from error

    def _message(self, wakeup: Wakeup) -> tuple[str, str]:
        """Queue and message."""
        queue = self._queue(wakeup)
        task = self._task(wakeup)
        return queue, as_message(task, TASK, queue)

    def _task(self, wakeup: Wakeup) -> Any:
        ref, is_call = wakeup.ref, wakeup.kind is StepKind.TOOL
        what = wakeup.tool if is_call else "model"
        return self._app.amqp.as_task_v2(
            uuid(),
            TASK,
            args=[ref.run_id, ref.number, ref.attempt],
            # For people who look at Flower.
            shadow=f"{TASK} {wakeup.agent}/{what}",
            argsrepr=f"run={ref.run_id} step={ref.number} attempt={ref.attempt}",
            kwargsrepr=f"agent={wakeup.agent} {'tool=' if is_call else ''}{what}",
            time_limit=self._step_limit_seconds(wakeup.deadline_seconds) if is_call else None,
            ignore_result=True,
        )

    def _queue(self, wakeup: Wakeup) -> str:
        if wakeup.is_isolated:
            return self._isolated
        return self._tools if wakeup.kind is StepKind.TOOL else self._model


def as_message(task: Any, name: str, queue: str) -> str:
    """A task of that name, made by `as_task_v2`, as it lies in that queue."""
    properties: dict[str, Any] = {
        **task.properties,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": uuid(),
    }
    published = {"sender": name, "body": task.body, "exchange": "", "routing_key": queue, "headers": task.headers}
    signals.before_task_publish.send(**published, properties=properties, declare=[], retry_policy={})
    message = {
        "body": b64encode(dumps(task.body).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": task.headers,
        "properties": properties,
    }
    return str(dumps(message))


def _unavailable(error: Exception) -> BrokerUnavailableError:
    return BrokerUnavailableError(f"the broker doesn't take messages now ({type(error).__name__}: {error})")
