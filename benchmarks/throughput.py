"""Steps a second: agentq beside plain Celery without SQL, and beside Celery with one naive transaction a step.

All with the settings, queues and pools that the compose file ships, on servers of its own, in one call. Run it from the
project's folder: `python -m benchmarks.throughput [--runs 1000] [--steps 5] [--events on|off|both] [--json]`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, LiteralString, TypeAlias

import psutil
import psycopg
from celery import Celery
from redis import Redis

from agentq.bootstrap import Wiring
from agentq.cli.worker import ROLES
from agentq.config.celery import celery_config
from agentq.config.settings import Settings, environment_of
from agentq.services.enqueue import EnqueueRequest, enqueue
from benchmarks import plain
from tests.support.databases import fresh_postgresql, postgresql_server
from tests.support.valkey import ValkeyServer

SYSTEMS = ("celery", "celery_sql", "agentq")
PROJECT = Path(__file__).parents[1]
HELD = "held"  # The prefix of queues that nobody serves: first messages wait there until the clock starts.
WORKERS = 2
FINISH_SECONDS_MAX = 600
POLL_SECONDS = 0.05
SETTLE_SECONDS = 2.0  # The keeper beside a worker, and its pool, start a little later.

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One system's run: steps a second, and what the servers counted per step. `statements`: only where they were."""

    steps_per_s: float
    transactions: float
    statements: float
    redis_commands: float
    cpu_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What agentq asks of the database; commits are transactions that got an id."""

    commits_per_read: float
    commits_per_write: float
    statements: float


def main() -> int:
    """Print the table, or one JSON object."""
    arguments = _arguments()
    results = {events: _compare(arguments, events) for events in _modes(arguments.events)}
    shown = results[next(iter(results))]
    costs = _costs(arguments)
    report = {
        "agentq_steps_per_s": shown["agentq"].steps_per_s,
        "celery_steps_per_s": shown["celery"].steps_per_s,
        "celery_sql_steps_per_s": shown["celery_sql"].steps_per_s,
        "ratio_to_celery": shown["agentq"].steps_per_s / shown["celery"].steps_per_s,
        "ratio_to_celery_sql": shown["agentq"].steps_per_s / shown["celery_sql"].steps_per_s,
        "commits_per_read_step": costs.commits_per_read,
        "commits_per_write_step": costs.commits_per_write,
        "statements_per_step": costs.statements,
        "redis_commands_per_step": shown["agentq"].redis_commands,
        "cpu_ms_per_step": shown["agentq"].cpu_ms,
        "cpu_ratio_to_celery_sql": shown["agentq"].cpu_ms / shown["celery_sql"].cpu_ms,
        "events": next(iter(results)),
        "runs": arguments.runs,
        "steps": arguments.steps,
    }
    if arguments.json:
        sys.stdout.write(json.dumps({name: _rounded(value) for name, value in report.items()}) + "\n")
        return 0
    for events, systems in results.items():
        sys.stdout.write(f"\ntask events {events}: {arguments.runs} runs of {arguments.steps} steps\n")
        for name in SYSTEMS:
            one = systems[name]
            sys.stdout.write(
                f"  {name:11}{one.steps_per_s:8.0f} steps/s {one.transactions:6.2f} transactions "
                f"{one.redis_commands:6.1f} Redis commands {one.cpu_ms:6.2f} ms CPU a step\n"
            )
        ours = systems["agentq"].steps_per_s
        sys.stdout.write(
            f"  agentq is at {ours / systems['celery'].steps_per_s:.2f} of plain Celery, "
            f"{ours / systems['celery_sql'].steps_per_s:.2f} of the naive transaction\n"
        )
    sys.stdout.write(
        f"\nagentq: {costs.commits_per_read:.2f} commits a read step, {costs.commits_per_write:.2f} a write step, "
        f"{costs.statements:.2f} SQL statements a step\n"
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=5, help="odd: model turns and tool calls take turns")
    parser.add_argument("--rounds", type=int, default=3, help="of each system, taken in turn; the median counts")
    parser.add_argument("--events", choices=("on", "off", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _modes(events: str) -> tuple[str, ...]:
    return ("on", "off") if events == "both" else (events,)


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def _compare(arguments: argparse.Namespace, events: str) -> dict[str, Measured]:
    """Systems in turn, so that a machine that slows down slows all of them."""
    rounds: dict[str, list[Measured]] = {name: [] for name in SYSTEMS}
    for _ in range(arguments.rounds):
        for name in SYSTEMS:
            rounds[name].append(_measure(name, arguments.runs, arguments.steps, writes=1, events=events))
            _say(f"events {events}: {name} {rounds[name][-1].steps_per_s:.0f} steps/s")
    middle = statistics.median_low
    return {
        name: next(one for one in all_ if one.steps_per_s == middle([each.steps_per_s for each in all_]))
        for name, all_ in rounds.items()
    }


def _costs(arguments: argparse.Namespace) -> Costs:
    """What a step costs the database, counted there: runs without a write, then with one. Not timed: it logs."""
    runs = max(100, arguments.runs // 4)
    server = postgresql_server()
    server.execute("ALTER SYSTEM SET log_min_duration_statement = 0")
    server.execute("SELECT pg_reload_conf()")
    try:
        reads_only = _measure("agentq", runs, arguments.steps, writes=0, events="on")
        with_write = _measure("agentq", runs, arguments.steps, writes=1, events="on")
    finally:
        server.execute("ALTER SYSTEM RESET log_min_duration_statement")
        server.execute("SELECT pg_reload_conf()")
    steps = arguments.steps
    return Costs(
        commits_per_read=reads_only.transactions,
        commits_per_write=with_write.transactions * steps - reads_only.transactions * (steps - 1),
        statements=with_write.statements,
    )


def _measure(system: str, runs: int, steps: int, *, writes: int, events: str) -> Measured:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        valkey = stack.enter_context(ValkeyServer(is_durable=True))
        settings = Settings(
            home=folder,
            database_url=stack.enter_context(fresh_postgresql()),
            broker_url=valkey.url,
            agents=("benchmarks.agents",),
            backlog_max=10 * runs,
        )
        environ = {
            **os.environ,
            **environment_of(settings),
            "PYTHONPATH": str(PROJECT),
            "BENCH_STEPS": str(steps),
            "BENCH_WRITES": str(writes),
            "BENCH_EVENTS": events,
        }
        app = "agentq.tasks.app" if system == "agentq" else "benchmarks.plain"
        if system != "agentq":
            _make_naive_tables(settings.database_url, runs)
        stack.enter_context(_worker(app, "model", settings, environ, folder))
        stack.enter_context(_worker(app, "tools", settings, environ, folder))
        with valkey.client() as redis:
            _wait_for_workers(redis)
            if system == "agentq":
                return _measure_agentq(settings, redis, runs, steps)
            return _measure_plain(system, settings, redis, runs, steps)


def _measure_agentq(settings: Settings, redis: Redis, runs: int, steps: int) -> Measured:
    """Enqueueing isn't measured: the runs are stored, and their first messages written, before the clock starts."""
    held = replace(settings, key_prefix=HELD)
    with Wiring(settings) as wiring, Wiring(held) as holding, _connect(settings) as sql:
        requests = [EnqueueRequest(agent="stepwise", input=f"run {number}") for number in range(runs)]
        enqueue(requests, runs=wiring.runs, dispatcher=holding.dispatcher, backlog_max=10 * runs)
        return _timed(settings, sql, redis, runs * steps, lambda: _count_completed(sql) == runs)


