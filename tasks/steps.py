"""The task `agentq.step`: one attempt of one step."""

from typing import Any

from celery import Task
from celery.exceptions import WorkerLostError
from celery.worker.request import Request

from agentq.adapters.process import process_prefix
from agentq.domain.model import StepRef
from agentq.ports.leases import DeathNote
from agentq.tasks.app import app
from agentq.tasks.wiring import wiring


class RunStoppedError(Exception):
    """This step ended its run: what Flower shows in red. It is raised after the settle, so nothing is lost by it."""


class StepRequest(Request):
    """A step's message in the worker's main process, which sees its pool children die."""

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        answer = super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        # By its type: the exception itself comes wrapped.
        if issubclass(exc_info.type, WorkerLostError) and self.worker_pid:
            self._leave_note(self.worker_pid)
        return answer

    def _leave_note(self, pid: int) -> None:
        run_id, number, attempt = self.args
        ref = StepRef(run_id=run_id, number=number, attempt=attempt)
        wiring().nudges.leave_note(DeathNote(ref=ref, process=process_prefix(pid)))


class StepTask(Task):
    Request = StepRequest


@app.task(name="agentq.step", base=StepTask, throws=(RunStoppedError,))
def step(run_id: str, number: int, attempt: int) -> None:
    """Execute one attempt. The message is a wake-up call: losing or repeating it changes nothing.

    Raises RunStoppedError, after everything is stored, when this step ended its run as failed.
    """
    executed = wiring().executor.execute(StepRef(run_id=run_id, number=number, attempt=attempt))
    if executed.stopped is not None:
        stopped = executed.stopped
        doubt = ", the outcome of its write is unknown" if stopped.outcome_unknown else ""
        raise RunStoppedError(f"run {run_id} stopped at step {number}: {stopped.reason}{doubt}: {stopped.error}")
