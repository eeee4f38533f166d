"""A Celery app with agentq's settings and a task of its own, for workers that tests start."""

import time
from pathlib import Path

from agentq.config.celery import celery_app
from agentq.config.settings import load_settings

app = celery_app(load_settings())


@app.task(name="test.note")
def note(path: str, wait_for: str | None = None) -> None:
    """Write a line when it begins, and one when the file to wait for is there."""
    _write(path, "begins")
    while wait_for and not Path(wait_for).exists():
        time.sleep(0.02)
    _write(path, "ends")


@app.task(name="agentq.step")
def step(run_id: str, number: int, attempt: int) -> None:
    """A step that does nothing."""


def _write(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{line}\n")
