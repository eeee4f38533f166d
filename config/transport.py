"""Keep a worker's Redis connection from doing harm when it breaks: what differs from kombu's own transport, and why.

Made for kombu 5.7 and Celery 5.7, and tested against what they do. Messages are the same: any client may send them.

As they are, closing a broken connection gives every unacknowledged message back, those of running tasks too, which
start a second time beside themselves; or it fails, because the channel's address is gone by then, and ends the worker.
Here a broken connection gives nothing back: a running task acknowledges through its old channel, which connects again
by itself, and the next connection gives back what nobody runs. A worker that stops gives back everything, as ever.
"""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import celery.app.amqp
import kombu.connection
from celery.worker import state
from kombu.transport import redis

RETRY_SECONDS_MAX = 5  # Between two tries to reach the broker: it is used again within ten seconds of being back.

_left: list["QoS"] = []  # Of broken connections of this process: their messages aren't all settled yet.


class QoS(redis.QoS):
    """The messages that a channel has delivered and that aren't acknowledged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unheard: set[str] = set()  # Acknowledged, but Redis didn't answer.
        self._begun: set[str] = set()  # Running when the connection broke.

    def ack(self, delivery_tag: str) -> None:
        self._unheard.add(delivery_tag)
        super().ack(delivery_tag)
        self._unheard.discard(delivery_tag)

    def can_consume(self) -> bool:
        # Asked before each wait for messages, after the acknowledgements that were due have been sent.
        if _left:
            _settle_what_was_left(self)
        # Otherwise a message whose acknowledgement met a Redis that hung would occupy its slot for ever.
        for delivery_tag in tuple(self._unheard):
            self.ack(delivery_tag)
        return bool(super().can_consume())

    def restore_unacked_once(self, stderr: Any = None) -> None:
        if self.channel.connection is not None and self.channel.connection.is_broken:
            self._on_collect.cancel()
            self._begun = _running()
            _left.append(self)
            return
        super().restore_unacked_once(stderr)
        if _is_stopping():
            _settle_what_was_left(self)

    def settle_left(self, by: "QoS") -> bool:
        """Acknowledge what is done and give back what nobody runs, through a channel that works. True: none is left.

        What was running and isn't any more has been done, though its acknowledgement may have got lost with the
        connection; or, when the worker stops, may have been ended."""
        running = _running()
        done = self._unheard if _is_stopping() else self._unheard | self._begun
        self._flush()
        for delivery_tag in [tag for tag in self._delivered if tag not in running]:
            if delivery_tag in done:
                by._remove_from_indices(delivery_tag).execute()
            else:
                by.restore_by_tag(delivery_tag)
            del self._delivered[delivery_tag]
        return not self._delivered


class SteadyChannel:
    """What both kinds of channel have in common."""

    QoS = QoS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pools: dict[bool, Any] = {}
        self._publisher: Any = None
        super().__init__(*args, **kwargs)
        self._get_pool()  # While the address is known.

    def _get_pool(self, asynchronous: bool = False) -> Any:
        # A pool that was disconnected connects again; a new one would need an address that a closed channel lacks.
        if asynchronous not in self._pools:
            self._pools[asynchronous] = super()._get_pool(asynchronous)  # type: ignore[misc]
        return self._pools[asynchronous]

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        # A client is a quarter of what publishing costs, and threads may share it: one is enough.
        if self._publisher is None:
            self._publisher = self._create_client()  # type: ignore[attr-defined]
        yield client or self._publisher


class Channel(SteadyChannel, redis.Channel):
    """A channel to one server."""


class SentinelChannel(SteadyChannel, redis.SentinelChannel):
    """A channel to whichever server Sentinel calls the master."""


class Transport(redis.Transport):
    """Redis or Valkey."""

    Channel = Channel
    is_broken = False


class SentinelTransport(redis.SentinelTransport):
    """Redis or Valkey behind Sentinel."""

    Channel = SentinelChannel
    is_broken = False


class Connection(kombu.connection.Connection):
    """A connection that knows whether it broke or is being closed."""

    def get_transport_cls(self) -> Any:
        return SentinelTransport if self.transport_cls == "sentinel" else Transport

    def collect(self, *args: Any, **kwargs: Any) -> None:
        # What Celery calls when a connection broke; one that is no longer needed is closed.
        if self._transport is not None:
            self._transport.is_broken = True
        super().collect(*args, **kwargs)

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Any:
        wait = {"interval_start": 1, "interval_step": 1, "interval_max": RETRY_SECONDS_MAX}
        return super().ensure_connection(*args, **wait | kwargs)


class AMQP(celery.app.amqp.AMQP):
    """What makes a Celery app use this: `Celery(amqp="agentq.config.transport:AMQP")`."""

    Connection = BrokerConnection = Connection


def _settle_what_was_left(by: QoS) -> None:
    for qos in tuple(_left):
        if qos.settle_left(by):
            _left.remove(qos)


def _running() -> set[str]:
    return {request.message.delivery_tag for request in tuple(state.active_requests)}


def _is_stopping() -> bool:
    return state.should_stop is not None or state.should_terminate is not None
