"""`agentq doctor`: look at settings, database, broker and workers, and say what to do about what is wrong."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.output import Cell, Column, Format, View, duration, emit_list, output_options, say
from agentq.config.settings import PREFIX, Settings, load_settings
from agentq.domain.errors import AgentqError, BrokerUnavailableError
from agentq.services.enqueue import SILENT_SECONDS

if TYPE_CHECKING:
    from agentq.bootstrap import Wiring


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    subject: str
    state: State
    found: str
    advice: str = ""


STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "red"}
COLUMNS = (
    Column("", lambda view: Cell(view["state"], STYLES[view["state"]])),
    Column("WHAT", lambda view: Cell(view["subject"])),
    Column("FOUND", lambda view: Cell(view["found"])),
)


@click.command()
@output_options
def doctor(output: Format) -> ExitCode:
    """Check settings, database, broker and workers. Changes nothing; exits with 1 when something is broken."""
    from agentq.bootstrap import Wiring  # noqa: PLC0415 - `--help` doesn't need it

    settings = load_settings()
    with Wiring(settings) as wiring:
        findings = list(_examine(settings, wiring))
    emit_list([_view(finding) for finding in findings], COLUMNS, output, id_of="subject", none="")
    for finding in findings:
        if finding.advice and output.is_for_people:
            say(f"{finding.subject}: {finding.advice}", style=STYLES[finding.state])
    return ExitCode.FAILED if any(finding.state is State.FAILED for finding in findings) else ExitCode.DONE


Check = Callable[[Settings, "Wiring"], Iterator[Finding]]


def _examine(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    for check in (check_settings, check_broker, check_leases):
        yield from _checked(check, settings, wiring)
    of_database = list(_checked(check_database, settings, wiring))
    yield from of_database
    if all(finding.state is not State.FAILED for finding in of_database):
        for check in (check_workers, check_dead_letters):
            yield from _checked(check, settings, wiring)


def _checked(check: Check, settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    """A check that meets an error found one: that is what it is for."""
    subject = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        yield from check(settings, wiring)
    except AgentqError as error:
        yield Finding(subject, State.FAILED, str(error))


def check_settings(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    set_here = sorted(name for name in os.environ if name.startswith(PREFIX))
    yield Finding(
        "settings", State.OK, ", ".join(set_here) or f"none set: everything lives in {settings.home.absolute()}"
    )


def check_database(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    database = wiring.database
    question = "SHOW server_version" if database.is_postgresql else "SELECT sqlite_version()"
    with database.reading() as connection:
        version = connection.exec_driver_sql(question).scalar_one()
    yield Finding("database", State.OK, f"{'PostgreSQL' if database.is_postgresql else 'SQLite'} {version}")
    wiring.check_schema()
    yield Finding("schema", State.OK, f"deployment {wiring.deployment}")
    if database.is_postgresql:
        yield _durability(wiring)


def _durability(wiring: "Wiring") -> Finding:
    with wiring.database.reading() as connection:
        fsync = connection.exec_driver_sql("SHOW fsync").scalar_one()
        standbys = connection.exec_driver_sql("SELECT count(*) FROM pg_stat_replication").scalar_one()
        waits_for = connection.exec_driver_sql("SHOW synchronous_standby_names").scalar_one()
    if fsync == "off":
        advice = "a crash of the server can lose a fence, and its write may run twice: set fsync = on"
        return Finding("durability", State.FAILED, "fsync is off", advice)
    if standbys and not waits_for:
        advice = "a failover to a standby that lags can lose a fence: set synchronous_standby_names"
        return Finding("durability", State.WARNING, f"{standbys} standbys, none synchronous", advice)
    return Finding("durability", State.OK, "what is committed stays")


def check_broker(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    yield from _check_redis("broker", settings.effective_broker_url)


def check_leases(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    if settings.effective_lease_url != settings.effective_broker_url:
        yield from _check_redis("leases", settings.effective_lease_url)


def _check_redis(subject: str, url: str) -> Iterator[Finding]:
    from redis.exceptions import RedisError  # noqa: PLC0415 - only this command needs it here

    from agentq.adapters.redis.client import redis_client  # noqa: PLC0415

    client = redis_client(url)
    try:
        about = client.info()
    except RedisError as error:
        raise BrokerUnavailableError(
            f"{error}; queued runs wait in the database. Start it, correct {PREFIX}BROKER_URL, or run agentq up"
        ) from None
    finally:
        client.close()
    name = "Valkey" if "valkey_version" in about else "Redis"
    yield Finding(subject, State.OK, f"{name} {about.get('valkey_version') or about['redis_version']}")
    policy = about.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        advice = "it may drop leases and messages: set maxmemory-policy noeviction"
        yield Finding(f"{subject} memory", State.FAILED, f"maxmemory-policy is {policy}", advice)
    if not about.get("aof_enabled") and subject == "broker":
        advice = "a restart loses queued messages; no run is lost, each is found again after a while (appendonly yes)"
        yield Finding(f"{subject} persistence", State.WARNING, "no append-only file", advice)


def check_workers(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    agents = wiring.runs.agents()
    if not agents:
        yield Finding("workers", State.WARNING, "none has ever started", "agentq worker, with AGENTQ_AGENTS set")
    for agent in agents.values():
        seen = f"a worker was seen {duration(agent.seen_seconds)} ago"
        is_served = agent.seen_seconds <= SILENT_SECONDS
        advice = "" if is_served else "its runs wait until a worker serves it again"
        yield Finding(f"agent {agent.name}", State.OK if is_served else State.WARNING, seen, advice)


def check_dead_letters(settings: Settings, wiring: "Wiring") -> Iterator[Finding]:
    from agentq.ports import RunFilter  # noqa: PLC0415 - with the rest of the database's code

    letters = wiring.decisions.dead_letters(RunFilter())
    unknown = sum(letter.outcome_unknown for letter in letters)
    if letters:
        found = f"{len(letters)} wait for a person, {unknown} with an unknown write"
        yield Finding("dead letters", State.WARNING, found, "agentq dead-letters list")
    else:
        yield Finding("dead letters", State.OK, "none")


def _view(finding: Finding) -> View:
    return {
        "subject": finding.subject,
        "state": finding.state.value,
        "found": finding.found,
        "advice": finding.advice or None,
    }
