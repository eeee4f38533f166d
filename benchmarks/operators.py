"""What an operator waits for in an outage: the list of ten thousand dead letters, and their replay beside an enqueue.

Ten thousand dead letters among a million runs, made by statements, on a PostgreSQL and a Valkey of its own. Both rates
are measured in turn, with a broker that takes the steps or (`--backlog-max 0`) has no room:
`python -m benchmarks.operators [--runs 1000000] [--dead-letters 10000] [--backlog-max 10000] [--json]`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from agentq.client import AgentQ
from agentq.config.settings import Settings
from agentq.domain.fingerprint import fingerprint
from tests.support.databases import fresh_postgresql
from tests.support.valkey import ValkeyServer

LIST_TIMES = 21
ROUNDS = 3
ERRORS = tuple(f"the {service} service said no" for service in ("payment", "mail", "search", "stock", "print"))

RUNS = """
INSERT INTO runs (id, agent, mode, status, input, input_digest, created_at, started_at, finished_at, output,
                  next_step, events_count)
SELECT md5(n::text), 'support', 'queued', 'completed', '"refund an order"', '', t, t, t, '"done"', 2, 1
FROM (SELECT n, now() - n * interval '1 second' AS t FROM generate_series(1, %(runs)s) AS n)
"""
# Each of the dead letters' runs has had a turn, a read, and a call that failed.
FAILED = """
UPDATE runs SET status = 'failed', output = NULL, error = 'it failed', next_step = 4
WHERE id IN (SELECT md5(n::text) FROM generate_series(1, %(runs)s, %(runs)s / %(dead_letters)s) AS n)
"""
STEPS = """
INSERT INTO steps (run_id, number, kind, state, batch, tool, effect, arguments, result,
                   due_at, dispatched_at, finished_at)
SELECT id, number, CASE number WHEN 1 THEN 'model' ELSE 'tool' END,
       CASE number WHEN 3 THEN 'dead_lettered' ELSE 'completed' END, number,
       CASE number WHEN 1 THEN NULL WHEN 2 THEN 'look' ELSE 'pay' END,
       CASE number WHEN 3 THEN 'non_idempotent_write' ELSE 'read_only' END,
       '{}', CASE number WHEN 3 THEN NULL ELSE '"ok"' END, created_at, created_at, created_at
FROM runs, generate_series(1, 3) AS number WHERE status = 'failed'
"""
LETTERS = """
INSERT INTO dead_letters (run_id, number, agent, tool, reason, failure_class, error, fingerprint, created_at)
SELECT id, 3, agent, 'pay', 'NOT_RETRYABLE', 'SERVER_ERROR', errors[1 + n %% 5], fingerprints[1 + n %% 5], finished_at
FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM runs WHERE status = 'failed'),
     (SELECT %(errors)s::text[] AS errors, %(fingerprints)s::text[] AS fingerprints)
"""


def main() -> int:
    """Print the numbers, as sentences or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--dead-letters", type=int, default=10_000)
    parser.add_argument("--backlog-max", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    with _client(arguments.backlog_max) as (client, url):
        _fill(url, runs=arguments.runs, dead_letters=arguments.dead_letters)
        client.dead_letter_groups()  # Connected, and read once.
        report = {
            "runs": arguments.runs,
            "dead_letters": client.count_dead_letters(),
            "groups_ms": _milliseconds(client.dead_letter_groups),
            "list_ms": _milliseconds(client.dead_letters),
            "plan_ms": _milliseconds(lambda: client.replay_plan(client.dead_letters(limit=1)[0].run_id)),
            **_rates(client, arguments.dead_letters),
        }
    report["ratio_to_enqueue"] = round(report["replays_per_s"] / report["enqueues_per_s"], 2)
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"{report['dead_letters']:,} dead letters among {report['runs']:,} runs: "
            f"grouped in {report['groups_ms']} ms, listed in {report['list_ms']} ms, "
            f"one planned in {report['plan_ms']} ms (medians)\n"
            f"replayed at {report['replays_per_s']:,} a second, rehearsed at {report['rehearsals_per_s']:,}; "
            f"enqueue_many does {report['enqueues_per_s']:,}: {report['ratio_to_enqueue']} of that\n"
        )
    return 0


@contextmanager
def _client(backlog_max: int) -> Iterator[tuple[AgentQ, str]]:
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as valkey, fresh_postgresql() as url:
        settings = Settings(home=Path(folder), database_url=url, broker_url=valkey.url, backlog_max=backlog_max)
        with AgentQ(settings, actor="operator") as client:
            client._wiring.keeping.see_agents({"support": 100_000})
            yield client, url


def _fill(url: str, *, runs: int, dead_letters: int) -> None:
    values = {
        "runs": runs,
        "dead_letters": dead_letters,
        "errors": list(ERRORS),
        "fingerprints": [fingerprint(error) for error in ERRORS],
    }
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (RUNS, FAILED, STEPS, LETTERS):
            connection.execute(statement.encode(), values)
        connection.execute("VACUUM ANALYZE")


def _milliseconds(ask: Callable[[], Any]) -> float:
    took = []
    for _ in range(LIST_TIMES):
        began = time.perf_counter()
        ask()
        took.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(took), 1)


def _rates(client: AgentQ, dead_letters: int) -> dict[str, int]:
    """Runs a second, medians of parts that take turns: what the machine does besides meets all alike."""
    part = dead_letters // ROUNDS
    replayed, rehearsed, enqueued = [], [], []
    for _ in range(ROUNDS):
        rehearsed.append(_rate(part, lambda: list(client.replay_many({"limit": part}, dry_run=True))))
        replayed.append(_rate(part, lambda: list(client.replay_many({"limit": part}, reason="mended"))))
        requests = [{"agent": "support", "input": "refund an order"} for _ in range(part)]
        enqueued.append(_rate(part, lambda: client.enqueue_many(requests)))  # noqa: B023 - called at once
    return {
        "replays_per_s": round(statistics.median(replayed)),
        "rehearsals_per_s": round(statistics.median(rehearsed)),
        "enqueues_per_s": round(statistics.median(enqueued)),
    }


def _rate(runs: int, change: Callable[[], Any]) -> float:
    began = time.perf_counter()
    change()
    return runs / (time.perf_counter() - began)


if __name__ == "__main__":
    raise SystemExit(main())
