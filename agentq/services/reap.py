"""Find steps and fences that nobody holds any more: publish again, requeue, or dead-letter."""

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from agentq.domain.errors import BrokerUnavailableError, LeasesUnavailableError, StoreUnavailableError
from agentq.domain.model import Charge, Fence, StepKind, StepRef
from agentq.domain.outcomes import Retried, Stopped
from agentq.domain.retry import RetryPolicy
from agentq.ports.dispatch import Dispatcher, Wakeup
from agentq.ports.keeping import InFlight, KeeperStore
from agentq.ports.leases import DeathNote, Leases, LeaseSurvey, LeaseView
from agentq.ports.steps import Settled, Settlement, StepStore, Verdict
from agentq.services.probe import unknown

logger = logging.getLogger(__name__)

BATCH_MAX = 500
REPUBLISH_SECONDS_MIN = 2.0  # A message on its way from commit to queue, or from queue to lease, is not lost.
GRACE_SECONDS = 30.0  # Doubled with each republish: a message may wait long in a full queue.
GRACE_DOUBLINGS_MAX = 7
SURVEY_SECONDS_MAX = 1.0  # From the reading of a batch to its survey: by so much its runs may be older.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What one pass did."""

    republished: int = 0
    requeued: int = 0
    stopped: int = 0


class Republish:
    """The step's message is lost, or will be found a duplicate."""


class AskProbe:
    """Whoever made the call is gone: its tool's probe is asked what became of it."""


@dataclass(slots=True, kw_only=True)
class Reaper:
    """Judges by what it read; every write checks again, under the run's lock, that attempt and fence are the same."""

    keeping: KeeperStore
    steps: StepStore
    leases: Leases
    dispatcher: Dispatcher
    policy: RetryPolicy
    probes_max: int

    def reap(self) -> Reaped:
        """One pass over everything in flight and every run that stands still."""
        total = Reaped()
        is_drained = self.dispatcher.is_drained()
        for batch in self._batches():
            survey = self.leases.survey([step.wakeup.ref for step in batch])
            if not survey.is_trustworthy:
                return total
            total = _sum(total, self._act(batch, survey, is_drained=is_drained))
        self._resume_orphans()
        self._fail_lost_callers()
        return total

    def bury(self, notes: Sequence[DeathNote]) -> None:
        """Pool children died, their parents say: act on what they held at once."""
        for note in notes:
            self.leases.bury(note.ref, note.process)
            before = replace(note.ref, number=note.ref.number - 1)
            for step in self.keeping.in_flight(after=before, limit=1):
                if step.wakeup.ref == note.ref:
                    self._act([step], self.leases.survey([note.ref]), is_drained=False, dead_process=note.process)

    def _batches(self) -> Iterator[list[InFlight]]:
        after: StepRef | None = None
        while batch := self.keeping.in_flight(after=after, limit=BATCH_MAX):
            yield batch
            after = batch[-1].wakeup.ref

    def _act(
        self, judged: Sequence[InFlight], survey: LeaseSurvey, *, is_drained: bool, dead_process: str | None = None
    ) -> Reaped:
        lost: list[InFlight] = []
        requeued = stopped = 0
        wakeups: list[Wakeup] = []
        for step, view in zip(judged, survey.views, strict=True):
            change = judge(
                step,
                view,
                self.policy,
                is_drained=is_drained,
                dead_process=dead_process,
                probes_max=self.probes_max,
            )
            if change is None:
                continue
            if isinstance(change, AskProbe):
                wakeups.extend(self._ask_probe(step))
                continue
            if isinstance(change, Republish):
                lost.append(step)
                continue
            settled = self._settle(step, change, view, counted_seconds=survey.counted_seconds)
            if settled is not None and settled.verdict is Verdict.APPLIED:
                requeued += isinstance(change, Retried)
                stopped += isinstance(change, Stopped)
                wakeups.extend(settled.wakeups)
                logger.warning("reaped run=%s step=%s attempt=%s: %s", *_ids(step.wakeup.ref), change.error)
        if wakeups or lost:
            self.dispatcher.publish([*wakeups, *(step.wakeup for step in lost)])
        # Only then: marked first, a message that never got there would be waited for once more, and longer.
        republished = self.keeping.mark_republished([step.wakeup.ref for step in lost])
        return Reaped(republished=len(republished), requeued=requeued, stopped=stopped)

    def _ask_probe(self, step: InFlight) -> list[Wakeup]:
        """Let the attempt start again, as a question: its fence stands, so nobody makes its call."""
        assert step.fence is not None
        ref = step.wakeup.ref
        with _apart(ref.run_id):
            wakeup = self.keeping.ask_probe(ref, step.fence.id) if self.leases.unmark(ref) else None
            if wakeup is not None:
                logger.info("asking the probe of %s run=%s step=%s attempt=%s", step.fence.tool, *_ids(ref))
                return [wakeup]
        return []

    def _settle(
        self, step: InFlight, change: Retried | Stopped, view: LeaseView, *, counted_seconds: float
    ) -> Settled | None:
        has_died = view.started_attempt == step.wakeup.ref.attempt
        settlement = Settlement(
            ref=step.wakeup.ref,
            owner=f"keeper/{uuid.uuid4().hex}",
            effect=step.wakeup.effect,
            change=change,
            fence_id=step.fence.id if step.fence else None,
            suppressed=view.suppressed if counted_seconds >= step.run_age_seconds + SURVEY_SECONDS_MAX else None,
            held_by=view.started_by if has_died else None,
            held_seconds=view.started_seconds if has_died else None,
        )
        with _apart(step.wakeup.ref.run_id):
            return self.steps.settle(settlement)
        return None

    def _resume_orphans(self) -> None:
        for run_id in self.keeping.runs_without_open_step(BATCH_MAX):
            with _apart(run_id):
                wakeups = self.keeping.resume(run_id)
                logger.warning("computed anew what comes next in run=%s", run_id)
                if wakeups:
                    self.dispatcher.publish(wakeups)

    def _fail_lost_callers(self) -> None:
        open_runs = self.keeping.interactive_runs()
        if not open_runs:
            return
        survey = self.leases.survey([session_ref(ref.run_id) for ref, _, _ in open_runs])
        if not survey.is_trustworthy:
            return
        for (ref, fence, is_past_deadline), view in zip(open_runs, survey.views, strict=True):
            if view.owner is None and (fence is None or is_past_deadline):
                with _apart(ref.run_id):
                    self.keeping.fail_interactive(ref.run_id, error="the process that drove this run is gone")


