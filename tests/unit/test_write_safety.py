"""The verdict and the picture of `benchmarks.write_safety`: whoever counts wrongly praises the wrong system."""

from dataclasses import replace
from xml.etree import ElementTree

from benchmarks.safety.kills import Kill
from benchmarks.safety.picture import COLUMNS, draw
from benchmarks.safety.systems import End
from benchmarks.safety.verdict import Verdict, judge
from benchmarks.safety.world import LOOK, LOOK_AGAIN, PAY, Request

KILL = Kill(pids=frozenset({7, 8}), sent_at=100.0, dead_at=100.02)


def request(receipt: int, run_id: str, kind: str, at: float, *, pid: int = 1, held_seconds: float = 0.01) -> Request:
    return Request(
        receipt=receipt,
        run_id=run_id,
        kind=kind,
        pid=pid,
        step=None,
        attempt=None,
        committed_at=at,
        replied_at=at + held_seconds,
    )


def verdict(log: list[Request], ends: dict[str, End], audited: set[int], *, runs: int = 1) -> Verdict:
    run_ids = [f"run-{number}" for number in range(1, runs + 1)]
    return judge("it", run_ids=run_ids, kills=[KILL], log=log, ends=ends, audited=audited)


def test_a_write_done_again_is_counted_as_duplicated_and_the_first_as_unaudited() -> None:
    """The receiver's log decides, not what the system believes it did."""
    log = [
        request(1, "run-1", LOOK, 99.0),
        request(2, "run-1", PAY, 99.95, pid=7, held_seconds=0.15),
        request(3, "run-1", PAY, 102.0),
        request(4, "run-1", LOOK_AGAIN, 103.0),
    ]
    found = verdict(log, {"run-1": End(at=103.1, is_dead_letter=False)}, {3})
    assert (found.duplicated, found.unaudited, found.lost, found.dead_letters) == (1, 1, 0, 0)
    assert (found.kills_in_write_window, found.interrupted) == (1, 1)
    assert (found.recovery_p50_s, found.recovery_p99_s) == (2.0, 2.0)


def test_a_run_that_stops_for_a_person_has_recovered_and_is_not_lost() -> None:
    """Shown is the outcome that was promised; its time counts like any other."""
    log = [request(1, "run-1", PAY, 99.95, pid=8, held_seconds=0.15)]
    found = verdict(log, {"run-1": End(at=132.0, is_dead_letter=True)}, {1})
    assert (found.duplicated, found.unaudited, found.lost, found.dead_letters) == (0, 0, 0, 1)
    assert found.recovery_p50_s == 32.0


def test_a_run_that_never_goes_on_is_lost_and_has_no_recovery_time() -> None:
    """A system that loses what is hard would otherwise look quick."""
    found = verdict([request(1, "run-1", PAY, 99.95, pid=7, held_seconds=0.15)], {}, set(), runs=2)
    assert (found.lost, found.interrupted, found.recovery_p50_s, found.recovery_p99_s) == (2, 1, None, None)


def test_only_a_write_of_the_killed_worker_that_was_held_until_it_was_dead_counts_as_hit() -> None:
    """A kill a moment too late or of the other worker proves nothing."""
    log = [
        request(1, "run-1", PAY, 99.86, pid=7, held_seconds=0.15),  # Replied to while the worker was dying.
        request(2, "run-2", PAY, 99.95, pid=1, held_seconds=0.15),
        request(3, "run-3", PAY, 100.001, pid=7, held_seconds=0.15),
        request(4, "run-4", LOOK, 99.99, pid=7, held_seconds=0.15),
    ]
    found = verdict(log, {}, {1, 2, 3})
    assert (found.kills_in_write_window, found.interrupted) == (0, 1)


def test_the_picture_shows_every_count_of_every_system() -> None:
    """It is the one part that everybody looks at."""
    first = verdict([request(1, "run-1", PAY, 99.0)], {}, set())
    drawn = ElementTree.fromstring(draw([first, replace(first, system="another", duplicated=41)]))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"it", "another", "41"} <= set(texts)
    assert {label for _, label, _ in COLUMNS} <= set(texts)
