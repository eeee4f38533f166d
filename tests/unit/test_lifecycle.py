"""The transition table, and its picture."""

from itertools import product

import pytest

from agentq.domain.lifecycle import (
    RUN_TRANSITIONS,
    STEP_TRANSITIONS,
    RunChange,
    StepChange,
    mermaid,
    run_after,
    run_sources,
    step_after,
    step_sources,
)
from agentq.domain.model import RunStatus, StepState


def reachable(transitions: object, *, known: set[object]) -> set[object]:
    """Every state that some chain of changes leads to."""
    while True:
        grown = known | {each.target for each in transitions if each.source in known}  # type: ignore[attr-defined]
        if grown == known:
            return known - {None}
        known = grown


def test_every_status_but_the_reserved_one_is_reached() -> None:
    """A status that nothing leads to would be dead code; the reserved one is there for readers of a later version."""
    assert set(RunStatus) - {RunStatus.WAITING_FOR_APPROVAL} == reachable(RUN_TRANSITIONS, known={None})
    assert set(StepState) == reachable(STEP_TRANSITIONS, known={None})


def test_every_run_can_still_end() -> None:
    """A status without a way to an end would hold its runs for ever."""
    ends = {RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED}
    for status in reachable(RUN_TRANSITIONS, known={None}):
        assert ends & reachable(RUN_TRANSITIONS, known={status})


def test_a_change_names_one_state_at_most() -> None:
    """The table is read as a function: two answers would be none."""
    for transitions in (RUN_TRANSITIONS, STEP_TRANSITIONS):
        keys = [(each.source, each.change) for each in transitions]
        assert sorted(map(str, set(keys))) == sorted(map(str, keys))


def test_completed_and_cancelled_runs_and_completed_steps_never_change() -> None:
    """A recorded result is the truth; a cancelled run is never resumed."""
    for change, status in product(RunChange, (RunStatus.COMPLETED, RunStatus.CANCELLED)):
        with pytest.raises(ValueError, match="can't be made"):
            run_after(change, status)
    for step_change in StepChange:
        with pytest.raises(ValueError, match="can't be made"):
            step_after(step_change, StepState.COMPLETED)


def test_a_failed_run_goes_on_only_by_a_replay_or_a_dead_letter_that_was_none() -> None:
    """Nothing else may revive a dead letter."""
    assert {RunChange.REPLAY, RunChange.WITHDRAW} == {
        each.change for each in RUN_TRANSITIONS if (each.source, each.target) == (RunStatus.FAILED, RunStatus.RUNNING)
    }


def test_a_change_names_its_sources_and_its_target() -> None:
    """Stores guard their statements by the one and write the other."""
    assert run_sources(RunChange.CANCEL) == (RunStatus.QUEUED, RunStatus.RUNNING)
    assert step_sources(StepChange.REPLAY) == (StepState.DEAD_LETTERED, StepState.CLOSED)
    assert run_after(RunChange.REPLAY, RunStatus.FAILED) == RunStatus.RUNNING
    assert step_after(StepChange.REPLAY, StepState.CLOSED) == StepState.WAITING


def test_the_picture_holds_every_transition_and_the_ends() -> None:
    """The README's picture is made from the table, so that it can't say otherwise."""
    lines = mermaid(RUN_TRANSITIONS).splitlines()

    assert lines[0] == "stateDiagram-v2"
    assert "    [*] --> queued: enqueue" in lines
    assert "    failed --> running: replay" in lines
    assert "    completed --> [*]" in lines
    assert "    failed --> [*]" not in lines  # A person may still replay it.
    assert 1 + len(RUN_TRANSITIONS) + 2 == len(lines)


def test_the_picture_s_labels_hold_one_colon_a_line() -> None:
    """A second colon would end up as part of no label."""
    for line in mermaid(STEP_TRANSITIONS).splitlines():
        assert line.count(":") <= 1