def _measure_plain(system: str, settings: Settings, redis: Redis, runs: int, steps: int) -> Measured:
    task = "plain.step" if system == "celery" else "plain.sql_step"
    held = replace(settings, key_prefix=HELD)
    app = Celery("held", set_as_current=False)
    app.conf.update(celery_config(held))
    for number in range(runs):
        app.send_task(task, (f"run-{number}", 1), queue=held.queue("model"))
    with _connect(settings) as sql:
        finished = plain.FINISHED_KEY
        return _timed(settings, sql, redis, runs * steps, lambda: int(redis.get(finished) or 0) >= runs)


def _timed(settings: Settings, sql: Connection, redis: Redis, steps: int, is_done: Callable[[], bool]) -> Measured:
    """Hand all first messages to the workers at once, and wait for the last run."""
    before = _counts(sql, redis)
    cpu_before = _cpu_seconds()
    began = time.monotonic()
    redis.rename(f"{HELD}.model", settings.queue("model"))
    while not is_done():
        if time.monotonic() - began > FINISH_SECONDS_MAX:
            raise SystemExit(f"not done after {FINISH_SECONDS_MAX} s")
        time.sleep(POLL_SECONDS)
    took = time.monotonic() - began
    cpu_ms = (_cpu_seconds() - cpu_before) * 1000 / steps
    transactions, statements, commands = (
        (later - earlier) / steps for later, earlier in zip(_counts(sql, redis), before, strict=True)
    )
    return Measured(
        steps_per_s=steps / took,
        transactions=transactions,
        statements=statements,
        redis_commands=commands,
        cpu_ms=cpu_ms,
    )


