"""The plan of a replay as a table: what is recorded of a step, and what becomes of it."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentq.domain.effects import ToolEffect
from agentq.domain.errors import InvalidInputError, RefusedError
from agentq.domain.model import (
    Decision,
    Event,
    Fence,
    Run,
    RunMode,
    RunStatus,
    Step,
    StepKind,
    StepState,
    Usage,
)
from agentq.domain.replay import Copying, Fate, Recorded, plan_copy, plan_replay, refusal_to_copy

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
READ, KEYED, PLAIN = ToolEffect.READ_ONLY, ToolEffect.IDEMPOTENT_WRITE, ToolEffect.NON_IDEMPOTENT_WRITE
DONE, DEAD, CLOSED = StepState.COMPLETED, StepState.DEAD_LETTERED, StepState.CLOSED


def turn(number: int, state: StepState = DONE, **values: Any) -> Step:
    result = {"role": "assistant", "content": "done"} if state is DONE else None
    return Step(**{"kind": StepKind.MODEL, **common(number, state), "result": result, **values})


def call(number: int, state: StepState = DONE, effect: ToolEffect = READ, **values: Any) -> Step:
    return Step(
        **{
            "kind": StepKind.TOOL,
            **common(number, state),
            "tool": "pay" if effect.is_write else "look",
            "effect": effect,
            "batch": number,
            "arguments": {"order": number},
            "result": "ok" if state is DONE else None,
            **values,
        }
    )


def common(number: int, state: StepState) -> dict[str, Any]:
    return {"run_id": "r", "number": number, "state": state, "attempt": 1, "dispatched_at": NOW}


def fence(number: int) -> Fence:
    return Fence(
        id="f",
        number=number,
        attempt=1,
        tool="pay",
        effect=PLAIN,
        owner="host/boot/1-1/x",
        stamped_at=NOW,
        deadline_at=NOW + timedelta(seconds=30),
        settles_within_seconds=0,
    )


def probe(number: int, sequence: int = 7) -> Event:
    return Event(
        run_id="r",
        sequence=sequence,
        at=NOW,
        kind="probe.answered",
        number=number,
        attempt=1,
        actor="worker",
        data={"answer": "can't tell"},
    )


def recorded(*steps: Step, calls: Mapping[int, int] | None = None, **values: Any) -> Recorded:
    in_doubt = values.pop("fence", None)
    extra = {name: values.pop(name) for name in ("probes", "copies", "never_made") if name in values}
    run = Run(
        id="r",
        agent="support",
        input="x",
        status=RunStatus.FAILED,
        mode=RunMode.QUEUED,
        created_at=NOW,
        pending_effect=in_doubt,
        steps=steps,
    )
    return Recorded(run=replace(run, **values), calls=calls or {}, **extra)


TABLE = [
    pytest.param(call(2), {}, Fate.RECORDED, id="a recorded read"),
    pytest.param(call(2, effect=PLAIN), {2: 1}, Fate.RECORDED, id="a recorded write"),
    pytest.param(call(2, DEAD), {}, Fate.READ, id="a read that failed"),
    pytest.param(turn(2, DEAD), {}, Fate.READ, id="a turn that failed"),
    pytest.param(call(2, CLOSED, dispatched_at=None), {}, Fate.NOT_CALLED, id="a read that waited"),
    pytest.param(call(2, CLOSED, dispatched_at=None, attempt=2), {}, Fate.READ, id="a read that waits once more"),
    pytest.param(call(2, DEAD, KEYED), {2: 1}, Fate.SAME_KEY, id="a keyed write that was called"),
    pytest.param(call(2, DEAD, KEYED), {}, Fate.NOT_CALLED, id="a keyed write that wasn't"),
    pytest.param(call(2, CLOSED, PLAIN), {2: 0}, Fate.NOT_CALLED, id="a plain write whose fence was taken back"),
    pytest.param(
        call(2, DEAD, PLAIN, ruling=Decision.DID_NOT_HAPPEN),
        {2: 1},
        Fate.DID_NOT_HAPPEN,
        id="a plain write that did not happen",
    ),
    pytest.param(call(2, DEAD, PLAIN), {2: 1}, Fate.BLOCKED, id="a plain write that was given up"),
]


@pytest.mark.parametrize(("step", "calls", "fate"), TABLE)
def test_what_a_replay_does_with_a_step(step: Step, calls: Mapping[int, int], fate: Fate) -> None:
    """Whoever reads it decides on it: each line must be what will be done."""
    plan = plan_replay(recorded(turn(1), step, calls=calls), refusal=None)
    assert [planned.fate for planned in plan.steps][:2] == [Fate.RECORDED, fate]


@pytest.mark.parametrize("effect", [PLAIN, KEYED])
def test_a_standing_fence_blocks_whatever_the_effect(effect: ToolEffect) -> None:
    """With what is known about the call, and what its probe said."""
    known = recorded(turn(1), call(2, DEAD, effect), calls={2: 1}, fence=fence(2), probes=[probe(2), probe(1)])
    blocked = plan_replay(known, refusal="decide first").steps[1]
    assert (blocked.fate, blocked.fence, blocked.probes) == (Fate.BLOCKED, fence(2), (probe(2),))
    assert blocked.arguments == {"order": 2}


def test_what_follows_the_recorded_steps_is_part_of_the_plan() -> None:
    """Also where nothing of what is there is to be done again."""
    calls_made = plan_replay(recorded(turn(1), call(2)), refusal=None)
    assert [(step.number, step.kind, step.fate) for step in calls_made.steps[2:]] == [
        (3, StepKind.MODEL, Fate.NOT_CALLED)
    ]
    answered = plan_replay(recorded(turn(1)), refusal=None)
    assert "completes the run" in answered.then and len(answered.steps) == 1
    asks = {"content": None, "tool_calls": [{"id": "c", "function": {"name": "pay", "arguments": "{}"}}]}
    asked = plan_replay(recorded(turn(1, result=asks)), refusal=None)
    assert [(step.number, step.tool, step.effect) for step in asked.steps[1:]] == [(2, "pay", PLAIN)]


def test_tokens_are_what_the_turn_used_or_what_the_one_before_did() -> None:
    """A turn that failed reports none; it reads at least what the last one read and wrote."""
    first = turn(1, usage=Usage(input_tokens=100, output_tokens=20))
    assert plan_replay(recorded(first, call(2), turn(3, DEAD)), refusal=None).tokens_again == 120
    assert plan_replay(recorded(turn(1, DEAD)), refusal=None).tokens_again == 0
    last = turn(3, usage=Usage(input_tokens=150, output_tokens=5))
    copied = plan_copy(recorded(first, call(2), last), Copying(from_step=3), refusal=None)
    assert copied.tokens_again == 155


BASE = recorded(turn(1), call(2, DEAD, PLAIN), call(3, CLOSED), calls={2: 1}, fence=fence(2))
MOVED_ON = [
    pytest.param(replace(BASE, run=replace(BASE.run, status=RunStatus.RUNNING)), id="another status"),
    pytest.param(replace(BASE, run=replace(BASE.run, cancel_requested=True)), id="a cancel"),
    pytest.param(replace(BASE, run=replace(BASE.run, has_contradiction=True)), id="a contradiction"),
    pytest.param(replace(BASE, run=replace(BASE.run, pending_effect=None)), id="no fence"),
    pytest.param(replace(BASE, run=replace(BASE.run, pending_effect=replace(fence(2), id="g"))), id="another fence"),
    pytest.param(replace(BASE, probes=[probe(2)]), id="a probe's answer"),
    pytest.param(replace(BASE, copies=[probe(2)]), id="a copy"),
    *(
        pytest.param(replace(BASE, run=replace(BASE.run, steps=(*BASE.run.steps[:2], step))), id=name)
        for name, step in {
            "an attempt": call(3, CLOSED, attempt=2),
            "a result": call(3),
            "arguments": call(3, CLOSED, arguments={"order": 4}),
            "a doubt": call(3, CLOSED, may_have_happened=True),
        }.items()
    ),
]


@pytest.mark.parametrize("other", MOVED_ON)
def test_the_digest_changes_with_what_the_plan_depends_on(other: Recorded) -> None:
    """A replay that is bound to it must not do what nobody has read."""
    assert plan_replay(other, refusal=None).digest != plan_replay(BASE, refusal=None).digest


def test_the_digest_is_the_same_for_the_same_plan() -> None:
    """Times and refusals are no part of it: a plan is read, and bound to a minute later."""
    later = replace(BASE, run=replace(BASE.run, finished_at=NOW, error="other words"))
    assert plan_replay(later, refusal="x").digest == plan_replay(BASE, refusal=None).digest
    one, two = (
        plan_copy(BASE, Copying(from_step=2, repeat_writes=w), refusal=None) for w in (frozenset[int](), frozenset({2}))
    )
    assert len({one.digest, two.digest, plan_replay(BASE, refusal=None).digest}) == 3


COPIED = recorded(
    turn(1),
    call(2, batch=1),
    call(3, batch=1),
    call(4, effect=PLAIN, batch=2),
    call(5, effect=PLAIN, batch=3, is_error=True, result="no such order"),
    turn(6),
    calls={4: 1, 5: 1},
)


@pytest.mark.parametrize(
    ("copying", "error", "told"),
    [
        (Copying(from_step=1, repeat_writes=frozenset({4})), None, ""),
        (Copying(from_step=2, repeat_writes=frozenset({4})), None, ""),
        (Copying(from_step=5), None, ""),  # Its error says that nothing happened.
        (Copying(from_step=6), None, ""),
        (Copying(from_step=4), RefusedError, "pay (step 4); accept each by name: --repeat-write 4"),
        (Copying(from_step=3), InvalidInputError, "begins at 2"),
        (Copying(from_step=7), InvalidInputError, "its steps are 1 to 6"),
        (Copying(from_step=6, repeat_writes=frozenset({4})), InvalidInputError, "step 4 of run 'r' is no write"),
        (Copying(from_step=1, repeat_writes=frozenset({4, 5})), InvalidInputError, "step 5 of run 'r' is no write"),
    ],
)
def test_where_a_copy_may_begin(copying: Copying, error: type[Exception] | None, told: str) -> None:
    """What was written is not written again by a slip."""
    refusal = refusal_to_copy(COPIED, copying)
    assert type(refusal) is (error or type(None)) and told in str(refusal or "")


def test_calls_that_were_never_made_keep_their_error_in_a_copy() -> None:
    """There was no such tool: no write of theirs needs to be accepted."""
    known = recorded(turn(1), call(2, effect=PLAIN, is_error=True), turn(3), never_made={2})
    plan = plan_copy(known, Copying(from_step=2), refusal=None)
    assert [step.fate for step in plan.steps] == [Fate.RECORDED, Fate.RECORDED, Fate.DECIDED_ANEW]
    assert refusal_to_copy(known, Copying(from_step=2)) is None
