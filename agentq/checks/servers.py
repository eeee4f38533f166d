"""Look at what a worker depends on, before it starts and whenever the doctor is asked. Changes nothing."""

from collections.abc import Iterator

from agentq.adapters.outcome_facts import examine_outcomes
from agentq.adapters.redis.client import redis_client
from agentq.adapters.redis.examine import examine_redis
from agentq.adapters.sql.examine import examine_database
from agentq.bootstrap import Wiring
from agentq.checks.database import judge_database
from agentq.checks.finding import Finding, broken_promise, note, ok
from agentq.checks.outcomes import judge_outcomes
from agentq.checks.redis import judge_redis
from agentq.domain.errors import ConfigurationError

Findings = Iterator[Finding]


def look_at_database(wiring: Wiring) -> Findings:
    """Raises StoreUnavailableError, and SchemaError when this code can't work on its schema."""
    yield from judge_database(examine_database(wiring.database, wiring.settings.effective_database_url))
    wiring.check_schema()
    yield ok("schema", f"deployment {wiring.deployment}")


def look_at_redis(wiring: Wiring) -> Findings:
    """The broker, and the server of the leases where that is another. Raises LeasesUnavailableError."""
    broker, leases = wiring.settings.effective_broker_url, wiring.settings.effective_lease_url
    yield from _look_at_server("broker", broker, holds_messages=True)
    if leases != broker:
        yield from _look_at_server("leases", leases, holds_messages=False)


def look_at_mark(wiring: Wiring) -> Findings:
    """Whose deployment the keys in Redis are. Raises LeasesUnavailableError."""
    try:
        is_claimed = wiring.leases.check_claim()
    except ConfigurationError as foreign:
        yield broken_promise(
            "deployment", str(foreign), why="two databases with one Redis take each other's messages and leases"
        )
        return
    if is_claimed:
        yield ok("deployment", "Redis is marked as this database's")
    else:
        yield note("deployment", "Redis has no mark yet", why="the first worker that starts makes it")


def look_at_outcomes(wiring: Wiring) -> Findings:
    """What waits in the home, and whether more can be kept in it."""
    yield from judge_outcomes(examine_outcomes(wiring.settings.home, wiring.deployment))


def _look_at_server(subject: str, url: str, *, holds_messages: bool) -> Findings:
    client = redis_client(url)
    try:
        facts = examine_redis(client, url)
    finally:
        client.close()
    yield from judge_redis(subject, facts, holds_messages=holds_messages)
