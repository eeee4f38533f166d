"""What the broker may do to messages at any time: deliver them again, repeat them, break connections."""

# kombu is typed in part only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Mapping

from redis import Redis

from agentq.config.celery import celery_app
from agentq.config.settings import Settings
from tests.support.valkey import ValkeyServer
from tests.support.waiting import eventually


class Broker:
    """The broker of a deployment, from its inside."""

    def __init__(self, settings: Settings, server: ValkeyServer) -> None:
        self._settings = settings
        self._server = server
        self._app = celery_app(settings, set_as_current=False)
        self._unacked, self._index = f"{settings.key_prefix}.unacked", f"{settings.key_prefix}.unacked_index"

    def in_hand(self) -> Mapping[str, str]:
        """The messages that are delivered and not acknowledged, by delivery tag, as the broker keeps them."""
        with self._server.client() as client:
            found: Mapping[str, str] = client.hgetall(self._unacked)
        return found

    def queued(self, role: str) -> int:
        with self._server.client() as client:
            count: int = client.llen(self._settings.queue(role))
        return count

    def waiting_workers(self) -> int:
        """How many wait for a message at this moment."""
        with self._server.client() as client:
            return sum(each["cmd"] == "brpop" and "b" in each["flags"] for each in client.client_list())

    def deliver_again(self, messages: Mapping[str, str]) -> None:
        """As when their visibility timeout is over, acknowledged or not; at most 100."""
        with self._server.client() as client:
            client.hset(self._unacked, mapping=dict(messages))
            client.zadd(self._index, dict.fromkeys(messages, 1.0))
            client.delete(f"{self._settings.key_prefix}.unacked_mutex")
        with self._app.connection_for_read() as connection, connection.channel() as channel:
            channel.qos.restore_visible(num=100, interval=1)

    def deliver_in_vain(self, messages: Mapping[str, str]) -> None:
        """Deliver again; returns when whoever got them has left them. Nothing else may be acknowledged meanwhile."""
        before = self._removals()
        self.deliver_again(messages)
        # Each is removed from what is in hand twice: to be queued again, and when it is acknowledged.
        eventually(lambda: self._removals() >= before + 2 * len(messages), what="the messages are left again")

    def forget_in_hand(self) -> None:
        """What dead workers had in hand lies there until its visibility timeout."""
        with self._server.client() as client:
            client.delete(self._unacked, self._index)

    def break_connections(self) -> None:
        with self._server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    def forget_leases(self) -> int:
        """Who holds what, and which attempts were started, as at a fail-over to a replica that lags; how many."""
        with self._server.client() as client:
            count: int = client.delete(*self._lease_keys(client))
        return count

    def leases(self) -> int:
        """How many are held, or leave the mark of an attempt that was started."""
        with self._server.client() as client:
            return len(self._lease_keys(client))

    def turned_away(self) -> int:
        """How many deliveries found their step held, its attempt started, or nothing to do."""
        with self._server.client() as client:
            return sum(int(client.get(key) or 0) for key in client.scan_iter("*:suppressed", count=1000))

    def _removals(self) -> int:
        with self._server.client() as client:
            return int(client.info("commandstats").get("cmdstat_hdel", {"calls": 0})["calls"])

    def _lease_keys(self, client: Redis) -> list[str]:
        keys = client.scan_iter(f"{self._settings.key_prefix}:*:lease:*", count=1000)
        return [key for key in keys if not key.endswith(":suppressed")]
