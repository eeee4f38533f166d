"""What a Redis or Valkey says of itself, as far as messages and leases depend on it. Changes nothing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis, RedisError
from redis.exceptions import ResponseError

from agentq.adapters.redis.address import parse_address
from agentq.adapters.redis.scripts import unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """None: the server doesn't tell, as managed ones do. `seconds_ahead`: its clock against this machine's."""

    product: str
    version: str
    place: str
    commands_version: str = "7.2.4"  # The Redis whose commands it has.
    is_cluster: bool = False
    is_replica: bool = False
    replicas: int = 0
    eviction_policy: str | None = "noeviction"
    memory_max_bytes: int = 0
    memory_used_bytes: int = 0
    has_append_only_file: bool | None = True
    append_fsync: str | None = "everysec"
    snapshots: str | None = ""
    has_write_error: bool = False
    seconds_ahead: float = 0.0


def examine_redis(client: Redis, url: str) -> RedisFacts:
    """The facts. `client` answers with text. Raises LeasesUnavailableError."""
    try:
        seconds_ahead = _seconds_ahead(client)
        about: dict[str, Any] = dict(client.info())
        asked = {name: _setting(client, name) for name in ("maxmemory-policy", "appendonly", "appendfsync", "save")}
    except (RedisError, OSError) as error:
        raise unavailable(error) from error
    appends = about.get("aof_enabled")
    return RedisFacts(
        product="Valkey" if "valkey_version" in about else "Redis",
        version=str(about.get("valkey_version") or about.get("redis_version", "?")),
        place=place_of(url),
        commands_version=str(about.get("redis_version", "")),
        is_cluster=bool(about.get("cluster_enabled")),
        is_replica=about.get("role") == "slave",
        replicas=int(about.get("connected_slaves", 0)),
        eviction_policy=about.get("maxmemory_policy") or asked["maxmemory-policy"],
        memory_max_bytes=int(about.get("maxmemory", 0)),
        memory_used_bytes=int(about.get("used_memory", 0)),
        has_append_only_file=bool(appends) if appends is not None else _is_on(asked["appendonly"]),
        append_fsync=asked["appendfsync"],
        snapshots=asked["save"],
        has_write_error="err" in (about.get("aof_last_write_status"), about.get("rdb_last_bgsave_status")),
        seconds_ahead=seconds_ahead,
    )


def queue_lengths(client: Redis, queues: Sequence[str]) -> dict[str, int]:
    """How many messages wait in each. Raises LeasesUnavailableError."""
    try:
        with client.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.llen(queue)
            return dict(zip(queues, pipeline.execute(), strict=True))
    except (RedisError, OSError) as error:
        raise unavailable(error) from error


def place_of(url: str) -> str:
    """Where a server is, without user, password or options."""
    address = parse_address(url)
    if address.path is not None:
        return address.path
    nodes = ", ".join(f"{host}:{port}" for host, port in address.nodes)
    return f"{nodes}/{address.database}" if address.master_name is None else f"{address.master_name} of {nodes}"


def _setting(client: Redis, name: str) -> str | None:
    try:
        answer: Any = client.config_get(name)
    except ResponseError:
        return None  # A managed server, or a user with few rights: CONFIG is refused.
    value: str | None = answer.get(name)
    return value


def _is_on(value: str | None) -> bool | None:
    return None if value is None else value == "yes"


def _seconds_ahead(client: Redis) -> float:
    """Against the middle of the question's way there and back."""
    client.ping()  # Connecting is no part of it.
    asked_at = time.time()
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6 - (asked_at + time.time()) / 2
