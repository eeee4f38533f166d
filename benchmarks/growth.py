"""One long run: what it stores a step, and how the time of a model turn grows with its messages.

A run of 1,000 steps, model turns and tool calls in turn, 400 bytes each; the model is a function that reads the whole
history at every turn. In this process, on a PostgreSQL and a Valkey of its own:
`python -m benchmarks.growth [--steps 1000] [--json]`.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from agentq.bootstrap import Wiring
from agentq.config.settings import Settings
from agentq.domain.model import RunStatus, StepRef
from agentq.ports.runs import NewRun
from tests.support.databases import fresh_postgresql
from tests.support.valkey import ValkeyServer

PART = 100  # The first and the last so many steps are compared.
STORED = """
SELECT number, pg_column_size(steps.*) + coalesce((
    SELECT sum(pg_column_size(events.*)) FROM events WHERE events.run_id = steps.run_id AND events.number = steps.number
), 0) FROM steps ORDER BY number
"""


def main() -> int:
    """Print the two numbers, as a sentence or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["BENCH_STEPS"] = str(arguments.steps)

    with _wiring() as wiring:
        seconds = _run_through(wiring)
        stored = _stored_bytes(wiring.settings.database_url)
    report = {
        "steps": len(seconds),
        "bytes_ratio": round(statistics.mean(stored[-PART:]) / statistics.mean(stored[:PART]), 3),
        "microseconds_per_message": round(_slope([(number, took * 1e6) for number, took in seconds if number % 2]), 2),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"{report['steps']} steps: the last {PART} store {report['bytes_ratio']} times the bytes of the first; "
            f"a model turn takes {report['microseconds_per_message']} microseconds more per message\n"
        )
    return 0


@contextmanager
def _wiring() -> Iterator[Wiring]:
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as valkey, fresh_postgresql() as url:
        settings = Settings(home=Path(folder), database_url=url, broker_url=valkey.url, agents=("benchmarks.agents",))
        with Wiring(settings) as wiring:
            yield wiring


def _run_through(wiring: Wiring) -> list[tuple[int, float]]:
    """Each step's number and how long it took, in seconds: executed one after the other, as a worker would."""
    wiring.keeping.see_agents(wiring.serves)
    wiring.runs.add([NewRun(id="long", agent="growing", input="go")])
    ref, took = StepRef(run_id="long", number=1, attempt=1), []
    while wiring.runs.status("long") is not RunStatus.COMPLETED:
        began = time.perf_counter()
        executed = wiring.executor.execute(ref)
        took.append((ref.number, time.perf_counter() - began))
        ref = executed.wakeups[0].ref if executed.wakeups else ref
    return took


def _stored_bytes(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [int(size) for _, size in connection.execute(STORED.encode()).fetchall()]


def _slope(points: list[tuple[int, float]]) -> float:
    """By how much the second value grows with the first: the least-squares line, which noise hardly moves."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


if __name__ == "__main__":
    raise SystemExit(main())
