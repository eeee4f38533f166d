"""Build Redis clients that answer or fail soon: short timeouts, no retries of their own."""

from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from agentq.adapters.redis.address import parse_address

TIMEOUT_SECONDS = 2.0  # A lease has time for several tries; who waits longer learns nothing.
HEALTH_CHECK_SECONDS = 30  # Longer than a heartbeat, so that the hot path never pays for a ping.


def redis_client(url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Redis:
    """A client for threads to share: its pool holds as many connections as threads talk at once, made when needed and
    remade after a fork. Answers are text. Raises ConfigurationError when the URL is wrong; connects to nothing yet."""
    address = parse_address(url)
    options: dict[str, Any] = {
        "db": address.database,
        "username": address.username,
        "password": address.password,
        "decode_responses": True,
        "socket_timeout": timeout_seconds,
        "health_check_interval": HEALTH_CHECK_SECONDS,
        # Whether a lost command is sent again is the caller's decision: a script may have run.
        "retry": Retry(NoBackoff(), 0),
    }
    if address.path is not None:
        return Redis(unix_socket_path=address.path, **options)

    options |= {"socket_connect_timeout": timeout_seconds, "socket_keepalive": True}
    if address.master_name is not None:
        asking = {name: options[name] for name in ("decode_responses", "socket_timeout", "socket_connect_timeout")}
        sentinel_of: Any = Sentinel  # It has no type hints.
        sentinel = sentinel_of(list(address.nodes), sentinel_kwargs=asking | dict(address.sentinel_options), **options)
        client: Redis = sentinel.master_for(address.master_name)
        return client
    [(host, port)] = address.nodes
    options |= address.tls_options
    return Redis(host=host, port=port, ssl=address.is_tls, **options)
