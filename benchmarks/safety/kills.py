"""Kills workers whole: about every second, at random or while the world holds the reply to one of their payments."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.safety.world import PAY, REPLY_SECONDS, held_payments
from tests.support.processes import LoggedProcess, descendants, is_alive
from tests.support.waiting import eventually

INTERVAL_SECONDS = (0.75, 1.25)
AIMED_SHARE = 0.7  # Of the kills: they wait for a payment that was committed and is not replied to yet.
AIM_SECONDS_MAX = 10.0  # Then it kills whatever there is.
AIMED_AGE_SECONDS_MAX = REPLY_SECONDS[PAY] / 2  # Older ones might be replied to before the signal arrives.
READY_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.5  # How old its list of a worker's processes may be.
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A worker that was killed, with all that it had started. Seconds since the epoch: the signal's, and the moment by
    which none of them lived any more."""

    pids: frozenset[int]
    sent_at: float
    dead_at: float


Victim: TypeAlias = tuple[LoggedProcess, list[int]]  # With the pids of all that goes with it.


class Killer:
    """Kills workers of a system, and starts each again at once."""

    def __init__(self, workers: Sequence[LoggedProcess], world_url: str, chance: random.Random) -> None:
        self._workers = workers
        self._world_url = world_url
        self._chance = chance

    def kill(self, kills: int, before_each: Callable[[int], None]) -> list[Kill]:
        """`before_each` is called before each kill with its number, from 0: to bring work."""
        aimed = set(self._chance.sample(range(kills), round(kills * AIMED_SHARE)))
        done = []
        for number in range(kills):
            before_each(number)
            time.sleep(self._chance.uniform(*INTERVAL_SECONDS))
            worker, pids = (self._find_paying() if number in aimed else None) or self._find_any()
            done.append(kill_whole(worker, pids))
            worker.start()
        return done

    def revive(self) -> None:
        """What died by itself is started again, as a supervisor would."""
        for worker in self._workers:
            if not worker.is_running:
                worker.start()

    def _ready(self) -> list[LoggedProcess]:
        self.revive()
        return [worker for worker in self._workers if worker.is_ready]

    def _find_any(self) -> Victim:
        ready = eventually(self._ready, seconds=READY_SECONDS_MAX, what="a worker is ready")
        worker = self._chance.choice(ready)
        return worker, tree(worker)

    def _find_paying(self) -> Victim | None:
        """One that asked for a payment which the world has just committed; None: there is none for a while."""
        gives_up_at = time.monotonic() + AIM_SECONDS_MAX
        while time.monotonic() < gives_up_at:
            victims = [(worker, tree(worker)) for worker in self._ready()]
            looks_again_at = time.monotonic() + LOOK_SECONDS
            while victims and time.monotonic() < looks_again_at:
                paying = {pid for pid, age in held_payments(self._world_url) if age < AIMED_AGE_SECONDS_MAX}
                if found := [victim for victim in victims if paying.intersection(victim[1])]:
                    return self._chance.choice(found)
                time.sleep(POLL_SECONDS)
            time.sleep(POLL_SECONDS)
        return None


def kill_whole(worker: LoggedProcess, pids: Iterable[int] | None = None) -> Kill:
    """As when the machine goes: its process group at once, then what else it is known to have started."""
    known = frozenset(tree(worker) if pids is None else pids)
    sent_at = time.time()
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    for pid in known:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    worker.wait()
    eventually(lambda: not any(is_alive(pid) for pid in known), what="a killed worker is gone")
    return Kill(pids=known, sent_at=sent_at, dead_at=time.time())


def tree(worker: LoggedProcess) -> list[int]:
    """The worker and all that it started."""
    return [worker.pid, *descendants(worker.pid)]
