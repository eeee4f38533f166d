"""Delete old runs for good: batch by batch, beside everything else that goes on."""

from collections.abc import Iterator
from datetime import timedelta

from agentq.domain.errors import InvalidInputError
from agentq.ports.purging import PurgedBatch, PurgeStore
from agentq.ports.world import Clock

BATCH_RUNS = 200  # Runs of one transaction: tens of milliseconds.
BATCH_RUNS_MAX = 5000
AGE_MIN = timedelta(hours=1)  # For so long a late outcome may still set a run going again.
AGE_MAX = timedelta(days=36_500)  # Of what comes before, the databases have no time.
# Others that wait to write look again after a tenth of a second at the latest, and must find room then.
REST_SECONDS_MIN = 0.15


def purge(
    store: PurgeStore,
    *,
    older_than: timedelta,
    visibility_timeout: timedelta,
    clock: Clock,
    actor: str,
    batch_runs: int = BATCH_RUNS,
    with_contradictions: bool = False,
    is_rehearsal: bool = False,
) -> Iterator[PurgedBatch]:
    """Delete every run that finished longer ago than that, oldest first; yields what became of each batch.

    Each batch is one transaction of whole runs: broken off anywhere, the same call again goes on with the rest. Raises
    InvalidInputError, before anything is deleted.
    """
    age_min = max(AGE_MIN, 2 * visibility_timeout)
    if older_than < age_min:
        raise InvalidInputError(
            f"older_than is {_words(older_than)}; it takes {_words(age_min)} or more: in less, a request that is "
            "delivered again would find its key forgotten and start a second run"
        )
    if older_than > AGE_MAX:
        raise InvalidInputError(
            f"older_than is {older_than.days} d; it takes {AGE_MAX.days} d or less: no run is that old"
        )
    if not 0 < batch_runs <= BATCH_RUNS_MAX:
        raise InvalidInputError(f"batch is {batch_runs}; it takes a whole number from 1 to {BATCH_RUNS_MAX}")
    return _batches(
        store,
        older_than=older_than,
        clock=clock,
        actor=actor,
        batch_runs=batch_runs,
        with_contradictions=with_contradictions,
        is_rehearsal=is_rehearsal,
    )


def _batches(
    store: PurgeStore,
    *,
    older_than: timedelta,
    clock: Clock,
    actor: str,
    batch_runs: int,
    with_contradictions: bool,
    is_rehearsal: bool,
) -> Iterator[PurgedBatch]:
    finished_before = store.time_before(older_than)
    place = None
    while True:
        began = clock.elapsed_seconds()
        batch = store.purge(
            finished_before=finished_before,
            after=place,
            runs_max=batch_runs,
            with_contradictions=with_contradictions,
            actor=actor,
            is_rehearsal=is_rehearsal,
        )
        took_seconds = clock.elapsed_seconds() - began
        yield batch
        place = batch.place
        if place is None:
            return
        if store.excludes_writers and batch.run_ids and not is_rehearsal:
            clock.sleep(max(took_seconds, REST_SECONDS_MIN))


def _words(age: timedelta) -> str:
    """As it is written: `2h`."""
    seconds = age.total_seconds()
    unit, size = next((each for each in (("h", 3600), ("m", 60)) if seconds and seconds % each[1] == 0), ("s", 1))
    return f"{seconds / size:g}{unit}"
