"""Pauses: tools that people have switched off for a while, and the steps that wait for that."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from agentq.domain.model import Run, Step, StepState


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Calls of that tool, for that agent, wait. None: of every tool, for every agent. Reads only wait with `reads`."""

    tool: str | None
    agent: str | None
    reads: bool
    paused_at: datetime
    paused_by: str
    reason: str

    def stops(self, *, agent: str, tool: str, is_write: bool) -> bool:
        """A call of that tool for a run of that agent has to wait."""
        is_meant = self.tool in (None, tool) and self.agent in (None, agent)
        return is_meant and (is_write or self.reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A step that waits because its tool is paused."""

    step: Step
    pause: Pause


def parked_steps(run: Run, pauses: Sequence[Pause]) -> list[Parked]:
    """The open calls of that run that wait for a pause to end; one whose write is in flight already isn't stopped."""
    fenced = None if run.pending_effect is None else run.pending_effect.number
    parked = []
    for step in run.steps:
        if step.state is not StepState.AVAILABLE or step.tool is None or step.number == fenced:
            continue
        pause = pause_of(pauses, agent=run.agent, tool=step.tool, is_write=step.effect.is_write)
        if pause is not None:
            parked.append(Parked(step=step, pause=pause))
    return parked


def pause_of(pauses: Sequence[Pause], *, agent: str, tool: str, is_write: bool) -> Pause | None:
    """The first that stops such a call."""
    return next((each for each in pauses if each.stops(agent=agent, tool=tool, is_write=is_write)), None)
