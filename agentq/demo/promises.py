"""What the demo promises to show, checked against what it saw."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentq.domain.model import DeadLetter, DeadLetterReason, Run, RunStatus, Step, StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of a demo. `refund_requests` counts what the payment service was asked for, by order.

    `reads_interrupted` are the reads that the killed worker was executing, `interrupted` its refund, which the dead
    letter is about; `runs` is how all ended, `dead_letters` who stopped on the way. `reads_expected` False: the model
    decides what is read when, so that the killed worker may have had no read.
    """

    runs: Sequence[Run]
    dead_letters: Sequence[DeadLetter]
    interrupted: Step
    reads_interrupted: Sequence[Step]
    reads_expected: bool
    resolved: int
    refund_requests: Mapping[str, int]
    recovery_seconds: float

    @property
    def completed(self) -> int:
        return sum(run.status is RunStatus.COMPLETED for run in self.runs)

    @property
    def duplicate_refunds(self) -> int:
        return sum(count - 1 for count in self.refund_requests.values())

    def summary(self) -> dict[str, int | float]:
        """What `--json` prints."""
        return {
            "runs": len(self.runs),
            "completed": self.completed,
            "dead_lettered": len(self.dead_letters),
            "resolved": self.resolved,
            "refund_requests": sum(self.refund_requests.values()),
            "duplicate_refunds": self.duplicate_refunds,
            "recovery_seconds": round(self.recovery_seconds, 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One sentence, and whether it came true."""

    text: str
    is_kept: bool


def promises(seen: Seen) -> list[Promise]:
    """Each promise, in the order in which a person reads them."""
    found = [
        (
            f"every run came to its answer: {seen.completed} of {len(seen.runs)}",
            seen.completed == len(seen.runs),
        ),
        (
            f"the payment service saw each refund one time: {_counts(seen.refund_requests)}",
            seen.duplicate_refunds == 0 and dict(seen.refund_requests) == _refunds_recorded(seen),
        ),
        (
            "the interrupted refund, and nothing else, was dead-lettered: its outcome was unknown",
            [(letter.run_id, letter.number) for letter in seen.dead_letters]
            == [(seen.interrupted.run_id, seen.interrupted.number)]
            and all(_is_unknown(letter) for letter in seen.dead_letters),
        ),
        (
            f"the killed worker's reads were taken up again: {len(seen.reads_interrupted)}",
            bool(seen.reads_interrupted or not seen.reads_expected)
            and all(_was_repeated(seen, step) for step in seen.reads_interrupted),
        ),
        (
            "the resolved refund's result was used, and its call not made again",
            seen.resolved == 1 and _result_was_used(seen),
        ),
    ]
    return [Promise(text=text, is_kept=is_kept) for text, is_kept in found]


def _is_unknown(letter: DeadLetter) -> bool:
    return letter.outcome_unknown and letter.reason is DeadLetterReason.NOT_RETRYABLE


def _was_repeated(seen: Seen, before: Step) -> bool:
    after = _now(seen, before)
    return after is not None and after.state is StepState.COMPLETED and after.attempt > before.attempt


def _result_was_used(seen: Seen) -> bool:
    after = _now(seen, seen.interrupted)
    return after is not None and after.state is StepState.COMPLETED and isinstance(after.result, dict)


def _refunds_recorded(seen: Seen) -> dict[str, int]:
    """By order: what the runs hold as done."""
    steps = (step for run in seen.runs for step in run.steps if step.tool == "refund_order" and not step.is_error)
    return dict(Counter(str(step.result["order_id"]) for step in steps if isinstance(step.result, dict)))


def _now(seen: Seen, before: Step) -> Step | None:
    steps = (step for run in seen.runs for step in run.steps)
    return next((step for step in steps if (step.run_id, step.number) == (before.run_id, before.number)), None)


def _counts(requests: Mapping[str, int]) -> str:
    return ", ".join(f"order {order} {count}x" for order, count in sorted(requests.items())) or "none"
