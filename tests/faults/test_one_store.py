"""Eight processes that write to one SQLite store."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentq.domain.model import RunStatus
from tests.support.system import AGENT, System, call
from tests.support.waiting import eventually
from tests.support.workers import environment

RUNS_PER_PRODUCER = 8


@pytest.mark.parametrize("deployment", ["sqlite"], indirect=True, scope="module")
def test_eight_processes_wait_for_each_other_without_an_error(system: System, tmp_path: Path) -> None:
    """A keeper, a model worker, four children of a tools worker and two producers: one writes at a time, the others
    wait in line, and no run is dead-lettered for it."""
    workers = [*system.workers("model"), *system.workers("tools", tools_concurrency=4)]
    requests = tmp_path / "requests.jsonl"
    turns = [[call("look", "read"), call("put", "keyed"), call("pay", "plain")]]
    requests.write_text(f"{json.dumps({'agent': AGENT, 'input': {'turns': turns}})}\n" * RUNS_PER_PRODUCER)
    producers = [
        subprocess.Popen(
            [sys.executable, "-m", "agentq.cli.main", "enqueue", "--from-jsonl", str(requests), "-o", "ids"],
            env=environment(system.settings),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    run_ids = [run_id for producer in producers for run_id in producer.communicate(timeout=30)[0].split()]
    assert len(run_ids) == 2 * RUNS_PER_PRODUCER
    eventually(lambda: not system.client.runs(status=["queued", "running"]), seconds=60, what="every run ends")
    runs = [system.client.get(run_id) for run_id in run_ids]
    assert {run.status for run in runs} == {RunStatus.COMPLETED}
    assert {(step.attempt, step.tries, step.crashes) for run in runs for step in run.steps} == {(1, 0, 0)}
    for process in (*workers, *system.processes):
        assert "database is locked" not in process.log()