def _cpu_seconds() -> float:
    """Of the workers and of both servers: what a step costs, whatever else the machine does."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _counts(sql: Connection, redis: Redis) -> tuple[int, int, int]:
    """Transactions that got an id, statements, Redis commands, as the servers count them."""
    transactions = _scalar(sql, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    log = (postgresql_server().folder / "log").read_text(errors="replace")
    statements = len(re.findall(r" ms  (?:statement|execute [^:]*):", log))
    commands = int(redis.info("stats")["total_commands_processed"])
    return transactions, statements, commands


def _count_completed(sql: Connection) -> int:
    return _scalar(sql, "SELECT count(*) FROM runs WHERE status = 'completed'")


def _scalar(sql: Connection, statement: LiteralString) -> int:
    row = sql.execute(statement).fetchone()
    assert row is not None
    return int(row[0])


def _connect(settings: Settings) -> Connection:
    return psycopg.connect(settings.database_url, autocommit=True)


def _make_naive_tables(url: str, runs: int) -> None:
    with psycopg.connect(url, autocommit=True) as sql:
        sql.execute("CREATE TABLE naive_runs (id text PRIMARY KEY, step integer, updated_at timestamptz)")
        sql.execute("CREATE TABLE naive_steps (run_id text, number integer, data text, PRIMARY KEY (run_id, number))")
        sql.execute("INSERT INTO naive_runs SELECT 'run-' || n FROM generate_series(0, %s) n", (runs - 1,))


@contextmanager
def _worker(app: str, role: str, settings: Settings, environ: dict[str, str], folder: Path) -> Iterator[None]:
    """A worker as the compose file runs it."""
    chosen = ROLES[role]
    argv = [
        *(sys.executable, "-m", "celery", "-A", app, "worker", "--loglevel=WARNING"),
        f"--pool={chosen.pool}",
        f"--concurrency={chosen.concurrency(settings)}",
        f"--queues={','.join(settings.queue(name) for name in chosen.queues)}",
        f"--hostname={role}@benchmark",
        *("--without-mingle", "--without-gossip"),
    ]
    with (folder / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(argv, env=environ, cwd=PROJECT, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_workers(redis: Redis) -> None:
    """Both consume: each waits in a BRPOP on its queues."""
    ends_at = time.monotonic() + 60
    while sum(client["cmd"] == "brpop" for client in redis.client_list()) < WORKERS:
        if time.monotonic() > ends_at:
            raise SystemExit("the workers did not start")
        time.sleep(POLL_SECONDS)
    time.sleep(SETTLE_SECONDS)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
