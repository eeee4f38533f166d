"""What a crash does to a write: workers are killed over and over, then the outside world's log is read.

The same work on several systems, one after the other: runs of a read, a plain write and a read, on two workers of which
one is killed about every second, many times between the world's commit of a write and its record, and started again.
Run it from the project's folder: `python -m benchmarks.write_safety [--systems agentq,celery] [--runs 2000]
[--kills 25] [--json] [--svg FILE]`. Its servers and files are its own and are gone afterwards.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType

from benchmarks.safety import with_absurd, with_agentq, with_celery, with_dbos
from benchmarks.safety.feed import Feeder
from benchmarks.safety.kills import Killer
from benchmarks.safety.picture import draw
from benchmarks.safety.systems import End, Place, System, Unavailable
from benchmarks.safety.verdict import Verdict, judge
from benchmarks.safety.world import PAY, read_log
from tests.support.processes import LoggedProcess
from tests.support.waiting import eventually
from tests.support.workers import PROJECT

SYSTEMS: dict[str, Callable[[Place], AbstractContextManager[System]]] = {
    "agentq": with_agentq.running,
    "agentq_probe": partial(with_agentq.running, with_probe=True),
    "dbos": with_dbos.running,
    "absurd": with_absurd.running,
    "celery": with_celery.running,
}
POLL_SECONDS = 0.5
MARKDOWN_COLUMNS = {
    "system": "system",
    "kills_in_write_window": "kills over a write",
    "duplicated": "writes done twice",
    "unaudited": "writes without a record",
    "lost": "runs lost or stuck",
    "dead_letters": "runs shown to a person",
    "recovery_p50_s": "recovery, median",
    "recovery_p99_s": "recovery, p99",
}


def main() -> int:
    """Print the table in Markdown, or a JSON list."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    verdicts = [verdict for name in arguments.systems if (verdict := _measure(name, arguments)) is not None]
    if arguments.svg and verdicts:
        arguments.svg.write_text(draw(verdicts))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(verdict) for verdict in verdicts]) + "\n")
    else:
        sys.stdout.write(_markdown(verdicts))
    return 0 if verdicts else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=_systems, default=list(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--runs", type=_count, default=2000)
    parser.add_argument("--kills", type=_count, default=25)
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the victims")
    parser.add_argument(
        "--give-up-seconds",
        type=float,
        default=600.0,
        help="since the last kill and new run: what hasn't ended by then is lost",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of workers and world there")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _systems(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"unknown system {unknown[0]!r}; choose of {','.join(SYSTEMS)}")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # So that everything that was started is ended.


def _measure(name: str, arguments: argparse.Namespace) -> Verdict | None:
    """None: the system can't be measured here, and the person was told why."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentq-safety-")))
        if arguments.keep:
            kept = arguments.keep / name
            stack.callback(shutil.copytree, folder, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
        world_log = folder / "world.db"
        place = Place(folder=folder, world_url=stack.enter_context(_world(world_log)), stack=stack)
        try:
            system = stack.enter_context(SYSTEMS[name](place))
        except Unavailable as reason:
            _say(f"{name}: skipped, because {reason}")
            return None
        run_ids = [f"run-{number:05}" for number in range(arguments.runs)]
        killer = Killer(system.workers, place.world_url, random.Random(arguments.seed))
        for worker in system.workers:
            worker.wait_ready(seconds=60)
        _say(f"{name}: {len(run_ids)} runs, {arguments.kills} kills")
        feeder = Feeder(run_ids, system.enqueue, place.world_url)
        with feeder.feeding():
            kills = killer.kill(arguments.kills, lambda number: feeder.allow(len(run_ids[number :: arguments.kills])))
            _say(f"{name}: killed {len(kills)} in {kills[-1].dead_at - kills[0].sent_at:.0f} s")
            ends = _wait_for_ends(system, killer, feeder, len(run_ids), arguments.give_up_seconds)
        log = read_log(world_log)
        audited = system.audited([request for request in log if request.kind == PAY])
        verdict = judge(name, run_ids=run_ids, kills=kills, log=log, ends=ends, audited=audited)
        _say(f"{name}: {asdict(verdict)}")
        return verdict


@contextmanager
def _world(path: Path) -> Iterator[str]:
    output = path.with_suffix(".log")
    world = LoggedProcess(
        (sys.executable, "-m", "benchmarks.safety.world", str(path)),
        log_path=output,
        environ={**os.environ, "PYTHONPATH": str(PROJECT)},
        ready_text="http://",
    )
    world.start()
    try:
        world.wait_ready()
        yield eventually(lambda: next(iter(world.log().splitlines(keepends=False)), ""), what="the world's URL").strip()
    finally:
        world.stop()


def _wait_for_ends(system: System, killer: Killer, feeder: Feeder, runs: int, seconds: float) -> dict[str, End]:
    """All of them, or those that there are when the others are given up."""
    gives_up_at = time.monotonic() + seconds
    while len(ends := system.ends()) < runs and time.monotonic() < gives_up_at:
        killer.revive()
        if not feeder.is_done:
            gives_up_at = time.monotonic() + seconds
        time.sleep(POLL_SECONDS)
    return ends


def _markdown(verdicts: Sequence[Verdict]) -> str:
    rows = [list(MARKDOWN_COLUMNS.values()), ["---"] * len(MARKDOWN_COLUMNS)]
    for verdict in verdicts:
        rows.append([_shown(name, getattr(verdict, name)) for name in MARKDOWN_COLUMNS])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    return f"{value} s" if name.endswith("_s") else str(value)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    raise SystemExit(main())
