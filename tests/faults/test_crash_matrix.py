"""The crash matrix: whatever fails before or after any call, no run is lost, no plain write is made twice, and nothing
unknown is hidden."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cells import Kind
from tests.support.crash_matrix import QUICK, CrashMatrix, all_cells, every_nth
from tests.support.crash_points import (
    FAULTY_PORTS,
    NOT_PASSED,
    OTHER_PORTS,
    REMEMBERED,
    Point,
    all_calls,
    protocols_of_ports,
)
from tests.support.databases import fresh_postgresql, fresh_sqlite
from tests.support.system import System

# One part of the matrix, the same each time, so that a change is judged by what it changed; another seed takes another
# part. All of it: python -m tests.soak.
SEED = int(os.environ.get("MATRIX_SEED", "1"))
CELLS = int(os.environ.get("MATRIX_CELLS", "32"))  # Of each database.
EXCLUSIVE_CELLS = 1  # It takes a worker with all its children, so that nothing else may be under way.
SECONDS_MAX = 25.0  # Of each database; what isn't begun by then is left out.

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashMatrix]:
    folder: Path = tmp_path_factory.mktemp("matrix")
    database = fresh_postgresql() if request.param == "postgresql" else fresh_sqlite(folder)
    with database as url, System(folder, url, **QUICK) as system:
        matrix = CrashMatrix(system)
        matrix.start()
        yield matrix


@pytest.fixture(scope="module")
def points(matrix: CrashMatrix) -> dict[Kind, list[Point]]:
    return matrix.points()


def test_every_port_is_in_the_matrix_or_has_a_reason_not_to_be() -> None:
    """A new port is a new way to fail."""
    faulty = {protocol.__name__ for protocol, _ in FAULTY_PORTS.values()}
    assert protocols_of_ports() - faulty - OTHER_PORTS.keys() == set()


def test_every_call_of_a_port_is_passed_by_some_step(points: dict[Kind, list[Point]]) -> None:
    """A call at which nothing ever fails is one that nobody tried."""
    passed = {(point.call, point.is_after) for its in points.values() for point in its}
    wanted = {(call, is_after) for call in all_calls() for is_after in (False, True)}
    missed = {call for call, _ in wanted - passed}
    assert missed - NOT_PASSED.keys() - set(REMEMBERED) == set()
    assert missed >= NOT_PASSED.keys(), "passed after all: take them off the list"


def test_whatever_fails_anywhere_the_others_recover(
    matrix: CrashMatrix, points: dict[Kind, list[Point]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes are killed, stopped past their deadlines, and cut off, each at a point of its own."""
    cells = all_cells(points)
    chosen = [
        *every_nth([cell for cell in cells if not cell.is_exclusive], CELLS, SEED),
        *every_nth([cell for cell in cells if cell.is_exclusive], EXCLUSIVE_CELLS, SEED),
    ]
    results = matrix.run(chosen, ends_at=time.monotonic() + SECONDS_MAX)
    with capsys.disabled():
        print(f" [{len(results)} of {len(cells)} cells, MATRIX_SEED={SEED}]", end="")  # noqa: T201 - what was tried
    assert results
    broken = matrix.check(results)
    assert not broken, f"MATRIX_SEED={SEED}\n" + "\n".join(broken)
