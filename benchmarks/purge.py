"""How fast old runs are purged, and what those who write at the same time notice of it.

Finished runs of five steps, made by statements; then a purge, while threads enqueue runs and settle their steps as
workers do. On a database of its own:
`python -m benchmarks.purge [--runs 100000] [--database postgresql|sqlite] [--json]`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentq.adapters.sql.engine import Database
from agentq.client import AgentQ
from agentq.config.settings import Settings
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.stage import Stage

WRITERS = 2
BEFORE_SECONDS = 10.0
STEPS = 5

NUMBERS = """
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})
"""
RUNS = """
INSERT INTO runs (id, agent, mode, status, input, input_digest, created_at, started_at, finished_at, output,
                  next_step, events_count)
{numbers}SELECT 'old ' || n, 'support', 'queued', 'completed', '"refund an order"', '', {at}, {at}, {at}, '"done"', 6, 7
FROM numbers
"""
STEP_ROWS = """
INSERT INTO steps (run_id, number, kind, state, effect, arguments, result, finished_at)
{numbers}SELECT id, n, 'tool', 'completed', 'read_only', '{{}}', '"{payload}"', finished_at FROM runs, numbers
"""
EVENT_ROWS = """
INSERT INTO events (run_id, sequence, at, kind, number, attempt, actor, data)
{numbers}SELECT id, n, finished_at, 'step.settled', n, 1, 'host/boot/1-1/x', '{{"effect":"read_only"}}'
FROM runs, numbers
"""
SEAL_ROWS = """
INSERT INTO seals (run_id, number, sequence, events_lost, digest, at)
SELECT id, 1, 7, 0, '{digest}', finished_at FROM runs
"""


def main() -> int:
    """Print the numbers, as sentences or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with _database(arguments.database) as url:
        _fill(url, arguments.runs)
        report = {"database": arguments.database, "runs": arguments.runs, **_measure(url)}
    if arguments.json:
        json.dump(report, sys.stdout, indent=2)
    else:
        for name, value in report.items():
            print(f"{name:24}{value}")  # noqa: T201 - what a benchmark is for
    return 0


@contextmanager
def _database(kind: str) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="agentq-purge-") as folder,
        fresh_postgresql() if kind == "postgresql" else fresh_sqlite(Path(folder)) as url,
    ):
        yield url


def _fill(url: str, count: int) -> None:
    database = Database(url)
    at = "now() - (60 * 86400 - n) * interval '1 second'"
    if not database.is_postgresql:
        at = "strftime('%Y-%m-%d %H:%M:%f', 'now', printf('-%d seconds', 60 * 86400 - n))"
    with database.writing() as connection:
        for statement, numbers in ((RUNS, count), (STEP_ROWS, STEPS), (EVENT_ROWS, STEPS + 2), (SEAL_ROWS, 0)):
            written = statement.format(
                numbers=NUMBERS.format(count=numbers), at=at, payload="x" * 400, digest="0123456789abcdef" * 4
            )
            connection.exec_driver_sql(written.replace("%", "%%") if database.is_postgresql else written)
    if database.is_postgresql:
        with database.reading() as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    database.dispose()


def _measure(url: str) -> dict[str, object]:
    stop = threading.Event()
    waits: list[tuple[float, float]] = []
    writers = [threading.Thread(target=_write, args=(url, stop, waits)) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    time.sleep(BEFORE_SECONDS)
    with AgentQ(Settings(database_url=url)) as client:
        began = time.monotonic()
        runs = sum(len(batch.run_ids) for batch in client.purge("30d"))
        took = time.monotonic() - began
    stop.set()
    for writer in writers:
        writer.join()
    before = [wait for at, wait in waits if at < began]
    beside = [wait for at, wait in waits if began <= at < began + took]
    return {
        "purged": runs,
        "purge_seconds": round(took, 1),
        "purged_per_s": round(runs / took),
        "writes_per_s_before": round(len(before) / BEFORE_SECONDS),
        "writes_per_s_beside": round(len(beside) / took),
        **_quantiles("before", before),
        **_quantiles("beside", beside),
    }


def _write(url: str, stop: threading.Event, waits: list[tuple[float, float]]) -> None:
    """Runs of one turn: how long each enqueue and each settle took."""
    stage = Stage(database=Database(url))
    while not stop.is_set():
        began = time.monotonic()
        run_id = stage.queued()
        waits.append((began, time.monotonic() - began))
        began = time.monotonic()
        stage.answer(run_id, 1)
        waits.append((began, time.monotonic() - began))
    stage.database.dispose()


def _quantiles(name: str, waits: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(waits, n=1000)
    return {
        f"p50_ms_{name}": round(1000 * cuts[499], 2),
        f"p99_ms_{name}": round(1000 * cuts[989], 2),
        f"max_ms_{name}": round(1000 * max(waits), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
