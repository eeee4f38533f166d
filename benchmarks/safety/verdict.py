"""What became of the runs and of the writes, judged by the world's log and by the system's own records."""

import math
import statistics
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.safety.kills import Kill
from benchmarks.safety.systems import End
from benchmarks.safety.world import PAY, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One system's row. The names are those of the report.

    `kills_in_write_window`: a write was committed before the signal, and its reply held until the worker was dead: no
    record of it can have been made. `duplicated`: writes beyond the first of their run. `lost`: runs that hadn't ended
    when they were given up. `unaudited`: writes that the system's records don't hold. `interrupted`: requests that a
    kill interrupted; a recovery is the time from the kill to the run's next request, or to its end.
    """

    system: str
    runs: int
    kills: int
    kills_in_write_window: int
    duplicated: int
    lost: int
    unaudited: int
    dead_letters: int
    interrupted: int
    recovery_p50_s: float | None
    recovery_p99_s: float | None


def judge(
    system: str,
    *,
    run_ids: Sequence[str],
    kills: Sequence[Kill],
    log: Sequence[Request],
    ends: Mapping[str, End],
    audited: Container[int],
) -> Verdict:
    writes = [request for request in log if request.kind == PAY]
    by_run = Counter(write.run_id for write in writes)
    interrupted = [(kill, request) for kill in kills for request in log if _was_interrupted(request, kill)]
    recoveries = sorted(
        seconds for kill, request in interrupted if (seconds := _recovery(request, kill, log, ends)) is not None
    )
    return Verdict(
        system=system,
        runs=len(run_ids),
        kills=len(kills),
        kills_in_write_window=len({kill for kill, request in interrupted if request.kind == PAY}),
        duplicated=sum(count - 1 for count in by_run.values()),
        lost=sum(run_id not in ends for run_id in run_ids),
        unaudited=sum(write.receipt not in audited for write in writes),
        dead_letters=sum(end.is_dead_letter for end in ends.values()),
        interrupted=len(interrupted),
        recovery_p50_s=round(statistics.median(recoveries), 1) if recoveries else None,
        recovery_p99_s=round(recoveries[math.ceil(0.99 * len(recoveries)) - 1], 1) if recoveries else None,
    )


def _was_interrupted(request: Request, kill: Kill) -> bool:
    is_held = request.replied_at is None or kill.dead_at < request.replied_at
    return request.pid in kill.pids and request.committed_at < kill.sent_at and is_held


def _recovery(request: Request, kill: Kill, log: Sequence[Request], ends: Mapping[str, End]) -> float | None:
    """None: the run never went on."""
    moments = [other.committed_at for other in log if other.run_id == request.run_id]
    if request.run_id in ends:
        moments.append(ends[request.run_id].at)
    later = [moment for moment in moments if moment > kill.sent_at]
    return min(later) - kill.sent_at if later else None
