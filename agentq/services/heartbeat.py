"""Hold leases: take one for an attempt, keep it alive while the attempt runs, give it back."""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentq.domain.errors import LeasesUnavailableError, StoreUnavailableError
from agentq.domain.model import StepRef
from agentq.ports.leases import LeaseAnswer, Leases, Tally
from agentq.ports.steps import StepStore
from agentq.ports.world import Clock

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 3  # Two beats may fail before the lease runs out.


class Lease:
    """The right to execute one attempt. `is_lost` and `is_cancel_requested` are set by the heartbeat.

    `began`: a moment of the worker's clock before anything was done under it. `comes_to_nothing` is set when there was
    nothing to do: the delivery is counted then.
    """

    def __init__(self, ref: StepRef, owner: str, *, began: float, held_until: float) -> None:
        self.ref = ref
        self.owner = owner
        self.began = began
        self.is_lost = False
        self.is_cancel_requested = False
        self.is_given_back = False
        self.held_until = held_until
        self.comes_to_nothing = False
        self._heard = (0, math.inf)  # One value: the heartbeat's thread replaces it while others read.

    def note(self, tally: Tally, *, at: float) -> None:
        """What Redis counted; `at` is a moment of the worker's clock after it answered."""
        self._heard = (tally.suppressed, at - tally.counted_seconds)

    def suppressed(self, *, run_age_seconds: float) -> int | None:
        """How many deliveries of the step came to nothing, as last heard; None when some may be missing.

        `run_age_seconds` ago the run was enqueued, as it was read under this lease: older deliveries it can't have.
        """
        suppressed, counted_from = self._heard
        return suppressed if counted_from <= self.began - run_age_seconds else None


class Heartbeat:
    """Renews every lease that this process holds, in one thread that lives while there is one."""

    def __init__(self, leases: Leases, store: StepStore, clock: Clock, lease_seconds: float) -> None:
        self._leases = leases
        self._store = store
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._held: dict[str, Lease] = {}  # By owner: after a flush two deliveries may hold one step.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def hold(self, ref: StepRef, owner: str) -> Iterator[Lease | None]:
        """The lease, or None when it can't be had: somebody is at it, or the keeper will find it.

        Raises LeasesUnavailableError when Redis is away. Whatever happens inside, the lease is given back at the end
        unless the process dies: that is what tells a death from a clean exit.
        """
        began = self._clock.elapsed_seconds()
        try:
            acquired = self._leases.acquire(ref, owner, self._lease_seconds)
        except LeasesUnavailableError:
            # It may be ours all the same: left behind, it would look like a death, and be charged as one.
            self._release(Lease(ref, owner, began=began, held_until=began))
            raise
        if acquired.answer is not LeaseAnswer.HELD:
            yield None
            return
        lease = Lease(ref, owner, began=began, held_until=began + self._lease_seconds)
        lease.note(acquired.tally, at=self._clock.elapsed_seconds())
        self._watch(lease)
        try:
            yield lease
        finally:
            with self._lock:
                self._held.pop(owner, None)
            lease.is_given_back = True
            self._release(lease, is_suppressed=lease.comes_to_nothing)

    def extend(self, lease: Lease, seconds: float) -> bool:
        """Hold on for at least `seconds` from now. False: lost, or Redis can't tell: don't begin a write."""
        try:
            return self._renew(lease, max(seconds, self._lease_seconds))
        except LeasesUnavailableError:
            return False

    def beat(self) -> bool:
        """Renew every lease held now, and look for cancels. False: none is held."""
        with self._lock:
            held = list(self._held.values())
        for lease in held:
            self._beat(lease)
        return bool(held)

    def _watch(self, lease: Lease) -> None:
        with self._lock:
            self._held[lease.owner] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat_while_held, name="agentq-heartbeat", daemon=True)
                self._thread.start()

    def _beat_while_held(self) -> None:
        while True:
            self._clock.sleep(self._lease_seconds / BEATS_PER_LEASE)
            if not self.beat() and self._may_end():
                return

    def _may_end(self) -> bool:
        with self._lock:
            if not self._held:
                self._thread = None
            return self._thread is None

    def _beat(self, lease: Lease) -> None:
        try:
            self._renew(lease, max(self._lease_seconds, lease.held_until - self._clock.elapsed_seconds()))
            if lease.ref.number:
                lease.is_cancel_requested = self._store.beat(lease.ref)
        except (LeasesUnavailableError, StoreUnavailableError) as error:
            # Neither held nor lost: the next beat will tell.
            logger.warning("missed a heartbeat run=%s step=%s: %s", lease.ref.run_id, lease.ref.number, error)
        except Exception:
            # A defect over one lease must not end the thread that keeps all of them.
            logger.exception("missed a heartbeat run=%s step=%s", lease.ref.run_id, lease.ref.number)
        if lease.is_given_back:
            # The renewal may have come behind the release, and taken again what would look like a death.
            self._release(lease)

    def _renew(self, lease: Lease, seconds: float) -> bool:
        began = self._clock.elapsed_seconds()
        tally = self._leases.renew(lease.ref, lease.owner, seconds)
        if tally is not None:
            lease.note(tally, at=self._clock.elapsed_seconds())
            lease.held_until = max(lease.held_until, began + seconds)
            return not lease.is_lost
        if not lease.is_lost:
            logger.warning("lost the lease run=%s step=%s attempt=%s", *_ids(lease.ref))
        lease.is_lost = True
        return False

    def _release(self, lease: Lease, *, is_suppressed: bool = False) -> None:
        try:
            self._leases.release(lease.ref, lease.owner, is_suppressed=is_suppressed)
        except LeasesUnavailableError as error:
            logger.warning("couldn't release run=%s step=%s attempt=%s: %s", *_ids(lease.ref), error)


def _ids(ref: StepRef) -> tuple[str, int, int]:
    return ref.run_id, ref.number, ref.attempt
