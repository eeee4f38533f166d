"""A worker and what is paused: it makes no call, spends nothing, and notices within a second."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentq.adapters.sql.engine import Database
from agentq.domain.effects import ToolEffect
from agentq.domain.model import StepState
from agentq.domain.tools import Tool, tool
from agentq.services.pauses import REMEMBERED_SECONDS
from tests.support import spine
from tests.support.databases import fresh_sqlite
from tests.support.spine import Spine
from tests.support.stage import Stage

SECOND_CALL = 3


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Spine]]:
    with fresh_sqlite(tmp_path) as url:
        stage = Stage(database=Database(url))
        with spine.opened(stage) as make:
            yield make
        stage.database.dispose()


def counted(calls: list[str]) -> tuple[Tool, Tool]:
    @tool
    def look() -> str:
        """Look it up."""
        calls.append("look")
        return "found"

    @tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
    def pay() -> str:
        """Pay it back."""
        calls.append("pay")
        return "paid"

    return look, pay


def test_a_paused_write_is_not_called_and_runs_once_it_is_resumed(make: Callable[..., Spine]) -> None:
    """The reason for a pause: not one more payment, and not one lost."""
    calls: list[str] = []
    spine = make(*counted(calls))
    run_id = spine.asked("pay")
    spine.stage.pausing.pause("pay", None, reads=False, actor="ann", reason="")
    assert spine.execute(run_id).wakeups == ()
    assert calls == []
    assert (spine.step(run_id).state, spine.step(run_id).tries) == (StepState.AVAILABLE, 0)
    assert len(spine.events(run_id, "step.parked")) == 1

    spine.stage.pausing.resume("pay", None, actor="ann", reason="")
    spine.execute(run_id)
    assert calls == ["pay"]
    assert spine.step(run_id).state is StepState.COMPLETED


def test_reads_go_on_unless_they_are_asked_to_wait(make: Callable[..., Spine]) -> None:
    """A service that takes no writes often still answers; one that is down altogether is left alone."""
    calls: list[str] = []
    spine = make(*counted(calls))
    run_id = spine.asked("look", "look")
    spine.stage.pausing.pause(None, None, reads=False, actor="ann", reason="")
    spine.execute(run_id)
    assert calls == ["look"]

    spine.stage.pausing.pause("look", None, reads=True, actor="ann", reason="")
    spine.clock.now += REMEMBERED_SECONDS
    spine.execute(run_id, SECOND_CALL)
    assert calls == ["look"]
    assert len(spine.events(run_id, "step.parked")) == 1


def test_a_process_asks_for_pauses_at_most_once_a_second(make: Callable[..., Spine]) -> None:
    """A read costs one commit and one load; a question for each would be a third of its round trips more."""
    spine = make(*counted([]))
    run_id = spine.asked("look", "look")
    spine.execute(run_id)
    spine.execute(run_id, SECOND_CALL)
    assert spine.steps.script.calls.count("pauses") == 1


def test_a_tool_that_nobody_knows_waits_too_while_it_is_paused(make: Callable[..., Spine]) -> None:
    """It would fail closed as an error result; the pause says that somebody is at it."""
    spine = make(*counted([]))
    run_id = spine.asked("pay")
    spine.know()
    spine.stage.change_step(run_id, 2, handed_back_since=spine.run(run_id).created_at.replace(year=2020))
    spine.stage.pausing.pause("pay", None, reads=False, actor="ann", reason="")
    spine.execute(run_id)
    assert spine.step(run_id).state is StepState.AVAILABLE
    assert len(spine.events(run_id, "step.parked")) == 1
