"""What a replay would do to the outside world, computed from what is recorded: the plan that a person reads first."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import takewhile

from agentq.domain.effects import ToolEffect
from agentq.domain.errors import AgentqError, InvalidInputError, RefusedError
from agentq.domain.model import DeadLetter, Decision, Event, Fence, Json, Run, Step, StepKind, StepState
from agentq.domain.resume import AddCalls, AddModelStep, Finish, OpenBatch, StillOpen, next_after

DIGEST_CHARACTERS = 16  # Hex digits: short enough to type, and nobody can make two plans that share them by chance.


class Fate(StrEnum):
    """What becomes of a step."""

    RECORDED = "recorded result used"
    READ = "runs again (read)"
    SAME_KEY = "runs again with the same key"
    NOT_CALLED = "runs, was not called before"
    DID_NOT_HAPPEN = "runs again, did not happen before"
    BLOCKED = "blocked: may have happened"
    NEW_KEY = "will happen again, with a new key"
    DECIDED_ANEW = "not copied: the model decides anew"

    @property
    def is_dangerous(self) -> bool:
        return self in (Fate.BLOCKED, Fate.NEW_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """A replay as a new run from step `from_step`; `repeat_writes` are the steps whose writes may happen again."""

    from_step: int
    repeat_writes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What is known of a run when its replay is planned.

    `calls` counts, by step, how often a write was fenced and not taken back: it may have been called as often.
    `probes` are the answers of its tools' probes, `copies` the copies that were made before, oldest first.
    `never_made` are the steps that were recorded as answered without a call: no such tool, or wrong arguments.
    """

    run: Run
    calls: Mapping[int, int] = field(default_factory=dict)
    probes: Sequence[Event] = ()
    copies: Sequence[Event] = ()
    never_made: Collection[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a plan. `tokens_again` is what a model turn spends once more, as far as that is recorded.

    `is_accepted`: a write of a run that is copied, which somebody agreed to make again.
    """

    number: int
    kind: StepKind
    tool: str | None
    effect: ToolEffect
    attempt: int
    fate: Fate
    arguments: Json = None
    tokens_again: int = 0
    may_have_happened: bool = False
    is_accepted: bool = False
    fence: Fence | None = None
    probes: tuple[Event, ...] = ()
    ruling: Decision | None = None
    ruled_by: str | None = None
    ruled_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What a replay would do, step by step, and what follows. `refusal` says why it would be refused as things are.

    `digest` changes whenever something does that the plan depends on; a replay can be bound to it.
    """

    run_id: str
    agent: str
    steps: tuple[PlannedStep, ...]
    then: str
    digest: str
    dead_letter: DeadLetter | None = None
    copying: Copying | None = None
    copies: tuple[Event, ...] = ()
    has_contradiction: bool = False
    refusal: str | None = None

    @property
    def tokens_again(self) -> int:
        return sum(step.tokens_again for step in self.steps)


def plan_replay(recorded: Recorded, *, refusal: str | None) -> ReplayPlan:
    """The plan of running the run on from where it stopped."""
    run = recorded.run
    planned = [_planned(step, _fate(step, recorded), recorded) for step in run.steps]
    undone = any(step.state is not StepState.COMPLETED for step in run.steps)
    then = "then the model's next turn, which may ask for more" if undone else ""
    match None if undone else next_after(run.steps):
        case AddModelStep(number=number):
            planned.append(_new(number, StepKind.MODEL, Fate.NOT_CALLED))
            then = "its answer, or what it asks for, follows"
        case AddCalls(first_number=first, calls=calls):
            planned += [
                _new(number, call.kind, Fate.NOT_CALLED, tool=call.tool, effect=call.effect, arguments=call.arguments)
                for number, call in enumerate(calls, first)
            ]
            then = "then the model's next turn, which may ask for more"
        case Finish():
            then = "nothing is left to do: the recorded answer completes the run"
        case None | OpenBatch() | StillOpen():
            pass
    return _plan(recorded, planned, then, refusal=refusal, copying=None)


def plan_copy(recorded: Recorded, copying: Copying, *, refusal: str | None) -> ReplayPlan:
    """The plan of a new run that begins with the results before a step."""
    run, planned = recorded.run, []
    repeated = {step.number for step in steps_of_copy(run.steps, copying)}
    for step in run.steps:
        if step.number < copying.from_step:
            fate = Fate.RECORDED
        elif is_write_to_accept(step, recorded):
            fate = Fate.NEW_KEY
        elif step.number not in repeated:
            fate = Fate.DECIDED_ANEW
        elif step.number in recorded.never_made:
            fate = Fate.RECORDED
        elif not step.effect.is_write:
            fate = _fate_of_read(step)
        else:
            fate = Fate.DID_NOT_HAPPEN if recorded.calls.get(step.number) else Fate.NOT_CALLED
        planned.append(_planned(step, fate, recorded, copying))
    then = "then the model's next turn; it may ask for the later calls again, with new keys, or for others"
    return _plan(recorded, planned, then, refusal=refusal, copying=copying)


def steps_of_copy(steps: Sequence[Step], copying: Copying) -> list[Step]:
    """The steps that the new run does again by itself: a model turn, or the rest of a turn's calls."""
    rest = [step for step in steps if step.number >= copying.from_step]
    if not rest or rest[0].kind is StepKind.MODEL:
        return rest[:1]
    return list(takewhile(lambda step: step.kind is StepKind.TOOL, rest))


def is_write_to_accept(step: Step, recorded: Recorded) -> bool:
    """The write happened, or may have: a copy that does it again does it twice."""
    if not step.effect.is_write or not recorded.calls.get(step.number):
        return False
    if step.state is StepState.COMPLETED:
        return not step.is_error  # An error result of a write says that nothing happened.
    fence = recorded.run.pending_effect
    is_in_doubt = step.may_have_happened or (fence is not None and fence.number == step.number)
    # Someone's word that it did not happen counts, unless another word is against it.
    return is_in_doubt or step.ruling is not Decision.DID_NOT_HAPPEN or recorded.run.has_contradiction


def refusal_to_copy(recorded: Recorded, copying: Copying) -> AgentqError | None:
    """Why the run can't be copied from there; None: it can."""
    run, number = recorded.run, copying.from_step
    if not run.status.is_terminal:
        return RefusedError(f"run {run.id!r} is {run.status}: it can be copied once it has ended")
    by_number = {step.number: step for step in run.steps}
    if number not in by_number:
        return InvalidInputError(f"run {run.id!r} has no step {number}; its steps are 1 to {len(run.steps)}")
    if not _begins_something(by_number[number], by_number.get(number - 1)):
        starts = [step.number for step in run.steps if _begins_something(step, by_number.get(step.number - 1))]
        near = max(start for start in starts if start < number)
        return InvalidInputError(
            f"step {number} runs together with the one before it: the turn or batch that it belongs to begins at {near}"
        )
    unrecorded = [step.number for step in run.steps if step.number < number and step.state is not StepState.COMPLETED]
    if unrecorded:
        return RefusedError(f"step {unrecorded[0]} of run {run.id!r} has no recorded result to begin with")
    return _refusal_of_writes(recorded, copying)


def _refusal_of_writes(recorded: Recorded, copying: Copying) -> AgentqError | None:
    run_id = recorded.run.id
    writes = {
        step.number: step
        for step in recorded.run.steps
        if step.number >= copying.from_step and is_write_to_accept(step, recorded)
    }
    for number in sorted(copying.repeat_writes - writes.keys()):
        return InvalidInputError(
            f"step {number} of run {run_id!r} is no write at or after step {copying.from_step} that could happen again"
        )
    left = [step for number, step in writes.items() if number not in copying.repeat_writes]
    if not left:
        return None
    named = ", ".join(f"{step.tool} (step {step.number})" for step in left)
    accept = " ".join(f"--repeat-write {step.number}" for step in left)
    return RefusedError(f"a copy from step {copying.from_step} would do again: {named}; accept each by name: {accept}")


def _begins_something(step: Step, before: Step | None) -> bool:
    if before is None or StepKind.MODEL in (step.kind, before.kind):
        return True
    return step.batch != before.batch


def _fate(step: Step, recorded: Recorded) -> Fate:
    fence = recorded.run.pending_effect
    if step.state is StepState.COMPLETED:
        return Fate.RECORDED
    if fence is not None and fence.number == step.number:
        return Fate.BLOCKED
    if not step.effect.is_write:
        return _fate_of_read(step)
    if not recorded.calls.get(step.number):
        return Fate.NOT_CALLED
    if step.effect is ToolEffect.IDEMPOTENT_WRITE:
        return Fate.SAME_KEY
    return Fate.DID_NOT_HAPPEN if step.ruling is Decision.DID_NOT_HAPPEN else Fate.BLOCKED


def _fate_of_read(step: Step) -> Fate:
    return Fate.NOT_CALLED if step.attempt == 1 and step.dispatched_at is None else Fate.READ


def _planned(step: Step, fate: Fate, recorded: Recorded, copying: Copying | None = None) -> PlannedStep:
    fence = recorded.run.pending_effect
    return PlannedStep(
        number=step.number,
        kind=step.kind,
        tool=step.tool,
        effect=step.effect,
        attempt=step.attempt,
        fate=fate,
        arguments=step.arguments,
        tokens_again=_tokens_again(step, fate, recorded.run.steps),
        may_have_happened=step.may_have_happened,
        is_accepted=fate is Fate.NEW_KEY and copying is not None and step.number in copying.repeat_writes,
        fence=fence if fence is not None and fence.number == step.number else None,
        probes=tuple(event for event in recorded.probes if event.number == step.number),
        ruling=step.ruling,
        ruled_by=step.ruled_by,
        ruled_at=step.ruled_at,
    )


def _new(
    number: int,
    kind: StepKind,
    fate: Fate,
    *,
    tool: str | None = None,
    effect: ToolEffect = ToolEffect.READ_ONLY,
    arguments: Json = None,
) -> PlannedStep:
    return PlannedStep(number=number, kind=kind, tool=tool, effect=effect, attempt=1, fate=fate, arguments=arguments)


def _tokens_again(step: Step, fate: Fate, steps: Sequence[Step]) -> int:
    """What the turn used; for one that failed, what the turn before it read and wrote, which it reads too."""
    if step.kind is not StepKind.MODEL or fate is not Fate.READ:
        return 0
    if step.usage.input_tokens or step.usage.output_tokens:
        return step.usage.input_tokens + step.usage.output_tokens
    before = [each for each in steps if each.number < step.number and each.kind is StepKind.MODEL]
    return before[-1].usage.input_tokens + before[-1].usage.output_tokens if before else 0


def _plan(
    recorded: Recorded, steps: Sequence[PlannedStep], then: str, *, refusal: str | None, copying: Copying | None
) -> ReplayPlan:
    return ReplayPlan(
        run_id=recorded.run.id,
        agent=recorded.run.agent,
        steps=tuple(steps),
        then=then,
        digest=_digest(recorded, steps, copying),
        dead_letter=recorded.run.dead_letter,
        copying=copying,
        copies=tuple(recorded.copies),
        has_contradiction=recorded.run.has_contradiction,
        refusal=refusal,
    )


def _digest(recorded: Recorded, steps: Sequence[PlannedStep], copying: Copying | None) -> str:
    """Over all that the plan was made from. Times are left out: what happened has a place of its own."""
    run = recorded.run
    told: dict[str, object] = {
        "run": [run.id, run.status, run.mode, run.cancel_requested, run.has_contradiction],
        "dead_letter": run.dead_letter and [run.dead_letter.id, run.dead_letter.outcome_unknown],
        "fence": run.pending_effect and run.pending_effect.id,
        "copying": copying and [copying.from_step, sorted(copying.repeat_writes)],
        "copies": [event.sequence for event in recorded.copies],
        "probes": [event.sequence for event in recorded.probes],
        "steps": [
            [step.number, step.state, step.attempt, step.arguments, step.result, step.is_error, step.ruling]
            for step in run.steps
        ],
        "plan": [[step.number, step.fate, step.tool, step.effect, step.may_have_happened] for step in steps],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARACTERS]