def session_ref(run_id: str) -> StepRef:
    """What the caller of an interactive run holds a lease on for as long as it drives the run: no step has number 0."""
    return StepRef(run_id=run_id, number=0, attempt=1)


def judge(
    step: InFlight,
    view: LeaseView,
    policy: RetryPolicy,
    *,
    is_drained: bool,
    probes_max: int,
    dead_process: str | None = None,
) -> Retried | Stopped | Republish | AskProbe | None:
    """What to do about a step in flight; None: wait.

    `dead_process`: a parent saw this process die, so a write that it was calling is shown as unknown at once.
    """
    attempt = step.wakeup.ref.attempt
    if view.owner is not None or (view.started_attempt or 0) > attempt:
        return None  # Somebody holds it, or what was read is old.
    has_died = view.started_attempt == attempt
    if step.fence is not None:
        if _is_for_probe(step.fence, is_cancelled=step.is_cancelled):
            return _judge_question(step, has_died=has_died, is_drained=is_drained, probes_max=probes_max)
        return _judge_fence(step, policy, has_died=has_died, dead_process=dead_process)
    if has_died and step.wakeup.kind is StepKind.MODEL and not step.wakeup.is_isolated:
        # Whether it was this step that killed the process, or one of those beside it, shows when it runs alone.
        error = "a process that it may have shared with others died: it runs next alone"
        return Retried(charge=Charge.NOTHING, error=error, is_isolated=True)
    if has_died:
        return policy.after_crash(step.crashes)
    return _judge_message(step, is_drained=is_drained)


def _judge_message(step: InFlight, *, is_drained: bool) -> Republish | None:
    """Its message waits in a queue, or nobody has it any more."""
    grace_seconds = GRACE_SECONDS * 2 ** min(step.republished, GRACE_DOUBLINGS_MAX)
    if step.dispatched_seconds > (REPUBLISH_SECONDS_MIN if is_drained else grace_seconds):
        return Republish()
    return None


def _is_for_probe(fence: Fence, *, is_cancelled: bool) -> bool:
    return fence.has_probe and (fence.effect.is_plain_write or is_cancelled)


def _judge_question(
    step: InFlight, *, has_died: bool, is_drained: bool, probes_max: int
) -> Stopped | Republish | AskProbe | None:
    """Who made the call, or asked its probe, left or died."""
    fence = step.fence
    assert fence is not None
    if not has_died:
        return _judge_message(step, is_drained=is_drained)
    if fence.probes < probes_max:
        return AskProbe()
    return unknown(fence, None) if step.fence_is_past_deadline else None


def _judge_fence(
    step: InFlight, policy: RetryPolicy, *, has_died: bool, dead_process: str | None
) -> Retried | Stopped | None:
    fence = step.fence
    assert fence is not None
    if not fence.is_callable:
        error = "its fence stands over a call that could not be made"
        return Retried(charge=Charge.NOTHING, error=error) if step.fence_is_past_deadline else None
    if fence.effect.is_plain_write or step.is_cancelled:
        was_seen_dying = dead_process is not None and fence.owner.startswith(dead_process)
        return unknown(fence, None) if step.fence_is_past_deadline or was_seen_dying else None
    return policy.after_crash(step.crashes, is_charged=has_died) if step.fence_is_settled else None


@contextmanager
def _apart(run_id: str) -> Iterator[None]:
    """A run that can't be changed must not keep the others waiting; it is tried again at the next pass."""
    try:
        yield
    except (StoreUnavailableError, LeasesUnavailableError, BrokerUnavailableError):
        raise  # No other run could be changed either.
    except Exception:
        logger.exception("couldn't reap run=%s", run_id)


def _sum(first: Reaped, second: Reaped) -> Reaped:
    return Reaped(
        republished=first.republished + second.republished,
        requeued=first.requeued + second.requeued,
        stopped=first.stopped + second.stopped,
    )


def _ids(ref: StepRef) -> tuple[str, int, int]:
    return ref.run_id, ref.number, ref.attempt
