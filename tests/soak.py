"""Every cell of the crash matrix, and every sequence of two faults over one write: `python -m tests.soak --minutes 60`.

Ends with a line that sums it up, and exit code 1 when anything was broken.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.crash_cells import Cell
from tests.support.crash_matrix import QUICK, CrashMatrix, Result, all_cells, all_sequences
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.system import System

DATABASES = ("sqlite", "postgresql")


def main() -> int:
    arguments = _parser().parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    _say(f"seed {seed}, {arguments.minutes:g} minutes")
    began = time.monotonic()
    seconds = arguments.minutes * 60 / len(arguments.database)
    results: list[Result] = []
    broken: list[str] = []
    count = 0
    for place, name in enumerate(arguments.database, 1):
        its_count, its_results, its_broken = _soak(name, arguments, seed, ends_at=began + place * seconds)
        count, results, broken = count + its_count, results + its_results, broken + its_broken
    for sentence in broken:
        _say(sentence)
    took = (time.monotonic() - began) / 60
    fired = sum(result.fired for result in results)
    _say(
        f"{'BROKEN' if broken else 'held'}: {len(results)} of {count} cells in {took:.1f} minutes, {fired} faults, "
        f"{len(broken)} broken; seed {seed}"
    )
    return 1 if broken else 0


def _soak(
    database: str, arguments: argparse.Namespace, seed: int, *, ends_at: float
) -> tuple[int, list[Result], list[str]]:
    folder = Path(tempfile.mkdtemp(prefix="agentq-soak-"))
    its_database = fresh_postgresql() if database == "postgresql" else fresh_sqlite(folder)
    with its_database as url, System(folder, url, **QUICK) as system:
        matrix = CrashMatrix(system)
        matrix.start()
        try:
            points = matrix.points()
        except AssertionError as error:
            return 0, [], [f"{database}, before anything else fails: {error}"]
        sequences = [] if arguments.without_sequences else all_sequences()
        cells = _chosen([*all_cells(points), *sequences], arguments.only, seed)
        _say(f"{database}: {len(cells)} cells")
        results = matrix.run(cells[: arguments.limit], ends_at=ends_at)
        _tell(database, results)
        broken = [f"{database}, {sentence}" for sentence in matrix.check(results)]
    if broken:
        _say(f"{database}: plans, traces and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return len(cells), results, broken


def _chosen(cells: Sequence[Cell], only: str, seed: int) -> list[Cell]:
    """In an order of their own each time, so that a short soak is no part of every other one."""
    chosen = [cell for cell in cells if only in str(cell)]
    random.Random(seed).shuffle(chosen)
    return sorted(chosen, key=lambda cell: cell.is_exclusive)


def _tell(database: str, results: Sequence[Result]) -> None:
    seconds = sorted(result.seconds for result in results)
    if seconds:
        _say(
            f"{database}: {len(results)} cells, median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s"
        )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0, help="no new cell is begun after that time")
    parser.add_argument("--seed", type=int, help="the order of the cells; printed when it is not given")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose description holds this")
    parser.add_argument("--without-sequences", action="store_true", help="one fault at each point, and no more")
    parser.add_argument("--limit", type=int, help="at most so many cells of each database")
    parser.add_argument("--database", nargs="+", choices=DATABASES, default=DATABASES)
    return parser


if __name__ == "__main__":
    sys.exit(main())
