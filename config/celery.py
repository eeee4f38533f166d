"""What Celery is set to, each setting with the reason why it isn't the default."""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

import ssl
from typing import Any
from urllib.parse import quote

from celery import Celery
from kombu.entity import Exchange, Queue

from agentq.adapters.redis.address import Address, parse_address
from agentq.config.pool import ChildWatch
from agentq.config.settings import Settings

QUEUES = ("model", "tools", "isolated", "control")
TIME_LIMIT_MARGIN_SECONDS = 15.0  # For what comes before and after a call: reading the step, the fence, the settle.


def celery_app(settings: Settings, *, set_as_current: bool = True) -> Celery:
    """An app with these settings, our transport, and our watch over its pool.

    A process that only publishes leaves the current app alone."""
    app = Celery("agentq", amqp="agentq.config.transport:AMQP", set_as_current=set_as_current)
    app.conf.update(celery_config(settings))
    app.steps["worker"].add(ChildWatch)
    return app


def celery_config(settings: Settings) -> dict[str, Any]:
    """Celery's own names for what we want of it. Raises ConfigurationError when the broker's URL is wrong."""
    address = parse_address(settings.effective_broker_url)
    prefix = settings.key_prefix
    return {
        "broker_url": _kombu_url(address),
        # A TLS connection that checks no certificate is none; kombu's default is not to check.
        "broker_use_ssl": _tls(address),
        "broker_transport_options": _transport_options(settings, address),
        # A worker outlives any outage of its broker: nobody has to start it again.
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # So does it a Redis that refuses: full, loading, or read-only while it fails over.
        "broker_channel_error_retry": True,
        # --- Messages. Late: a step is acknowledged when it is settled. A child that died, or was killed for its time
        # limit, is acknowledged too: the keeper brings its step back and charges the crash, the broker would do it
        # without end.
        "task_acks_late": True,
        "task_acks_on_failure": True,
        "task_acks_on_timeout": True,
        "task_reject_on_worker_lost": False,
        # One message a slot: a step that waits behind another one's call is a step that an idle worker could do.
        "worker_prefetch_multiplier": 1,
        # ... after a reconnect as well, where Celery counts one more.
        "worker_disable_prefetch": True,
        # A running step ends well without its broker; ending it would make an unknown write.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        # Nothing but JSON is read: pickle executes what a message says.
        "accept_content": ["json"],
        "task_serializer": "json",
        "event_serializer": "json",
        # State lives in SQL; a second copy could only disagree, and a result backend blocks when Redis is away.
        "result_backend": None,
        "task_ignore_result": True,
        # --- Queues. All are declared and none is made by a slip of the pen, which no worker would serve.
        "task_queues": tuple(_queue(settings.queue(name)) for name in QUEUES),
        "task_create_missing_queues": False,
        "task_default_queue": settings.queue("control"),
        "task_default_exchange": settings.queue("control"),
        "task_default_routing_key": settings.queue("control"),
        # Redis has no quorum queues, and looking for them takes time at every start.
        "worker_detect_quorum_queues": False,
        # Who sends waits for nobody: what can't be sent now is sent by the keeper later.
        "task_publish_retry": False,
        # --- Watching. Flower lives on these; that a step was sent is in SQL.
        "worker_send_task_events": True,
        "task_send_sent_event": False,
        # Another app on the same Redis doesn't see our events, nor does its remote control reach our workers.
        "event_exchange": f"{prefix}.events",
        "event_queue_prefix": f"{prefix}.events",
        "control_exchange": f"{prefix}.remote",
        # --- The end of a worker is SIGTERM: what runs goes on to its end, which each step has. (A soft shutdown only
        # sleeps: in it nothing is acknowledged, and no time limit is kept.)
        "worker_soft_shutdown_timeout": 0.0,
        # How long a dead child's answer is waited for: it is in the pipe or it is nowhere.
        "worker_lost_wait": 0.5,
        "timezone": "UTC",
    }


def step_limit_seconds(settings: Settings, deadline_seconds: float | None) -> float:
    """After how long the parent ends a tool's step: its call has ended, and its outcome had time to be recorded.

    There is no soft limit: it raises anywhere, inside a settle too."""
    deadline_seconds = deadline_seconds or settings.operation_deadline_seconds
    return deadline_seconds + settings.settle_patience_seconds + TIME_LIMIT_MARGIN_SECONDS


def _transport_options(settings: Settings, address: Address) -> dict[str, Any]:
    prefix = settings.key_prefix
    options: dict[str, Any] = {
        # Safety doesn't rest on it.
        "visibility_timeout": settings.visibility_timeout_seconds,
        # The shortest visibility timeout of any app on the same keys wins: these are ours alone.
        "unacked_key": f"{prefix}.unacked",
        "unacked_index_key": f"{prefix}.unacked_index",
        "unacked_mutex_key": f"{prefix}.unacked_mutex",
        # Without them a Redis that hangs, or vanishes without a word, is waited for for ever. More than the second that
        # a worker waits for a message.
        "socket_timeout": 5.0,
        "socket_connect_timeout": 3.0,
        "socket_keepalive": True,
        # A connection whose other end vanished is noticed after two of these.
        "health_check_interval": 4,
        # Tells an operator whose connections those are.
        "client_name": prefix,
        # Of one channel. Threads that publish at the same moment need one each; beyond the default of ten they fail.
        "max_connections": 1000,
    }
    if address.master_name is not None:
        timeouts = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")}
        options["master_name"] = address.master_name
        options["sentinel_kwargs"] = timeouts | dict(address.sentinel_options)
    return options


def _queue(name: str) -> Queue:
    # An exchange of its own, so that the bindings of two deployments don't mix.
    return Queue(name, Exchange(name, type="direct"), routing_key=name)


def _kombu_url(address: Address) -> str:
    """As kombu writes it, which knows no `valkey://` and takes some options elsewhere."""
    user = f"{quote(address.username or '', safe='')}:{quote(address.password, safe='')}@" if address.password else ""
    if address.path is not None:
        return f"redis+socket://{user}{quote(address.path)}?virtual_host={address.database}"
    scheme = "sentinel" if address.master_name else "rediss" if address.is_tls else "redis"
    return ";".join(f"{scheme}://{user}{_host(host)}:{port}/{address.database}" for host, port in address.nodes)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tls(address: Address) -> dict[str, Any] | None:
    if not address.is_tls:
        return None
    kinds = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
    wanted = address.tls_options.get("ssl_cert_reqs", "required")
    return {**address.tls_options, "ssl_cert_reqs": kinds[wanted.removeprefix("CERT_").lower()]}
