"""Notice soon that a pool's child died: Celery looks for it every five seconds only."""

from typing import Any

from celery import bootsteps

LOOK_SECONDS = 0.5


class ChildWatch(bootsteps.StartStopStep):
    """A step of a prefork worker. What a dead child was doing is reported within a second or so: a person, and a step
    that may run again, wait for that."""

    requires = ("celery.worker.components:Pool",)

    def include_if(self, worker: Any) -> bool:
        return bool(worker.pool_cls.__module__ == "celery.concurrency.prefork")

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        # Called again after each reconnect, which cancels timers.
        hub.call_repeatedly(LOOK_SECONDS, worker.pool.maintain_pool)
